"""`serve container` becomes Triton, and `serve health` says how it is. tests/deploy does both in a real container."""

import argparse
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from serve import shared_memory
from serve.__main__ import COMMANDS
from serve.protocol import Unreachable
from serve.release import Release
from serve.server import TRITON, Ports, free_ports
from slipway import hashing, sealed
from slipway.paths import PROJECT_ROOT
from tests.serve.tools import wait_until, wait_until_gone

PROGRAM = TRITON / "pytriton" / "tritonserver"


@pytest.fixture(autouse=True)
def own_folder_of_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a container it goes with the container."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))


def serve(*arguments: str, path: Path | str = PROGRAM / "bin") -> "subprocess.Popen[str]":
    """Start `python -m serve`, where the Triton of the wheel is found as it is in a container."""
    search = os.pathsep.join([str(path), str(Path(sys.executable).parent), os.environ["PATH"]])
    return subprocess.Popen(
        [sys.executable, "-m", "serve", *arguments],
        cwd=PROJECT_ROOT,
        env={**os.environ, "PATH": search},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@contextmanager
def contained(release: Release, ports: Ports) -> Iterator["subprocess.Popen[str]"]:
    arguments = [
        f"--backend-directory={PROGRAM / 'backends'}",
        f"--http-port={ports.http}",
        f"--grpc-port={ports.grpc}",
        f"--metrics-port={ports.metrics}",
        *(f"--{kind}-address=127.0.0.1" for kind in ("http", "grpc", "metrics")),
    ]
    traces = ["--traces", "http://127.0.0.1:1/v1/traces"]
    process = serve("container", "--release", str(release.directory), *traces, "--", *arguments)
    try:
        yield process
    finally:
        # The processes of its models, too, as the kernel does when the first process of a container ends.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def health(release: Release, ports: Ports) -> tuple[int, str]:
    urls = [f"--{name}=127.0.0.1:{port}" for name, port in vars(ports).items()]
    process = serve("health", "--release", str(release.directory), *urls)
    _, errors = process.communicate(timeout=120)
    return process.returncode, errors


def own_shared_memory(process: "subprocess.Popen[str]") -> set[Path]:
    (prefix,) = (
        word.partition("shm-region-prefix-name=")[2]
        for word in Path(f"/proc/{process.pid}/cmdline").read_text().split("\0")
        if "shm-region-prefix-name" in word
    )
    return set(shared_memory.DIRECTORY.glob(f"{prefix}*"))


@pytest.mark.integration
def test_it_becomes_triton_is_probed_and_stops_cleanly(release: Release) -> None:
    ports = free_ports()
    with contained(release, ports) as process:
        wait_until(lambda: process.poll() is not None or health(release, ports)[0] == 0)
        assert Path(f"/proc/{process.pid}/exe").resolve() == (PROGRAM / "bin" / "tritonserver").resolve()
        told = Path(f"/proc/{process.pid}/cmdline").read_text().split("\0")
        assert "--trace-config=opentelemetry,url=http://127.0.0.1:1/v1/traces" in told
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    code, errors = health(release, ports)
    assert code == 1
    assert f"error: 127.0.0.1:{ports.metrics}: no metrics can be read there" in errors
    sealed.verify(release.directory, "release")  # Triton's byte code did not go into it


@pytest.mark.integration
def test_its_shared_memory_is_its_own_until_it_is_killed(release: Release) -> None:
    """Case D06: Kubernetes keeps the volume when it starts a container again, and the next one cleans up first."""
    ports = free_ports()
    with contained(release, ports) as process:
        wait_until(lambda: process.poll() is not None or health(release, ports)[0] == 0)
        memory = own_shared_memory(process)
        assert len(memory) > 1
        shared_memory.remove_abandoned()
        assert all(path.exists() for path in memory)
        models = psutil.Process(process.pid).children()
    wait_until_gone([model.pid for model in models])

    def cleaned_up() -> bool:
        shared_memory.remove_abandoned()
        return not any(path.exists() for path in memory)

    wait_until(cleaned_up)  # its lock is free when the last of its threads has gone


def test_a_probe_does_not_read_the_model_again(release: Release, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have gigabytes, and comes every few seconds."""
    read = []

    def of_file(path: Path) -> str:
        read.append(path.relative_to(release.models).parts[0] if release.models in path.parents else "")
        return hash_of_file(path)

    hash_of_file = hashing.of_file
    monkeypatch.setattr(hashing, "of_file", of_file)
    urls = {name: f"127.0.0.1:{port}" for name, port in vars(free_ports()).items()}
    with pytest.raises(Unreachable):
        COMMANDS["health"].run(argparse.Namespace(release=release.directory, **urls))
    assert set(read) == {"", "classify", "preprocess"}


def test_damaged_release_is_not_served(release: Release, tmp_path: Path) -> None:
    copy = tmp_path / "release"
    shutil.copytree(release.directory, copy)
    (copy / "models" / "extra").mkdir()
    (copy / "models" / "extra" / "file").touch()
    process = serve("container", "--release", str(copy))
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "extra/file" in errors


def test_missing_triton_is_named(release: Release) -> None:
    process = serve("container", "--release", str(release.directory), path="/nowhere")
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "tritonserver was not found; this is what runs in a container, see `python -m serve up`" in errors

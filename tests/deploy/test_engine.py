"""A private container engine really runs containers, and nothing of it is left, however it ends."""

import fcntl
import io
import os
import socket
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import IO, NoReturn

import docker
import psutil
import pytest

from deploy import engine
from deploy.engine import CGROUPS, PREFIX, NoEngine
from slipway.paths import PROJECT_ROOT
from tests.programs import require
from tests.serve.tools import wait_until

SLEEP = "/usr/bin/sleep"


@pytest.fixture
def only_private(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no other engine, and one may be started."""
    require(*engine.NEEDED)
    if os.geteuid() != 0:
        pytest.skip("only root can start a container engine")
    monkeypatch.delenv("DOCKER_HOST", raising=False)
    monkeypatch.setattr(engine, "USUAL_SOCKET", Path("/nowhere"))


def run_sleep(client: docker.DockerClient) -> None:
    """A container of nothing but `sleep`, on a network of its own."""
    libraries = subprocess.run(["ldd", SLEEP], capture_output=True, text=True, check=True).stdout.split()
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as files:
        for name in [SLEEP, *(word for word in libraries if word.startswith("/"))]:
            files.add(Path(name).resolve(), name)
    client.api.import_image_from_data(archive.getvalue(), repository="slipway-sleep")
    network = client.networks.create("slipway-sleep")
    client.containers.run("slipway-sleep", [SLEEP, "86400"], detach=True, network=network.name)


def sleeping(name: str) -> psutil.Process:
    """The `sleep` of the engine with this folder, in the group that is named after it."""
    (group,) = CGROUPS.glob(f"pids/{name}/*/cgroup.procs")
    return psutil.Process(int(group.read_text()))


def traces(name: str) -> list[str]:
    """What there is of an engine by the name of its folder: on the disk, mounts, groups of processes, processes."""
    mounts = [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if name in line]
    commands = [" ".join(one.info["cmdline"] or []) for one in psutil.process_iter(["cmdline"])]
    paths = [*Path("/tmp").glob(name), *CGROUPS.glob(name), *CGROUPS.glob(f"*/{name}")]
    return [*mounts, *map(str, paths), *(command for command in commands if name in command)]


def bridge_of(host: str) -> Path:
    with engine.client(host) as client:
        (network,) = client.networks.list(names=["slipway-sleep"])
    bridge = Path(f"/sys/class/net/br-{network.id[:12]}")
    assert bridge.exists()
    return bridge


@pytest.mark.integration
def test_nothing_is_left_of_a_private_engine_and_its_containers(only_private: None) -> None:
    with engine.running() as host:
        folder = Path(host.removeprefix("unix://")).parent
        with engine.client(host) as client:
            run_sleep(client)
        process, bridge = sleeping(folder.name), bridge_of(host)
        assert traces(folder.name)
    wait_until(lambda: not process.is_running())
    assert not traces(folder.name)
    assert not bridge.exists()


@pytest.mark.integration
def test_engine_of_a_killed_process_is_killed_and_the_next_one_removes_its_folder(only_private: None) -> None:
    program = (
        "from deploy import engine\nfrom tests.deploy.test_engine import run_sleep\n"
        "with engine.private() as host, engine.client(host) as client:\n"
        "    run_sleep(client)\n    print(host, flush=True)\n    input()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=PROJECT_ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        host = process.stdout.readline().strip()
        folder = Path(host.removeprefix("unix://")).parent
        sleep, bridge = sleeping(folder.name), bridge_of(host)
        process.kill()
    wait_until(lambda: not sleep.is_running())
    assert folder.exists()
    with engine.private():
        assert not traces(folder.name)
        assert not bridge.exists()


def test_engine_that_is_about_to_start_is_not_taken_for_an_abandoned_one(
    only_private: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody else starts one at the worst moments: just before its folder is locked, and after."""
    lock, left_alone = fcntl.flock, []

    def come(folder: Path) -> None:
        engine.remove_abandoned()
        left_alone.append(folder.exists())

    def lock_late(file: IO[str], how: int) -> None:
        if how == fcntl.LOCK_EX:
            come(Path(file.name).parent)
        lock(file, how)

    def start(folder: Path, *_: Path) -> NoReturn:
        come(folder)
        raise NoEngine("enough")

    monkeypatch.setattr(fcntl, "flock", lock_late)
    monkeypatch.setattr(engine, "_start", start)
    with pytest.raises(NoEngine, match="enough"), engine.private():
        pass
    assert left_alone == [True, True]


@pytest.mark.integration
def test_engine_that_runs_is_used(docker_host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", docker_host)
    with engine.running() as host:
        assert host == docker_host
    with engine.client(docker_host) as client:
        assert client.ping()


def test_engine_that_was_asked_for_and_is_not_there_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = f"unix://{tmp_path / 'docker.sock'}"
    monkeypatch.setenv("DOCKER_HOST", host)
    with (
        pytest.raises(NoEngine, match=f"DOCKER_HOST is {host}, and no container engine answers"),
        engine.running(),
    ):
        pass


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_who_may_not_use_the_engine_that_runs_is_told_its_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = tmp_path / "docker.sock"
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(usual))
        listening.listen()
        usual.chmod(0o660)
        os.chown(usual, 0, 4321)
        monkeypatch.delenv("DOCKER_HOST", raising=False)
        monkeypatch.setattr(engine, "USUAL_SOCKET", usual)
        monkeypatch.setattr(
            os, "access", lambda *_: False
        )  # as it is for others: to become one is to stay one
        with pytest.raises(NoEngine, match=r"docker.sock: you may not use .* the group with the id 4321"):
            engine.existing()


def test_missing_program_is_named(only_private: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scripts.programs.SEARCHED", "/nowhere")
    with (
        pytest.raises(NoEngine, match=r"to start one dockerd, unshare, ip was not found; .* `make programs`"),
        engine.running(),
    ):
        pass


def test_nobody_but_root_starts_an_engine(only_private: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(NoEngine, match="only root can start one"), engine.running():
        pass


@pytest.mark.integration
def test_reason_of_an_engine_that_does_not_start_is_shown(
    only_private: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = set(Path("/tmp").glob(f"{PREFIX}*"))
    monkeypatch.setattr(engine, "CGROUP_DRIVER", "nonsense")
    with (
        pytest.raises(NoEngine, match=r"(?s)ended by itself; the end of its log:\n.*nonsense"),
        engine.running(),
    ):
        pass
    assert set(Path("/tmp").glob(f"{PREFIX}*")) <= before

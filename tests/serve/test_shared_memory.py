"""Shared memory of dead servers is removed, and nobody else's."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from serve import shared_memory
from serve.release import Release
from slipway.paths import PROJECT_ROOT
from tests.programs import cannot_run


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(shared_memory, "DIRECTORY", tmp_path)
    return tmp_path


def left_in(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def test_it_stays_while_somebody_holds_what_he_inherited(directory: Path) -> None:
    with shared_memory.owned("slipway-1") as ownership:
        inherited = os.dup(ownership)  # as a child has it
    (directory / "slipway-1-region").touch()
    shared_memory.remove_abandoned()
    assert left_in(directory) == {"slipway-1.lock", "slipway-1-region"}
    os.close(inherited)
    shared_memory.remove_abandoned()
    assert left_in(directory) == set()


def test_what_is_not_ours_or_has_no_lock_stays(directory: Path) -> None:
    others = {"triton_python_backend_shm_region_1", "slipway-2-region", "other.lock", "slipway-.lock"}
    for name in others:
        (directory / name).touch()
    shared_memory.remove_abandoned()
    assert left_in(directory) == others


def test_what_cannot_be_removed_hinders_no_server(directory: Path) -> None:
    """Others may put things there, under names of ours too."""
    with shared_memory.owned("slipway-1"):
        (directory / "slipway-1-region").mkdir()
    shared_memory.remove_abandoned()
    assert (directory / "slipway-1-region").is_dir()


def test_too_little_is_said_with_what_is_needed(
    directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Case D06."""
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=64 * 2**20))
    shared_memory.warn_if_less_than(64 * 2**20)
    assert not caplog.text
    shared_memory.warn_if_less_than(512 * 2**20)
    assert "has 64 MB free, and the largest requests may need 512 MB" in caplog.text
    assert "--shm-size=512m" in caplog.text


# As in a container with too little; what one large image needs is there, what eight need is not.
EXHAUST = """
import sys
from pathlib import Path
from serve.client import CLIENTS
from serve.protocol import ServerFailure
from serve.release import open_release
from serve.server import serving
from tests import images

large = images.encode(images.noise(1, 1500, 1500), compress_level=1)
with serving(open_release(Path(sys.argv[1]))) as server:
    for protocol, url in server.urls.items():
        with CLIENTS[protocol](url) as client:
            try:
                client.classify([large] * 8)
            except ServerFailure as error:
                assert "--shm-size" in str(error), error
            else:
                raise AssertionError("there was room")
            for k in range(12):
                assert client.classify([images.flat(k)])[0].label == str(k)
"""


@pytest.mark.integration
def test_a_request_that_finds_no_shared_memory_is_an_error_and_the_next_ones_are_answered(
    release: Release,
) -> None:
    """Case D06."""
    trial = ["unshare", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/dev/shm"]
    tried = subprocess.run(trial, check=False, capture_output=True, text=True)
    if tried.returncode != 0:
        cannot_run(f"another /dev/shm cannot be mounted here: {tried.stderr.strip()}")
    mount = 'mount -t tmpfs -o size=16m tmpfs /dev/shm && exec "$@"'
    command = ["unshare", "--mount", "sh", "-c", mount, "sh", sys.executable, "-c", EXHAUST]
    subprocess.run([*command, str(release.directory)], check=True, cwd=PROJECT_ROOT)

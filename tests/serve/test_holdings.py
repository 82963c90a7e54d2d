"""What a service holds is looked at while servers come and go, by more than one thread."""

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from serve import shared_memory
from tests.serve.holdings import Watch
from tests.serve.service import Service
from tests.serve.tools import wait_until


@contextmanager
def server(name: str) -> Iterator["subprocess.Popen[bytes]"]:
    """Is called as one, and does nothing."""
    process = subprocess.Popen([f"tritonserver --id={name}", "3600"], executable=shutil.which("sleep"))
    try:
        # The kernel says for a moment that a program that it has just begun has no arguments.
        wait_until(lambda: bool(psutil.Process(process.pid).cmdline()))
        yield process
    finally:
        process.kill()
        process.wait()


def watch(process: "subprocess.Popen[bytes]", folder: Path) -> Watch:
    return Watch(Service(process=process, log=folder, models=folder, urls={}, probe_seconds=1), folder)


def test_look_sees_nothing_of_what_has_ended(tmp_path: Path) -> None:
    with server("one") as process:
        one = watch(process, tmp_path)
        holdings = one.look()
        assert holdings
        assert (holdings.processes, holdings.servers) == (1, 1)
    assert one.look() is None


def test_another_server_may_be_seen_while_somebody_looks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with server("one") as first, server("two") as second:
        one = watch(first, tmp_path)
        seen = [psutil.Process(first.pid)]

        def regions(pattern: str) -> list[str]:
            """As if another thread looked right now."""
            if len(seen) == 1:
                seen.append(psutil.Process(second.pid))
                assert one.look()
            return [pattern]

        monkeypatch.setattr(Service, "processes", lambda self: list(seen))
        monkeypatch.setattr(shared_memory, "DIRECTORY", SimpleNamespace(glob=regions))
        holdings = one.look()
        assert holdings
        assert (holdings.servers, holdings.regions) == (1, 1)
        holdings = one.look()
        assert holdings
        assert (holdings.servers, holdings.regions) == (2, 2)

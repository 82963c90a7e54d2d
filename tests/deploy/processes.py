"""Servers that tests start: on a port that is really theirs, and gone in the end, also when the test is killed."""

import shutil
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import psutil

from scripts import programs
from serve import tether
from serve.server import LOOPBACK, free_ports
from tests.serve.tools import wait_until

ATTEMPTS = 5


@contextmanager
def listening(program: str, options: Callable[[str], list[str]], ready: str, log: Path) -> Iterator[str]:
    """Run a program with the options that it needs to listen at an address; yields that address, host:port.

    ready: path of an HTTP request that is answered with 200 once it is ready.
    """
    path = shutil.which(program, path=programs.SEARCHED)
    assert path is not None
    for attempt in range(ATTEMPTS):
        address = f"{LOOPBACK}:{free_ports().http}"
        with log.open("wb") as output:
            process = subprocess.Popen(
                tether.command(Path(path), *options(address)), stdout=output, stderr=subprocess.STDOUT
            )
        try:
            wait_until(partial(ended_or_answers, process, address, ready))
            if process.poll() is None:
                yield address
                return
            # Somebody else may have taken the port meanwhile; anything else fails every time.
            assert attempt < ATTEMPTS - 1, log.read_text()
        finally:
            process.terminate()
            try:
                process.wait(60)
            finally:
                process.kill()
                process.wait()


def ended_or_answers(process: "subprocess.Popen[bytes]", address: str, ready: str) -> bool:
    if process.poll() is not None:
        return True
    with suppress(psutil.Error, OSError, urllib.error.HTTPError):
        own = {
            f"{one.laddr.ip}:{one.laddr.port}" for one in psutil.Process(process.pid).net_connections("tcp")
        }
        if address in own:
            with urllib.request.urlopen(f"http://{address}{ready}", timeout=10) as answer:
                return answer.status == 200
    return False

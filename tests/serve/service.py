"""`serve up` in a process of its own: what the tests share that disturb it, or watch it for long."""

import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from serve.server import LOOPBACK
from tests.serve.tools import PATIENCE, command_of, wait_until


@dataclass
class Service:
    """urls: protocol -> host:port, and `metrics`. models: the repository whose current release it serves."""

    process: "subprocess.Popen[bytes]"
    log: Path
    models: Path
    urls: dict[str, str]
    probe_seconds: float

    @property
    def settled(self) -> bool:
        """Whether every server that was to be replaced has been."""
        log = self.log.read_text()
        return log.rfind("from process") > log.rfind("starting another server")

    @property
    def server(self) -> int:
        """Process id of the server that gets the requests."""
        return int(re.findall(r"from process (\d+)", self.log.read_text())[-1])

    @property
    def replacements(self) -> int:
        """How often another server was to be started in the place of one that was not well."""
        return self.log.read_text().count("starting another server")

    def worker(self, model: str) -> psutil.Process:
        """One of the two processes that run a model."""
        children = psutil.Process(self.server).children()
        return next(child for child in children if f"/{model}/" in command_of(child))

    def processes(self) -> list[psutil.Process]:
        """`serve up` and all below it."""
        own = psutil.Process(self.process.pid)
        return [own, *own.children(recursive=True)]

    def serve(self, *arguments: str) -> int:
        command = [sys.executable, "-m", "serve", *arguments, "--repository", str(self.models)]
        return subprocess.run(command, check=False, capture_output=True, timeout=PATIENCE).returncode

    def lead_to(self, directory: Path) -> None:
        """Move `current` without asking anybody."""
        fresh = self.models / "fresh"
        fresh.symlink_to(directory)
        fresh.replace(self.models / "current")


@contextmanager
def up(models: Path, log: Path, probe_seconds: float, within: Sequence[str] = ()) -> Iterator[Service]:
    """Serve the current release of a repository until the block ends.

    within: a command that becomes the one which follows it, such as `env NAME=value`.
    """
    command = [*within, sys.executable, "-m", "serve", "up", "--release", str(models / "current")]
    with log.open("wb") as output:
        process = subprocess.Popen([*command, "--probe-seconds", str(probe_seconds)], stderr=output)
    try:
        wait_until(lambda: "Ctrl-C stops it" in log.read_text() or process.poll() is not None)
        assert process.poll() is None, log.read_text()
        found = re.findall(
            rf"^  (HTTP|gRPC|metrics) +(?:http://)?({LOOPBACK}:\d+)", log.read_text(), re.MULTILINE
        )
        yield Service(
            process=process,
            log=log,
            models=models,
            urls={name.lower(): url for name, url in found},
            probe_seconds=probe_seconds,
        )
    finally:
        process.terminate()
        try:
            process.wait(PATIENCE)
        finally:
            process.kill()  # and the kernel all below it
            process.wait()

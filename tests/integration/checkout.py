"""A checkout of our own, in a path with spaces, so that what tests produce lands nowhere else."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
PARTS = ("src", "train", "serve", "scripts", "configs", "requirements", "Makefile")


class Checkout:
    """A copy of the sources; the environments are linked, because making them takes minutes."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir(parents=True)
        for part in PARTS:
            source = ROOT / part
            if source.is_dir():
                ignored = shutil.ignore_patterns("__pycache__")
                shutil.copytree(source, directory / part, ignore=ignored)
            else:
                shutil.copy(source, directory / part)
        (directory / ".venv").symlink_to(ROOT / ".venv")

    def start(
        self, *arguments: str, cwd: Path | str = "/", variables: Mapping[str, str] | None = None
    ) -> "subprocess.Popen[str]":
        """Start `python <arguments>` with this checkout's packages before the installed ones.

        It leads a process group of its own; see `outcome`.
        """
        packages = {"PYTHONPATH": f"{self.directory / 'src'}:{self.directory}"}
        return subprocess.Popen(
            [sys.executable, *arguments],
            cwd=cwd,
            env={**os.environ, **packages, **(variables or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        return outcome(self.start(*arguments))


def outcome(process: "subprocess.Popen[str]", timeout: float = 600) -> "subprocess.CompletedProcess[str]":
    """Wait for a process of a Checkout. However that ends, nothing is left of its group."""
    try:
        output, errors = process.communicate(timeout=timeout)
    finally:
        end(process)
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


def end(process: "subprocess.Popen[str]") -> None:
    """Kill what is left of a process and of what it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()

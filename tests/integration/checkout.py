"""A checkout of our own, in a path with spaces, so that what tests produce lands nowhere else."""

import os
import shutil
import subprocess
import sys
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

    def start(self, *arguments: str, cwd: Path | str = "/") -> "subprocess.Popen[str]":
        """Start `python <arguments>` with this checkout's packages before the installed ones."""
        environment = {**os.environ, "PYTHONPATH": f"{self.directory / 'src'}:{self.directory}"}
        return subprocess.Popen(
            [sys.executable, *arguments],
            cwd=cwd,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        process = self.start(*arguments)
        output, errors = process.communicate(timeout=600)
        return subprocess.CompletedProcess(arguments, process.returncode, output, errors)

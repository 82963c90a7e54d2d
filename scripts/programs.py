"""Install the programs of requirements/debian.txt that are missing, with Debian's package manager.

    programs.py            install what is missing (as root, on Debian or Ubuntu)
    programs.py --check    only name what is missing; exit 1 if anything is

Standard library only. Services that a package would start are not started: tests start their own.
"""

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

LIST = Path(__file__).resolve().parents[1] / "requirements" / "debian.txt"
# Where root's programs are; an ordinary user's PATH may not name it.
SEARCHED = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="programs.py", description="Install requirements/debian.txt.")
    parser.add_argument("--check", action="store_true", help="install nothing; exit 1 if anything is missing")
    options = parser.parse_args(arguments)
    missing = missing_packages(LIST.read_text(encoding="utf-8"))
    if not missing:
        return 0
    command = "apt-get install --no-install-recommends " + " ".join(missing)
    if options.check or os.geteuid() != 0 or shutil.which("apt-get") is None:
        print(f"error: programs are missing; on Debian, as root: {command}", file=sys.stderr)
        return 1
    print(f"installing {', '.join(missing)}", file=sys.stderr, flush=True)
    return install(missing)


def missing_packages(text: str) -> list[str]:
    """The packages in the list (`package program` on a line, # before a comment) whose program is not found."""
    lines = [line.split() for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [package for package, program in lines if not is_there(program)]


def is_there(program: str) -> bool:
    """Whether a program is found by its name; or, given an absolute path, whether that file exists."""
    return (
        Path(program).is_file() if Path(program).is_absolute() else bool(shutil.which(program, path=SEARCHED))
    )


def install(packages: list[str]) -> int:
    """Install packages, asking nothing. Returns an exit code."""
    return run_apt("update") or run_apt("install", "--yes", "--no-install-recommends", *packages)


def run_apt(*arguments: str) -> int:
    """Run apt-get quietly; what it said is shown if it fails. Returns an exit code."""
    # Under this run level Debian's packages start no service.
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}
    command = ["apt-get", "--quiet=2", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"error: {' '.join(command)} failed:\n{done.stdout}{done.stderr}", file=sys.stderr)
    return 1 if done.returncode else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

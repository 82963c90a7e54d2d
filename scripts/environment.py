"""Make the environments of this checkout, under .venv/, from the locks in requirements/.

    environment.py train serve      the virtual environments of training and serving
    environment.py train --dev      the same, with the tools for tests and lint on top
    environment.py train --benchmark    the same, with what benchmarks compare with on top
    environment.py train --extras    the same, with what a configuration may name and most do not
    environment.py serve --dev --deploy    the same, with what checks and tests deploy/ on top
    environment.py serve --peers    the same, with the servers that ours is compared with
    environment.py server           the Triton server, a binary from a wheel, in a folder of its own

An environment that is up to date costs a look at its stamp. One whose lock, Python or place has changed, or
whose making was cut short, is made again from scratch. Two runs at once are safe: the second waits.

Standard library only, and old syntax: this is the first file to run, perhaps by the wrong Python.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

PYTHON = "3.11"
ROOT = Path(__file__).resolve().parents[1]
LINES_OF_OUTPUT = 20


class SetupError(Exception):
    """A sentence for the person who runs this."""


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="environment.py", description="Make the environments under .venv/.")
    choices = ["train", "serve", "server"]
    parser.add_argument("environments", nargs="+", choices=choices, metavar="|".join(choices))
    parser.add_argument("--dev", action="store_true", help="with the tools for tests and lint")
    parser.add_argument("--benchmark", action="store_true", help="with what benchmarks compare with")
    parser.add_argument("--peers", action="store_true", help="with the servers that ours is compared with")
    parser.add_argument("--extras", action="store_true", help="with what few configurations name")
    parser.add_argument("--deploy", action="store_true", help="with what checks and tests deploy/")
    options = parser.parse_args(arguments)
    tools = [layer for layer in ("dev", "benchmark", "extras", "deploy", "peers") if getattr(options, layer)]
    signal.signal(signal.SIGTERM, _exit_for_signal)
    try:
        require_python()
        for name in options.environments:
            if name == "server":
                ensure_server()
            else:
                ensure_environment(name, *tools)
    except (SetupError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return 0


def require_python() -> None:
    major, minor, _patch = platform.python_version_tuple()
    if f"{major}.{minor}" != PYTHON:
        raise SetupError(
            f"Slipway needs Python {PYTHON}, but {sys.executable} is Python {platform.python_version()}; "
            f"name another one, as in `make setup PYTHON=python{PYTHON}`"
        )


def ensure_environment(name: str, *tools: str) -> None:
    """Make `.venv/<name>` as its lock says, if it is not so already, and add the layers of tools."""
    folder = ROOT / ".venv" / name
    if folder.resolve() != folder:
        raise SetupError(
            f"{_shown(folder)} leads to {folder.resolve()}; an environment belongs to one checkout: remove the link"
        )
    layers = [name, *tools]
    with only_one(folder) as busy:
        missing = [layer for layer in layers if installed(folder, layer) != wanted(layer)]
        # A layer that was never begun goes on top; a stale or half-made one is not worth mending.
        if name in missing or any(installed(folder, layer) is not None for layer in missing):
            create_environment(folder, busy)
            missing = layers
        for layer in missing:
            with stamped(folder, layer):
                pip_install(folder, layer, busy)


def create_environment(folder: Path, busy: int) -> None:
    """A virtual environment that holds nothing yet but the way to this checkout's own packages."""
    remove(folder)
    step = f"{_shown(folder)}: making an environment of Python {platform.python_version()}"
    run(step, [sys.executable, "-m", "venv", str(folder)], busy)
    site_packages = folder / "lib" / f"python{PYTHON}" / "site-packages"
    # Instead of an editable install, which would need a build: these two lines are all that it does.
    (site_packages / "slipway.pth").write_text(f"{ROOT / 'src'}\n{ROOT}\n", encoding="utf-8")


def ensure_server() -> None:
    """Unpack the Triton server into `.venv/server`, ready to run models in Python, if it is not there already."""
    ensure_environment("serve")
    folder = ROOT / ".venv" / "server"
    with only_one(folder) as busy:
        if installed(folder, "server") == wanted("server"):
            return
        library = find_libpython()
        remove(folder)
        folder.mkdir()
        with stamped(folder, "server"):
            pip_install(ROOT / ".venv" / "serve", "server", busy, "--target", str(folder))
            connect_python(folder, library)


def connect_python(folder: Path, library: Path) -> None:
    """Give the server's Python backend the stub for this Python, and the stub its libpython.

    At this place the stub finds the libraries that came with it by their relative path. They are searched
    before the system's, so the link decides which Python runs the models: without it the loader takes the
    system's libpython, which need not be the one whose standard library the serving environment uses.
    """
    server = folder / "pytriton" / "tritonserver"
    stub = server / "python_backend_stubs" / PYTHON / "triton_python_backend_stub"
    shutil.copy2(stub, server / "backends" / "python")
    (folder / "nvidia_pytriton.libs" / library.name).symlink_to(library)


def find_libpython() -> Path:
    """The shared library of the Python that runs this. Raises SetupError, in words, if it has none."""
    name = f"libpython{PYTHON}.so.1.0"
    system_folder = Path(sysconfig.get_config_var("LIBDIR") or "/usr/lib")
    architecture = sysconfig.get_config_var("MULTIARCH") or ""
    folders = [Path(sys.base_prefix, "lib"), system_folder, system_folder / architecture]
    for folder in folders:
        if (folder / name).exists():
            return folder / name
    looked_in = ", ".join(sorted({str(folder) for folder in folders}))
    raise SetupError(
        f"{name} was not found (looked in {looked_in}), and Triton's Python backend cannot run without it. "
        f"On Debian and Ubuntu the package libpython{PYTHON} brings it; a Python built from source needs "
        "--enable-shared"
    )


def pip_install(environment: Path, layer: str, busy: int, *options: str) -> None:
    """Install a lock with the pip of `environment`. Locks are complete, so nothing else may come along."""
    lock = _lock(layer)
    step = f"{_shown(environment)}: installing {lock.relative_to(ROOT)}"
    if "--target" in options:
        step = f".venv/{layer}: unpacking {lock.relative_to(ROOT)}"
    # `python -m pip`, because a script cannot start where its first line names a path with a space. Isolated
    # from PYTHONPATH and the user's own packages, but not from pip's settings: they know the index.
    pip = [str(environment / "bin" / "python"), "-I", "-m", "pip", "install"]
    quiet = ["--quiet", "--no-input", "--disable-pip-version-check", "--no-warn-script-location"]
    run(step, [*pip, *quiet, "--no-deps", "--require-hashes", *options, "-r", str(lock)], busy)


def run(step: str, command: list[str], busy: int) -> None:
    """Announce and run one step; its output is shown only if it fails."""
    print(step, file=sys.stderr, flush=True)
    # The child holds the lock too: if this process is killed, the next run waits until the child has ended.
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        pass_fds=(busy,),
        check=False,
    )
    if done.returncode:
        tail = "\n".join(done.stdout.splitlines()[-LINES_OF_OUTPUT:])
        raise SetupError(f"{step}: failed with exit code {done.returncode}:\n{tail}")


@contextmanager
def only_one(folder: Path) -> Iterator[int]:
    """Let one run at a time work on `folder`; yields the file descriptor of the lock."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f".{folder.name}.busy").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"{_shown(folder)}: another run is making it; waiting", file=sys.stderr, flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield file.fileno()


@contextmanager
def stamped(folder: Path, layer: str) -> Iterator[None]:
    """Mark a layer as unfinished while it is being installed, and as what was wanted once it is complete."""
    stamp = _stamp(folder, layer)
    stamp.write_text("unfinished\n", encoding="utf-8")
    yield
    finished = stamp.with_suffix(".new")
    finished.write_text(json.dumps(wanted(layer), indent=2) + "\n", encoding="utf-8")
    finished.replace(stamp)


def installed(folder: Path, layer: str) -> dict[str, str] | None:
    """What a layer was made from: None if it was never begun, empty if it was begun and not finished."""
    try:
        return json.loads(_stamp(folder, layer).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError:
        return {}


def wanted(layer: str) -> dict[str, str]:
    """Everything that a layer is made from. A moved checkout counts: environments hold absolute paths."""
    return {
        "lock": hashlib.sha256(_lock(layer).read_bytes()).hexdigest(),
        "python": platform.python_version(),
        "python_prefix": sys.base_prefix,
        "checkout": str(ROOT),
    }


def remove(folder: Path) -> None:
    """Remove an environment, its stamps first: a removal that is cut short must not look finished."""
    for stamp in folder.glob("*.stamp"):
        stamp.unlink()
    if folder.exists():
        shutil.rmtree(folder)


def _lock(layer: str) -> Path:
    return ROOT / "requirements" / f"{layer}.lock"


def _stamp(folder: Path, layer: str) -> Path:
    return folder / f"{layer}.stamp"


def _shown(folder: Path) -> str:
    return os.path.relpath(folder, ROOT)


def _exit_for_signal(number: int, _frame: Any) -> NoReturn:
    sys.exit(128 + number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

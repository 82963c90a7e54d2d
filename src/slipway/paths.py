"""The one rule for relative paths.

A relative path typed on the command line starts where the person stands (the current directory). A relative
path in a config file, or a default, starts at the project root, so that every command gives the same result
from every directory. Nothing in Slipway changes the current directory.
"""

from pathlib import Path

PROJECT_ROOT = Path(__file__).resolve().parents[2]


def relative_to_project(path: Path) -> Path:
    """`path` as it should be written down: relative to the project root where it lies inside, else absolute."""
    absolute = (PROJECT_ROOT / path).resolve()
    return absolute.relative_to(PROJECT_ROOT) if absolute.is_relative_to(PROJECT_ROOT) else absolute

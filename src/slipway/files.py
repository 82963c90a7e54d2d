"""Single files that are there whole, as they were or as they are to be, whoever is killed when."""

import os
import uuid
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Put `text` (UTF-8) at `path` in one step, and on disk. Raises OSError, and then what was there stays."""
    temporary = path.with_name(f".{path.name}-{uuid.uuid4().hex[:8]}")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
        fsync(temporary)
        temporary.replace(path)
        fsync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def fsync(path: Path) -> None:
    """Of a file its content, of a directory which files are in it: on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

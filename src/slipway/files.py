"""Single files: whole ones whoever is killed when, locks that say whether their owner lives, failures in words."""

import fcntl
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from slipway.errors import SlipwayError
from slipway.sealed import free_mb, fsync


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """For a block that writes `path`. Raises SlipwayError, which names it and the free space, where that fails."""
    try:
        yield
    except OSError as error:
        raise SlipwayError(
            f"{path}: cannot be written ({error}); {free_mb(path)} MB are free there"
        ) from error


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


@contextmanager
def owned(path: Path) -> Iterator[int]:
    """A file at `path`, and a descriptor of it that is locked: whoever holds it owns what the file is about.

    The file stays. One of that name without a lock is an abandoned one: it is locked before it has its name.
    """
    unnamed = path.with_name(f".{path.name}")
    with unnamed.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        unnamed.rename(path)
        yield file.fileno()

"""Single files: whole ones whoever is killed when, locks that say whether their owner lives, failures in words."""

import contextlib
import fcntl
import os
import stat
import uuid
from collections.abc import Iterable, Iterator
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


def abandoned(locks: Iterable[Path]) -> Iterator[Path]:
    """Those files of `owned` whose owners have ended; each is locked for as long as the caller deals with it.

    Left out is what this user has not made, and what is no file: others may put things where these lie.
    """
    for lock in locks:
        with contextlib.suppress(OSError):  # its owner lives, or somebody else has just removed it
            descriptor = os.open(lock, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                found = os.fstat(descriptor)
                if stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid():
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    yield lock
            finally:
                os.close(descriptor)

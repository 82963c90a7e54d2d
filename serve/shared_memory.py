"""The shared memory through which Triton talks to its models: a killed server leaves it behind, and nobody else may.

Files in /dev/shm whose names begin with the server's id. Beside them lies `<id>.lock`, locked by the server itself
for as long as one of its processes lives. Not by process id: in a container it is 1 before and after a restart.
"""

import contextlib
import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from slipway import files

DIRECTORY = Path("/dev/shm")
PREFIX = "slipway-"
LOCK = ".lock"

logger = logging.getLogger(__name__)


@contextmanager
def owned(identity: str) -> Iterator[int]:
    """A locked descriptor to be inherited by the server: whoever holds it owns the shared memory of that id."""
    with files.owned(DIRECTORY / f"{identity}{LOCK}") as descriptor:
        yield descriptor


def warn_if_less_than(needed: int) -> None:
    """Say so, in bytes, if a server may come to need more than there is. Docker gives a container 64 MB."""
    if (free := shutil.disk_usage(DIRECTORY).free) < needed:
        logger.warning(
            "WARNING: %s has %d MB free, and the largest requests may need %d MB; those that find no room are "
            "answered with an error (in Docker: --shm-size=%dm)",
            DIRECTORY,
            free // 2**20,
            needed // 2**20,
            -(-needed // 2**20),
        )


def remove(identity: str) -> None:
    """What a server has left there after its end."""
    for leftover in DIRECTORY.glob(f"{identity}*"):
        leftover.unlink(missing_ok=True)


def remove_abandoned() -> None:
    """What servers have left there whose processes were all killed, before anybody could clean up."""
    for lock in files.abandoned(DIRECTORY.glob(f"{PREFIX}?*{LOCK}")):
        identity = lock.name.removesuffix(LOCK)
        with contextlib.suppress(OSError):  # something of that name is not ours: no server may fail for it
            remove(identity)
            logger.info("removed the shared memory of %s, which has ended", identity)

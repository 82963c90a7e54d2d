"""Which release of a model repository is served: promote one, roll back to the one before, list them all.

model_repository/
  current -> releases/digits-4     what `serve up` serves; it follows when the link moves
  previous -> releases/digits-3    what was served before, for a rollback

Each link moves by one atomic rename. Between the two, `.previous` holds what `previous` is to lead to, so that who is
killed there loses nothing: the next one completes it. A release becomes current only after a real server has answered
its golden image; one that was current before is not tried again, so that a rollback takes no time.
"""

import json
import logging
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from serve import server
from serve.health import WrongAnswer
from serve.protocol import ServingError
from serve.release import ABOUT, CURRENT, FORMAT, PREVIOUS, RELEASES, Release, open_release
from serve.server import ServerError
from slipway import sealed
from slipway.errors import SlipwayError, UsageError

# What `previous` will lead to as soon as `current` has moved.
COMING = f".{PREVIOUS}"

logger = logging.getLogger(__name__)


class PromotionRefused(SlipwayError):
    """The release stays where it is, and so does what is served."""


def promote(directory: Path) -> Path:
    """Let `current` lead to a release, if it is whole and a server of its own answers with it as it should.

    It is tried, too, if `current` leads there already: a supervisor may have refused it, and will look again. A
    release for the container cannot run here; it is checked for being whole, no more. Returns `directory`.

    Raises:
        SealError: the release is damaged.
        PromotionRefused: it does not run, or does not answer as it was proven to.
    """
    release = open_release(directory)
    if release.target == "embedded":
        _try(release, directory.parent.parent)
    else:
        logger.info("%s is for the %s and cannot be tried here", directory.name, release.target)
    move_current(directory)
    return directory


def rollback(repository: Path) -> Path:
    """Let `current` and `previous` change places; return the directory that is current now.

    Raises:
        SlipwayError: nothing was served before, or it is damaged now.
    """
    if not repository.is_dir():
        raise SlipwayError(f"{repository}: no release is published there; `make publish` does that")
    with _links_of(repository):
        previous = _target(repository / PREVIOUS)
        if previous is None or previous == _target(repository / CURRENT):
            raise SlipwayError(f"{repository}: no other release was served before the current one")
        open_release(previous)
        _move_both(repository, previous)
    return previous


def find(repository: Path, name: str) -> Path:
    """The directory of a release by its name. Raises UsageError that names those there are."""
    names = [directory.name for directory in sealed.sealed_in(repository / RELEASES)]
    if name not in names:
        raise UsageError(f"{name} is not a release of {repository}; there are {', '.join(names) or 'none'}")
    return repository / RELEASES / name


def table(repository: Path) -> Iterator[str]:
    """A line for each release, in the order of names: what it is for, and whether it is or was served."""
    places = {_target(repository / link): link for link in (PREVIOUS, CURRENT)}
    for directory in sealed.sealed_in(repository / RELEASES):
        place = places.get(directory.resolve(), "")
        try:
            about = json.loads((directory / ABOUT).read_bytes())
            if about["format"] != FORMAT:
                yield f"{place:8}  {directory.name}  of another version of Slipway; publish its bundle again"
                continue
            form = ", fused" if about.get("fused") else ""
            yield f"{place:8}  {directory.name}  {about['identity']}  {about['target']}  {about['artefact']}{form}"
        except (OSError, ValueError, KeyError, TypeError) as error:
            yield f"{place:8}  {directory.name}  damaged: {ABOUT} cannot be read ({error!r})"


def move_current(directory: Path) -> None:
    """Let `current` lead to a release, and `previous` to where `current` led.

    If `current` leads there already, only it is made anew, which tells serve.supervisor to look again.
    """
    repository = directory.parent.parent
    with _links_of(repository):
        if _target(repository / CURRENT) == directory.resolve():
            _make_current(repository, directory)
            logger.info("%s is current already; a supervisor that refused it tries it again", directory.name)
        else:
            _move_both(repository, directory)


@contextmanager
def _links_of(repository: Path) -> Iterator[None]:
    """Nobody else moves them meanwhile, and what somebody was killed over is completed."""
    with sealed.only_one(repository / CURRENT, f"{repository}"):
        coming = repository / COMING
        if (target := _target(coming)) is not None:
            if target == _target(repository / CURRENT):  # `current` had not moved
                coming.unlink()
            else:
                coming.replace(repository / PREVIOUS)
        yield


def _move_both(repository: Path, directory: Path) -> None:
    """Only within `_links_of`."""
    before = _target(repository / CURRENT)
    if before is not None:
        _link(repository / COMING, before)
    _make_current(repository, directory)
    if before is not None:
        (repository / COMING).replace(repository / PREVIOUS)
    logger.info("%s is current now", directory.name)


def _make_current(repository: Path, directory: Path) -> None:
    fresh = repository / f".{CURRENT}-{uuid.uuid4().hex[:8]}"
    _link(fresh, directory)
    fresh.replace(repository / CURRENT)


def _try(release: Release, repository: Path) -> None:
    logger.info("trying %s with a server of its own", release.directory.name)
    try:
        with server.serving(release):
            pass
    except (ServerError, ServingError, WrongAnswer) as error:
        current = _target(repository / CURRENT)
        left = f"{current.name} stays current" if current else "nothing is current"
        raise PromotionRefused(f"{release.directory}: was not promoted, {left}: {error}") from error


def _target(link: Path) -> Path | None:
    """Where a link leads, if it is there."""
    if link.exists() and not link.is_symlink():
        raise SlipwayError(f"{link}: is not a link; move it away, it is where the served release is linked")
    return link.resolve() if link.is_symlink() else None


def _link(link: Path, directory: Path) -> None:
    link.symlink_to(Path(RELEASES) / directory.name)  # relative, so that the repository can be moved

"""Sealed directories: complete, hashed, published by one atomic rename. Every stage hands one to the next.

A sealed directory holds its files and a `manifest.json` that lists each of them with size and SHA-256. It is
written under a staging name beside its destination, flushed to disk, and renamed. So a reader sees a complete
directory or none, whatever was killed when; and a flipped byte is noticed before anything uses it.
"""

import contextlib
import fcntl
import json
import logging
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from slipway import hashing
from slipway.errors import SlipwayError

MANIFEST = "manifest.json"
FORMAT = "slipway-sealed/1"
STAGING_PREFIX = ".staging-"

logger = logging.getLogger(__name__)


class SealError(SlipwayError):
    """A sealed directory could not be written, or is not what its manifest says."""


class BusyError(SlipwayError):
    """Another process works on what was to be this one's alone."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a sealed directory says of itself.

    kind: what it is (`data`, `checkpoint`, `evaluation`, `bundle`, `release`).
    inputs: hash over everything it was made from; equal inputs need not be worked through again.
    seal: SHA-256 of `manifest.json`, hence of the whole content: the directory's identity.
    files: relative POSIX path -> SHA-256.
    """

    kind: str
    inputs: str
    seal: str
    files: dict[str, str]


@contextmanager
def stage(destination: Path, *, kind: str, inputs: str = "") -> Iterator[Path]:
    """Yield an empty directory to fill; when the block ends well, seal it and rename it to `destination`.

    If the block raises, or the disk fills up, nothing appears at `destination` and the staging directory is
    removed. What is already at `destination` is never touched.

    Raises:
        SealError: `destination` exists, or a write failed (the message names the path and the free space).
    """
    with _staged(destination) as staging:
        yield staging
        _write_manifest(staging, kind, inputs)


@contextmanager
def receive(destination: Path, *, kind: str) -> Iterator[Path]:
    """As `stage`, for what was sealed elsewhere: the block brings the manifest along, and it is verified, not written.

    Raises what `stage` and `verify` raise; nothing appears at `destination` then.
    """
    with _staged(destination) as staging:
        yield staging
        verify(staging, kind)


@contextmanager
def _staged(destination: Path) -> Iterator[Path]:
    """A directory to fill and seal. When the block ends well, it is flushed to disk and renamed to `destination`."""
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        remove_abandoned(destination.parent)
        with _staging_directory(destination.parent) as staging:
            yield staging
            _flush(staging)
            _publish(staging, destination)
    except OSError as error:
        raise SealError(
            f"{destination}: could not be written ({error}); {free_mb(destination)} MB are free there. "
            "Nothing was published and what was there before is untouched"
        ) from error


def verify(directory: Path, kind: str, *, unread: str = "") -> Manifest:
    """Check every file of a sealed directory against its manifest.

    unread: how the names of those files begin that only have to be there, because the caller will not read them.

    Raises:
        SealError: no or unreadable manifest, another kind, a file missing, added, changed, or not to be read.
    """
    manifest = read_manifest(directory)
    if manifest.kind != kind:
        raise SealError(f"{directory}: is a sealed {manifest.kind}, not a {kind}")
    present = _files_in(directory) - {MANIFEST}
    if missing := sorted(manifest.files.keys() - present):
        raise SealError(f"{directory / missing[0]}: is listed in the manifest but missing")
    if added := sorted(present - manifest.files.keys()):
        raise SealError(f"{directory / added[0]}: is not listed in the manifest; it was added after sealing")
    for name, expected in manifest.files.items():
        if unread and name.startswith(unread):
            continue
        path = directory / name
        try:
            same = not path.is_symlink() and hashing.of_file(path) == expected
        except OSError as error:  # a failing disk, or the directory is being removed
            raise SealError(f"{path}: cannot be read ({error})") from error
        if not same:
            raise SealError(f"{path}: differs from the manifest (SHA-256); it was changed or damaged")
    return manifest


def _files_in(directory: Path) -> set[str]:
    """Relative POSIX paths of all that is in a directory and below, but for folders."""
    try:
        return {
            path.relative_to(directory).as_posix()
            for path in directory.rglob("*")
            if not path.is_dir() or path.is_symlink()
        }
    except OSError as error:  # a failing disk, or the directory is being removed
        raise SealError(f"{directory}: cannot be looked through ({error})") from error


def read_manifest(directory: Path) -> Manifest:
    """The manifest alone, without checking the files. Raises SealError if there is none or it makes no sense."""
    path = directory / MANIFEST
    try:
        text = path.read_bytes()
        content = json.loads(text)
        if content["format"] != FORMAT:
            raise SealError(f"{path}: has format {content['format']!r}; this Slipway reads {FORMAT!r}")
        files = {str(name): str(entry["sha256"]) for name, entry in content["files"].items()}
        manifest = Manifest(
            kind=content["kind"], inputs=content["inputs"], seal=hashing.of_bytes(text), files=files
        )
    except FileNotFoundError:
        raise SealError(f"{directory}: is not a sealed directory (no {MANIFEST})") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise SealError(f"{path}: cannot be read as a manifest ({error!r})") from error
    for name in manifest.files:
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise SealError(f"{path}: names {name!r}, which lies outside the directory")
    return manifest


def newest_good(parent: Path, kind: str) -> Path | None:
    """The last directory by name that verifies. Damaged ones are passed over with a warning each."""
    for directory in reversed(sealed_in(parent)):
        try:
            verify(directory, kind)
        except SealError as error:
            logger.warning("WARNING: passing over a damaged %s: %s", kind, error)
            continue
        return directory
    return None


def made_from(parent: Path, kind: str, inputs: str) -> Path | None:
    """The last good directory made from exactly these inputs, if there is one."""
    for directory in reversed(sealed_in(parent)):
        try:
            if read_manifest(directory).inputs == inputs:
                verify(directory, kind)
                return directory
        except SealError as error:
            logger.warning("WARNING: passing over a damaged %s: %s", kind, error)
    return None


def sealed_in(parent: Path) -> list[Path]:
    """Directories below `parent` that have a manifest, in name order. None is read or verified."""
    if not parent.is_dir():
        return []
    return sorted(d for d in parent.iterdir() if not d.name.startswith(".") and (d / MANIFEST).is_file())


def remove_abandoned(parent: Path) -> None:
    """Remove staging directories in `parent` whose process was killed: nobody holds their lock any more.

    Not by process id: in a container it is 1 before and after a restart.
    """
    for directory in parent.glob(f"{STAGING_PREFIX}*"):
        # Somebody is writing it, or has just finished, or the file system cannot say: leave it.
        with contextlib.suppress(OSError), _descriptor(directory) as descriptor:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(directory)


@contextmanager
def only_one(path: Path, what: str, *, waits: bool = True) -> Iterator[None]:
    """Let one process at a time work on `path`; a second one says so and waits for the first, or raises BusyError.

    The lock is advisory, lies in `.<name>.lock` beside `path`, and dies with its holder. Raises SealError where there
    can be none.
    """
    with ExitStack() as held:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = held.enter_context(path.with_name(f".{path.name}.lock").open("w"))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if not waits:
                    raise BusyError(f"another process is busy with {what}") from None
                logger.info("another process is busy with %s; waiting for it", what)
                fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            raise SealError(f"{path}: cannot be written: its lock cannot be had ({error})") from error
        yield


def write_json(path: Path, content: Any) -> None:
    """JSON as we write it everywhere: sorted, indented, UTF-8, no NaN."""
    text = json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False)
    path.write_text(text + "\n", encoding="utf-8")


def _write_manifest(staging: Path, kind: str, inputs: str) -> None:
    files = {}
    for path in sorted(p for p in staging.rglob("*") if not p.is_dir() or p.is_symlink()):
        if path.is_symlink():
            raise SealError(f"{path}: a sealed directory holds files, not links")
        entry = {"bytes": path.stat().st_size, "sha256": hashing.of_file(path)}
        files[path.relative_to(staging).as_posix()] = entry
    write_json(staging / MANIFEST, {"format": FORMAT, "kind": kind, "inputs": inputs, "files": files})


def _flush(directory: Path) -> None:
    """Make files read-only and force them and their directory entries to disk."""
    for path in [*directory.rglob("*"), directory]:
        if path.is_file():
            path.chmod(0o444)
        fsync(path)


def _publish(staging: Path, destination: Path) -> None:
    # rename() replaces an empty directory silently, and a full one not at all.
    if destination.exists():
        raise SealError(
            f"{destination}: is already there; sealed directories are never overwritten. If it is damaged, remove it"
        )
    staging.rename(destination)
    fsync(destination.parent)


def free_mb(path: Path) -> int:
    """How much room there is where `path` lies, or is to lie."""
    for folder in path.absolute().parents:
        with contextlib.suppress(OSError):  # it is not there yet, or not to be looked into
            return round(shutil.disk_usage(folder).free / 1e6)
    return 0


def fsync(path: Path) -> None:
    """Of a file its content, of a directory which files are in it: on disk."""
    with _descriptor(path) as descriptor:
        os.fsync(descriptor)


@contextmanager
def _staging_directory(parent: Path) -> Iterator[Path]:
    """A new directory, locked as long as this process lives, and gone afterwards unless it was renamed."""
    staging = parent / f"{STAGING_PREFIX}{uuid.uuid4().hex}"
    try:
        descriptor = _made_and_locked(staging)
        try:
            yield staging
        finally:
            os.close(descriptor)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _made_and_locked(directory: Path) -> int:
    """The descriptor that holds the lock. Until it does, somebody may take the directory for abandoned: then again."""
    while True:
        directory.mkdir(exist_ok=True)
        try:
            descriptor = os.open(directory, os.O_RDONLY)
        except FileNotFoundError:
            continue
        # A file system that cannot lock directories cannot tell abandoned ones either: they stay.
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink > 0:
            return descriptor
        os.close(descriptor)


@contextmanager
def _descriptor(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)

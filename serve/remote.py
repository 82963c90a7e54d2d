"""Releases in S3-compatible storage: push one there, pull one from there.

s3://bucket/prefix/digits-3/
  release.json, models/...     as in the model repository
  manifest.json                comes last: where it is, all the others are

Triton could load a repository from S3 by itself, and would serve what nobody has verified. So a release comes into
the model repository first: whole, as its manifest says, signed by whom it should be, or not at all.

Credentials, region and endpoint come from the environment alone: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY,
AWS_DEFAULT_REGION, AWS_ENDPOINT_URL, or what a cluster gives its pods in their place.
"""

import hashlib
import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import S3Store

from serve.release import KIND, RELEASES, open_release
from slipway import hashing, sealed, signing
from slipway.errors import SlipwayError, UsageError
from slipway.sealed import MANIFEST, SealError
from slipway.signing import SignatureError

CONNECT_TIMEOUT = timedelta(seconds=20)
# Of one file, and of a pause in it.
FILE_TIMEOUT, READ_TIMEOUT = timedelta(minutes=15), timedelta(seconds=60)
# Of one request, where the storage is busy or the connection breaks.
RETRIES = 5
CHUNK_BYTES = 8 * 2**20

logger = logging.getLogger(__name__)


class RemoteError(SlipwayError):
    """The storage does not answer, or does not hold what it should."""


@dataclass(frozen=True, kw_only=True)
class _Place:
    """What is below an address: `s3://bucket/prefix/digits-3`."""

    address: str
    store: S3Store


def push(directory: Path, place: str) -> str:
    """Copy a release to below `place`, such as `s3://bucket/prefix`; return its address there.

    One that is there already stays as it is, and so does each file of it that an earlier push left behind.

    Raises:
        UsageError: `place` is no such address.
        SealError: the release is damaged.
        RemoteError: something else is there under its name, or the storage does not take it.
    """
    release = open_release(directory)
    there = _open(f"{place.rstrip('/')}/{directory.name}")
    manifest = (release.directory / MANIFEST).read_bytes()
    found = _read(there, MANIFEST)
    if found == manifest:
        logger.info("%s is there already", there.address)
        return there.address
    if found is not None:
        raise RemoteError(
            f"{there.address}: is another release; releases are never overwritten: push this one below another prefix"
        )
    logger.info("pushing %s (%s) to %s", directory.name, release.identity, there.address)
    files = {**sealed.read_manifest(release.directory).files, MANIFEST: hashing.of_bytes(manifest)}
    for name, sha256 in files.items():
        _upload(release.directory / name, there, name, sha256)
    return there.address


def pull(address: str, repository: Path, public_key: Path | None = None) -> Path:
    """Take a release out of storage into a model repository; return its directory there.

    It appears by one rename, when every file is as the manifest says. One that is there already is never changed.

    public_key: whose owner must have signed the release.

    Raises:
        UsageError: `address` is no address of a release.
        SignatureError: the release is not as the owner of the key signed it.
        SealError, RemoteError: it is damaged, was published under another name, another one is here under its name, or
            the storage does not give it.
    """
    there = _open(address.rstrip("/"))
    name = there.address.rpartition("/")[2]
    manifest = _read(there, MANIFEST)
    if manifest is None:
        raise RemoteError(f"{address}: no release is there (no {MANIFEST}), or not all of it yet")
    destination = repository / RELEASES / name
    with sealed.only_one(repository / RELEASES, f"{repository}"):
        if destination.exists():
            _require_same(destination, manifest, address, public_key)
            _require_name(destination, name, address)
            logger.info("%s is here already", destination)
            return destination
        logger.info("pulling %s", address)
        with sealed.receive(destination, kind=KIND) as staging, _errors_name(address, staging):
            (staging / MANIFEST).write_bytes(manifest)
            for file, sha256 in sealed.read_manifest(staging).files.items():
                _download(there, file, staging / file, sha256)
            if public_key is not None:
                signing.require_signed(staging, public_key)
            _require_name(staging, name, address)
    return destination


@contextmanager
def _errors_name(address: str, staging: Path) -> Iterator[None]:
    """Of what is wrong with a file, say where it came from: the staging directory is gone when somebody reads of it."""
    try:
        yield
    except (SealError, SignatureError) as error:
        raise type(error)(str(error).replace(str(staging), address)) from error


def _require_same(destination: Path, manifest: bytes, address: str, public_key: Path | None) -> None:
    if public_key is not None:
        signing.require_signed(destination, public_key)
    if sealed.verify(destination, KIND).seal != hashing.of_bytes(manifest):
        raise RemoteError(f"{destination}: is another release than {address}; releases are never overwritten")


def _require_name(directory: Path, name: str, address: str) -> None:
    """Nobody may hand out an old release, however well it is signed, as a new one."""
    published = open_release(directory, with_model=False).name
    if not published:
        raise RemoteError(
            f"{address}: does not say what it was published as, so that it might be an old release under a new name; "
            "publish it again"
        )
    if name != published:
        raise RemoteError(f"{address}: was published as {published}, and is not {name}")


def _open(address: str) -> _Place:
    parts = re.fullmatch(r"s3://(?P<bucket>[^\s/]+)/(?P<key>(?:[^\s/]+/)*\w[\w.-]*)", address)
    # The library takes neither of these, and does not say so in an error of its own.
    if parts is None or {".", ".."} & set(address.split("/")) or not address.isprintable():
        raise UsageError(f"{address}: is no address of a release; expected s3://bucket/prefix/release")
    with _plain_errors(address):
        store = S3Store(
            parts["bucket"],
            prefix=parts["key"],
            client_options={
                # Who names an endpoint without TLS wants it so.
                "allow_http": os.environ.get("AWS_ENDPOINT_URL", "").startswith("http://"),
                "connect_timeout": CONNECT_TIMEOUT,
                "read_timeout": READ_TIMEOUT,
                "timeout": FILE_TIMEOUT,
            },
            retry_config={"max_retries": RETRIES},
        )
    return _Place(address=address, store=store)


def _read(there: _Place, name: str) -> bytes | None:
    """A small file as a whole; None if it is not there."""
    with _plain_errors(f"{there.address}/{name}"):
        try:
            return bytes(obstore.get(there.store, name).bytes())
        except FileNotFoundError:
            return None


def _chunks(there: _Place, name: str) -> Iterator[obstore.Bytes]:
    """A file of any size. Goes on where it stopped if the connection breaks."""
    yield from obstore.get(there.store, name).stream(min_chunk_size=CHUNK_BYTES)


def _upload(path: Path, there: _Place, name: str, sha256: str) -> None:
    with _plain_errors(f"{there.address}/{name}"):
        try:
            obstore.put(there.store, name, path, mode="create")
        except AlreadyExistsError:
            found = hashlib.sha256()
            for chunk in _chunks(there, name):
                found.update(chunk)
            if found.hexdigest() != sha256:
                raise RemoteError(
                    f"{there.address}/{name}: is there already, and is another; nothing is overwritten. If an earlier "
                    "push was cut short, remove what it left"
                ) from None


def _download(there: _Place, name: str, path: Path, sha256: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with _plain_errors(f"{there.address}/{name}"), path.open("wb") as file:
        for chunk in _chunks(there, name):
            file.write(chunk)
    if hashing.of_file(path) != sha256:
        raise RemoteError(
            f"{there.address}/{name}: differs from the manifest (SHA-256); it was changed or damaged"
        )


@contextmanager
def _plain_errors(address: str) -> Iterator[None]:
    try:
        yield
    except (BaseError, FileNotFoundError) as error:
        # All that comes after the first line is how the library sees it.
        raise RemoteError(
            f"{address}: the storage says: {str(error).splitlines()[0]}; credentials and endpoint come from AWS_* in "
            "the environment"
        ) from None

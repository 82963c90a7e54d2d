"""Bytes of files on this machine, of objects in S3-compatible storage, whole or by range, and of the web, whole.

A location is a local path, `s3://bucket/key`, or an address that begins with http:// or https://. For S3, credentials,
region and endpoint come from the environment alone, as the AWS SDK reads them: AWS_ACCESS_KEY_ID,
AWS_SECRET_ACCESS_KEY, AWS_DEFAULT_REGION, AWS_ENDPOINT_URL.
"""

import logging
import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import lru_cache
from http import HTTPStatus
from io import BytesIO
from pathlib import Path
from typing import IO, Any
from urllib.parse import unquote, urlsplit

from urllib3 import PoolManager, Retry, Timeout
from urllib3.exceptions import HTTPError

from train.dataset import DataError, plain_name

S3 = "s3://"
WEB = ("http://", "https://")
ELSEWHERE = (S3, *WEB)

# Half of the seconds to wait before a web server is asked for the third time; each time after that it is twice as long.
PATIENCE = 0.5

# It warns of every try that failed, with the whole address.
logging.getLogger("urllib3.connectionpool").setLevel(logging.ERROR)


def read(location: str) -> bytes:
    """Everything. Raises DataError or, for a local file, OSError."""
    with stream(location) as file:
        return file.read()


def read_range(location: str, offset: int, size: int) -> bytes:
    """`size` bytes from `offset` on; fewer where the file ends before. Raises DataError or OSError."""
    if not location.startswith(S3):
        with Path(location).open("rb") as file:
            file.seek(offset)
            return file.read(size)
    if size == 0:  # of which there is no range
        return b""
    with _plain_errors(location):
        span = f"bytes={offset}-{offset + size - 1}"
        return client().get_object(**_address(location), Range=span)["Body"].read()


@contextmanager
def stream(location: str) -> Iterator[IO[bytes]]:
    """The file, open for reading from its beginning to its end."""
    if location.startswith(S3):
        with _plain_errors(location), closing(client().get_object(**_address(location))["Body"]) as body:
            yield body
    elif location.startswith(WEB):
        yield BytesIO(_from_the_web(location))
    else:
        with Path(location).open("rb") as file:
            yield file


def listing(place: str, suffix: str) -> dict[str, str]:
    """Location -> a text that changes with the content, for everything below `place` whose name ends in `suffix`."""
    if place.startswith(S3):
        with _plain_errors(place):
            return dict(_objects(place, suffix))
    found = sorted(path for path in Path(place).rglob(f"*{suffix}") if path.is_file())
    return {str(path): f"{path.stat().st_size} {path.stat().st_mtime_ns}" for path in found}


def name_of(location: str) -> str:
    """What it is called in a data set: without scheme, and without what a signed address ends in."""
    if location.startswith(WEB):
        parts = urlsplit(location)
        return plain_name(unquote(f"{parts.netloc}/{parts.path}"))
    return plain_name(location.removeprefix(S3))


def shown(location: str) -> str:
    """For messages: what a signed address ends in is a secret."""
    return location.partition("?")[0] if location.startswith(WEB) else location


def _from_the_web(location: str) -> bytes:
    """Everything, asked for again where the server is busy or the connection breaks, at the beginning or midway."""
    retries = Retry(
        total=5, backoff_factor=PATIENCE, status_forcelist=(429, 500, 502, 503, 504), retry_after_max=60
    )
    try:
        answer = _connections(os.getpid()).request(
            "GET", location, retries=retries, timeout=Timeout(connect=20, read=60)
        )
    except HTTPError as error:
        # Of a request that was given up, the last reason: the whole would quote the address.
        raise DataError(f"{shown(location)}: cannot be read ({getattr(error, 'reason', error)})") from None
    if answer.status != HTTPStatus.OK:
        raise DataError(f"{shown(location)}: cannot be read (HTTP {answer.status})")
    return answer.data


@lru_cache(maxsize=1)
def _connections(_process: int) -> PoolManager:
    """As `client`, of one process."""
    return PoolManager(num_pools=16, maxsize=16)


def client() -> Any:
    """This process's client: one that was forked along with a loader worker would share its connections."""
    return _client_of(os.getpid())


@lru_cache(maxsize=1)
def _client_of(_process: int) -> Any:
    # Half a second that only S3 is worth, here and below.
    import boto3.session  # noqa: PLC0415
    from botocore.config import Config as ClientConfig  # noqa: PLC0415

    # Sessions of one's own, because the default one may not be used by several threads at once.
    return boto3.session.Session().client(
        "s3",
        config=ClientConfig(
            retries={"mode": "standard", "max_attempts": 5},
            connect_timeout=20,
            read_timeout=60,
            max_pool_connections=64,
        ),
    )


def _objects(place: str, suffix: str) -> Iterator[tuple[str, str]]:
    bucket, _, folder = place.removeprefix(S3).strip("/").partition("/")
    prefix = f"{folder}/" if folder else ""
    for page in client().get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix):
        for entry in page.get("Contents", []):
            if entry["Key"].endswith(suffix):
                yield f"{S3}{bucket}/{entry['Key']}", f"{entry['Size']} {entry['ETag']}"


def _address(location: str) -> dict[str, str]:
    bucket, _, key = location.removeprefix(S3).partition("/")
    return {"Bucket": bucket, "Key": key}


@contextmanager
def _plain_errors(location: str) -> Iterator[None]:
    from botocore.exceptions import BotoCoreError, ClientError  # noqa: PLC0415

    try:
        yield
    except (BotoCoreError, ClientError) as error:
        raise DataError(
            f"{location}: cannot be read ({error}); credentials and endpoint come from AWS_* in the environment"
        ) from error

"""The image folder of the tests, kept in other ways."""

import csv
import io
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.s3 import ACCESS
from train import storage


def write_tar(path: Path, files: Mapping[str, bytes]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, data in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))


def write_shards(folder: Path, shards: Path) -> Path:
    """`<folder>/<split>/<class>/*` -> `<shards>/<split>-{0,1}.tar`."""
    for split in ("train", "val", "test"):
        parts: tuple[dict[str, bytes], ...] = ({}, {})
        for number, path in enumerate(sorted(path for path in (folder / split).rglob("*") if path.is_file())):
            parts[number % 2][f"{number:04d}{path.suffix}"] = path.read_bytes()
            parts[number % 2][f"{number:04d}.cls"] = path.parent.name.encode()
        for number, files in enumerate(parts):
            write_tar(shards / f"{split}-{number}.tar", files)
    return shards


def write_csv(path: Path, rows: Sequence[Sequence[str]]) -> Path:
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows(rows)
    return path


def rows_of(folder: Path) -> list[tuple[str, str, str]]:
    """(path relative to the folder, label, split) of every image."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return [
        (path.relative_to(folder).as_posix(), path.parent.name, path.relative_to(folder).parts[0])
        for path in files
    ]


@contextmanager
def s3_access(url: str) -> Iterator[None]:
    """Credentials and endpoint where they are to come from: the environment."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**ACCESS, "AWS_ENDPOINT_URL": url}.items():
            patch.setenv(name, value)
        storage._client_of.cache_clear()
        yield
    storage._client_of.cache_clear()


def upload(folder: Path, bucket: str) -> None:
    storage.client().create_bucket(Bucket=bucket)
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        storage.client().upload_file(str(path), bucket, path.relative_to(folder).as_posix())

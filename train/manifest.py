"""A table as a source of images: CSV or Parquet with the columns `path`, `label` and, where wanted, `split`.

A path is relative to the manifest's folder, absolute, `s3://bucket/key`, or an address in the web. Without the column
`split`, content decides. Every image is read once to take its SHA-256.
"""

import csv
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipway import hashing
from train import storage
from train.config import DataConfig
from train.dataset import DataError, Dataset, Found, assemble
from train.split import SPLITS

COLUMNS = {"path", "label", "split"}
_READERS = 8

Row = tuple[str, str, str | None]  # path, label, split


@dataclass(frozen=True)
class Located:
    """Images that lie anywhere."""

    locations: Mapping[str, str]

    def read(self, file: str) -> bytes:
        return storage.read(self.locations[file])

    def where(self, file: str) -> str:
        return storage.shown(self.locations[file])


def read_manifest(config: DataConfig) -> Dataset:
    """Read the table at `config.root` and hash every image it lists.

    Raises:
        DataError: no such table, columns it must not or should have, an image listed twice or missing, a split that is
            none, or a data set that cannot be trained on. The message names the row; the header is row 1.
    """
    manifest = config.root
    if not manifest.is_file():
        raise DataError(
            f"{manifest.absolute()}: there is no such file; set data.root to a .csv or .parquet file"
        )
    rows: dict[str, Row] = {}
    locations: dict[str, str] = {}
    for number, row in enumerate(_rows(manifest), start=2):
        path, label, split = row
        where = f"{manifest}, row {number}"
        if not path or not label:
            raise DataError(f"{where}: path and label must not be empty")
        if split is not None and split not in SPLITS:
            raise DataError(f"{where}: the split is {split!r}; it must be train, val or test")
        file = storage.name_of(path)
        if file in rows:
            raise DataError(
                f"{where}: lists {storage.shown(path)}, which an earlier row lists as {storage.shown(rows[file][0])}"
            )
        rows[file] = row
        locations[file] = path if path.startswith(storage.ELSEWHERE) else str(manifest.parent / path)
    return assemble(_hashed(rows, locations, manifest), Located(locations), config, str(manifest))


def _hashed(rows: dict[str, Row], locations: dict[str, str], manifest: Path) -> Iterator[Found]:
    def sha256(file: str) -> str:
        try:
            return hashing.of_bytes(storage.read(locations[file]))
        except OSError as error:
            raise DataError(
                f"{manifest}: lists {rows[file][0]}, but {locations[file]} cannot be read ({error.strerror})"
            ) from error

    with ThreadPoolExecutor(_READERS) as pool:
        for (file, (_, label, split)), digest in zip(rows.items(), pool.map(sha256, rows), strict=True):
            own = next((each for each in SPLITS if each == split), None)
            yield Found(name=label, file=file, sha256=digest, split=own)


def _rows(manifest: Path) -> Iterator[Row]:
    if manifest.suffix.lower() == ".parquet":
        columns, rows = _parquet(manifest)
    elif manifest.suffix.lower() == ".csv":
        columns, rows = _csv(manifest)
    else:
        raise DataError(f"{manifest}: is neither .csv nor .parquet")
    if missing := sorted({"path", "label"} - set(columns)):
        raise DataError(f"{manifest}: has no column {missing[0]!r}; found {', '.join(columns) or 'none'}")
    if unknown := [name for name in columns if name not in COLUMNS]:
        raise DataError(f"{manifest}: the column {unknown[0]!r} is none of path, label, split")
    with_split = "split" in columns
    for row in rows:
        yield row["path"], row["label"], row["split"] if with_split else None


def _csv(manifest: Path) -> tuple[list[str], list[dict[str, str]]]:
    try:
        # The mark that spreadsheets put before UTF-8 is no part of the first column's name.
        with manifest.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, strict=True, restkey="more", restval=None)
            rows, columns = list(reader), list(reader.fieldnames or [])
    except (csv.Error, ValueError) as error:
        raise DataError(f"{manifest}: cannot be read as CSV in UTF-8 ({error})") from error
    for number, row in enumerate(rows, start=2):
        if "more" in row or None in row.values():
            raise DataError(f"{manifest}, row {number}: has another number of values than the header")
    return columns, rows


def _parquet(manifest: Path) -> tuple[list[str], list[dict[str, str]]]:
    import pyarrow as pa  # noqa: PLC0415 - a third of a second that only Parquet is worth
    from pyarrow import parquet  # noqa: PLC0415

    try:
        table = parquet.read_table(manifest)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{manifest}: cannot be read as Parquet ({error})") from error
    return table.column_names, [
        {name: _text(value) for name, value in row.items()} for row in table.to_pylist()
    ]


def _text(value: Any) -> str:
    """Labels are often numbers; what is missing is empty."""
    return "" if value is None else str(value)

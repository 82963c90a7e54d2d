"""A data set that the `datasets` library of Hugging Face has saved to disk, as a source of images."""

import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any

from slipway import hashing
from train.config import DataConfig
from train.dataset import DataError, Dataset, Found, assemble
from train.split import Split

_SPLITS: Mapping[str, Split] = {"train": "train", "validation": "val", "val": "val", "test": "test"}


@dataclass(frozen=True, kw_only=True)
class Table:
    """One split, a row an image. image, label: names of columns. names: of the classes, by number."""

    rows: Any
    image: str
    label: str
    names: list[str]

    def encoded(self, row: int) -> bytes:
        """The image as it was saved: with its bytes, or only with the place where they were."""
        cell = self.rows[row][self.image]
        return cell["bytes"] if cell["bytes"] is not None else Path(cell["path"]).read_bytes()


@dataclass(frozen=True)
class Saved:
    """Images in Arrow files, which each process that reads one maps into its memory."""

    root: Path

    def read(self, file: str) -> bytes:
        split, row = _split_and_row(file)
        return _tables(self.root)[split].encoded(row)

    def where(self, file: str) -> str:
        split, row = _split_and_row(file)
        return f"{self.root}, split {split}, row {row}"


def read_saved(config: DataConfig) -> Dataset:
    """Read the data set at `config.root` and hash every image.

    Raises:
        DataError: the library is not installed, there is no such data set, its columns are not one of images and one of
            class labels, a split has an unknown name, a label is missing, or it cannot be trained on.
    """
    if importlib.util.find_spec("datasets") is None:
        raise DataError("data.source is huggingface, and its library is not installed; run `make extras`")
    storage = Saved(config.root.absolute())
    return assemble(_found(storage), storage, config, str(config.root))


def _found(storage: Saved) -> Iterator[Found]:
    tables = _tables(storage.root)
    for split, table in tables.items():
        # One split alone says nothing, and content decides.
        own = _SPLITS[split] if len(tables) > 1 else None
        for row in range(len(table.rows)):
            cells = table.rows[row]
            image, number = cells[table.image] or {}, cells[table.label]
            file = f"{split}/{row:08d}{PurePosixPath(image.get('path') or '').suffix}"
            if not image:
                raise DataError(f"{storage.where(file)}: has no image")
            if number is None or number < 0:  # -1 is what unlabelled test splits say
                raise DataError(f"{storage.where(file)}: has no label")
            try:
                digest = hashing.of_bytes(table.encoded(row))
            except OSError as error:
                raise DataError(f"{storage.where(file)}: cannot be read ({error})") from error
            yield Found(name=table.names[number], file=file, sha256=digest, split=own)


def _split_and_row(file: str) -> tuple[str, int]:
    split, _, name = file.partition("/")
    return split, int(PurePosixPath(name).stem)


@lru_cache(maxsize=4)
def _tables(root: Path) -> dict[str, Table]:
    """Split -> its table. Raises DataError."""
    import datasets  # noqa: PLC0415 - slow to import, and need not be installed

    try:
        saved = datasets.load_from_disk(str(root))
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"{root}: cannot be read as a data set that was saved to disk ({error})") from error
    splits = dict(saved) if isinstance(saved, datasets.DatasetDict) else {"train": saved}
    if unknown := sorted(splits.keys() - _SPLITS.keys()):
        raise DataError(f"{root}: has the split {unknown[0]!r}; splits are called {', '.join(_SPLITS)}")
    tables = {}
    for split, rows in splits.items():
        image = _the_column(root, rows, datasets.Image)
        label = _the_column(root, rows, datasets.ClassLabel)
        # Images are wanted as they were encoded: to decode them is our own contract.
        tables[split] = Table(
            rows=rows.cast_column(image, datasets.Image(decode=False)),
            image=image,
            label=label,
            names=rows.features[label].names,
        )
    return tables


def _the_column(root: Path, rows: Any, kind: type) -> str:
    """The one column of a type. Raises DataError."""
    found = [name for name, feature in rows.features.items() if isinstance(feature, kind)]
    if len(found) != 1:
        raise DataError(
            f"{root}: needs one column of the type {kind.__name__}, and has {found or 'none'}; cast or remove columns "
            "with the datasets library, and save it again"
        )
    return found[0]

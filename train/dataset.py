"""What training needs to know of a data set, whatever it is kept in: a class list, samples, a way to read them."""

import logging
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from slipway import hashing
from slipway.errors import SlipwayError
from train.config import DataConfig
from train.split import SPLITS, Split, split_of

logger = logging.getLogger(__name__)


class DataError(SlipwayError):
    """The data set cannot be used as it is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One encoded image. `label` is the index of its class in `Dataset.classes`.

    file: its name in the data set, a relative POSIX path that occurs once.
    """

    file: str
    sha256: str
    label: int


class Storage(Protocol):
    """Where the bytes are. Copied into every loader worker, so it holds no open file and no connection."""

    def read(self, file: str) -> bytes:
        """The encoded image. Raises DataError or OSError."""

    def where(self, file: str) -> str:
        """The place that a person would look at: a path, a URL, a member of a shard."""


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """A data set as it was found.

    classes: names in index order, fixed by the training split or by a class list of one's own.
    fingerprint: hash over the class list and every sample's split, name, content and label.
    """

    classes: tuple[str, ...]
    splits: dict[Split, tuple[Sample, ...]]
    fingerprint: str
    storage: Storage

    def read(self, sample: Sample) -> bytes:
        """The encoded image. Raises DataError, which names it, if it cannot be read."""
        try:
            return self.storage.read(sample.file)
        except OSError as error:
            raise DataError(f"{self.where(sample)}: cannot be read ({error.strerror or error})") from error

    def where(self, sample: Sample) -> str:
        return self.storage.where(sample.file)


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """One image as a source found it, with the name of its class. `split` is None where its content decides."""

    name: str
    file: str
    sha256: str
    split: Split | None = None


def assemble(found: Iterable[Found], storage: Storage, config: DataConfig, place: str) -> Dataset:
    """Split what a source found, fix the class list, and check that both can be trained on.

    place: the root, manifest or bucket, for messages.

    Raises:
        DataError: two images of one name, fewer than two classes, a split without images, a class that the list
            (data.classes, or else the training split) does not have, or one of data.classes that has nothing to
            train on.
    """
    by_split: dict[Split, list[Found]] = {split: [] for split in SPLITS}
    files: set[str] = set()
    for each in found:
        if each.file in files:
            raise DataError(f"{place}: holds two images that would be called {each.file}")
        files.add(each.file)
        by_split[each.split or _by_content(each, config)].append(each)
    trained = sorted({each.name for each in by_split["train"]})
    classes = tuple(trained) if config.classes is None else read_classes(config.classes)
    _check(place, classes, by_split, "training split" if config.classes is None else f"list {config.classes}")
    if absent := sorted(set(classes) - set(trained)):
        raise DataError(f"{config.classes}: lists {absent[0]!r}, but {place} has no training image of it")
    index = {name: number for number, name in enumerate(classes)}
    splits = {
        split: tuple(
            Sample(file=each.file, sha256=each.sha256, label=index[each.name])
            for each in sorted(by_split[split], key=lambda each: (each.name, each.file.split("/")))
        )
        for split in SPLITS
    }
    listing = [[split, each.file, each.sha256, each.label] for split in SPLITS for each in splits[split]]
    fingerprint = hashing.of_data({"classes": list(classes), "files": listing})
    return Dataset(classes=classes, splits=splits, fingerprint=fingerprint, storage=storage)


def read_classes(path: Path) -> tuple[str, ...]:
    """A class list of one's own: a name a line, in the order of the indices. Raises DataError."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read as a class list (data.classes): {error}") from error
    names = tuple(line.strip() for line in lines if line.strip())
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise DataError(f"{path}: lists the class {twice[0]!r} twice")
    return names


def plain_name(path: str) -> str:
    """A path from elsewhere as a relative one that leads out of no folder."""
    return "/".join(part for part in path.split("/") if part not in ("", ".", ".."))


def _by_content(found: Found, config: DataConfig) -> Split:
    return split_of(found.sha256, config.val_fraction, config.test_fraction, config.split_seed)


def _check(place: str, classes: tuple[str, ...], by_split: dict[Split, list[Found]], listed: str) -> None:
    if len(classes) < 2:
        raise DataError(f"{place}: training needs images of at least two classes, found {list(classes)}")
    if odd := [name for name in classes if "\n" in name or "\r" in name]:
        raise DataError(
            f"{place}: the class name {odd[0]!r} has a line break, which a label file cannot hold"
        )
    for split in SPLITS:
        names = {each.name for each in by_split[split]}
        if not names:
            raise DataError(f"{place}: no image falls into the {split} split")
        if unknown := sorted(names - set(classes)):
            raise DataError(f"{place}/{split}/{unknown[0]}: is a class that the {listed} does not have")
        if absent := sorted(set(classes) - names):
            logger.warning("WARNING: %s/%s: no image of class %s", place, split, ", ".join(absent))

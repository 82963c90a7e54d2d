"""An image folder -> a list of samples, a fixed class list, and a fingerprint.

Two layouts are understood: `<root>/{train,val,test}/<class>/*`, taken as it stands, and `<root>/<class>/*`, split
by content hash. The class list is that of the training split; it is written down once, by the run, and carried to
the bundle and the server.
"""

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from slipway import hashing
from slipway.errors import SlipwayError
from slipway.sealed import MANIFEST
from train.config import DataConfig
from train.split import SPLITS, Split, split_of

# What image folders really contain besides: github.com/pytorch/vision/issues/2831, issue 507 of mmpretrain.
_IGNORED_FILES = {"thumbs.db", "desktop.ini", MANIFEST}

logger = logging.getLogger(__name__)


class DataError(SlipwayError):
    """The data set cannot be used as it is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One image file. `label` is the index of its class in `ImageFolder.classes`."""

    file: str  # relative to the root, POSIX
    sha256: str
    label: int


@dataclass(frozen=True, kw_only=True)
class ImageFolder:
    """A data set as it was found on disk.

    classes: names in index order, fixed by the training split.
    fingerprint: hash over every file's split, path and content, and over the class list.
    """

    root: Path
    classes: tuple[str, ...]
    splits: dict[Split, tuple[Sample, ...]]
    fingerprint: str


def read_folder(config: DataConfig) -> ImageFolder:
    """List and hash every file below `config.root`.

    Raises:
        DataError: the folder is missing, empty, of neither layout, holds fewer than two classes, or has a class
            in val or test that training does not know.
    """
    root = config.root
    if not root.is_dir():
        raise DataError(f"{root.absolute()}: there is no such folder; set data.root to your image folder")
    found = _with_splits(root) if (root / "train").is_dir() else _by_content(root, config)
    classes = tuple(sorted({name for name, _, _ in found["train"]}))
    _check(root, classes, found)
    index = {name: number for number, name in enumerate(classes)}
    splits = {
        split: tuple(
            Sample(file=path.relative_to(root).as_posix(), sha256=sha256, label=index[name])
            for name, path, sha256 in sorted(found[split])
        )
        for split in SPLITS
    }
    listing = [[split, sample.file, sample.sha256] for split in SPLITS for sample in splits[split]]
    fingerprint = hashing.of_data({"classes": list(classes), "files": listing})
    return ImageFolder(root=root, classes=classes, splits=splits, fingerprint=fingerprint)


_Found = tuple[str, Path, str]  # class name, path, SHA-256


def _with_splits(root: Path) -> dict[Split, list[_Found]]:
    if missing := [split for split in SPLITS if not (root / split).is_dir()]:
        raise DataError(
            f"{root / missing[0]}: is missing. A folder with train/ needs val/ and test/ as well; a folder of "
            "<class>/* without any of them is split for you"
        )
    return {split: list(_images(root / split)) for split in SPLITS}


def _by_content(root: Path, config: DataConfig) -> dict[Split, list[_Found]]:
    found: dict[Split, list[_Found]] = {split: [] for split in SPLITS}
    for name, path, sha256 in _images(root):
        split = split_of(sha256, config.val_fraction, config.test_fraction, config.split_seed)
        found[split].append((name, path, sha256))
    return found


def _images(parent: Path) -> Iterable[_Found]:
    """Every file of every class directory. Hidden ones are no data: they are named in the log and passed over."""
    ignored = []
    for directory in sorted(parent.iterdir()):
        if not directory.is_dir():
            continue
        if directory.name.startswith((".", "__")):
            ignored.append(directory.name)
            continue
        for path in sorted(p for p in directory.rglob("*") if p.is_file()):
            parts = path.relative_to(directory).parts
            if any(part.startswith(".") for part in parts) or path.name.lower() in _IGNORED_FILES:
                ignored.append(str(path.relative_to(parent)))
            else:
                yield directory.name, path, hashing.of_file(path)
    if ignored:
        logger.info("%s: ignored, not images: %s", parent, ", ".join(ignored))


def _check(root: Path, classes: tuple[str, ...], found: dict[Split, list[_Found]]) -> None:
    if len(classes) < 2:
        raise DataError(
            f"{root.absolute()}: training needs images of at least two classes, found {list(classes)}. Expected "
            "{train,val,test}/<class>/* or <class>/*"
        )
    if odd := [name for name in classes if "\n" in name or "\r" in name]:
        raise DataError(f"{root}: the class name {odd[0]!r} has a line break, which a label file cannot hold")
    for split in ("val", "test"):
        if not found[split]:
            raise DataError(f"{root}: no image falls into the {split} split")
        names = {name for name, _, _ in found[split]}
        if unknown := sorted(names - set(classes)):
            raise DataError(f"{root / split / unknown[0]}: is a class that the training split does not have")
        if absent := sorted(set(classes) - names):
            logger.warning("WARNING: %s: no image of class %s", root / split, ", ".join(absent))

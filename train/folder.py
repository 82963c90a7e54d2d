"""An image folder as a source of images.

Two layouts are understood: `<root>/{train,val,test}/<class>/*`, taken as it stands, and `<root>/<class>/*`, split
by content hash.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from slipway import hashing
from slipway.sealed import MANIFEST
from train.config import DataConfig
from train.dataset import DataError, Dataset, Found, assemble
from train.split import SPLITS, Split

# What image folders really contain besides: github.com/pytorch/vision/issues/2831, issue 507 of mmpretrain.
_IGNORED_FILES = {"thumbs.db", "desktop.ini", MANIFEST}

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Files:
    """Images that lie below one folder under their own names."""

    root: Path

    def read(self, file: str) -> bytes:
        return (self.root / file).read_bytes()

    def where(self, file: str) -> str:
        return str(self.root / file)


def read_folder(config: DataConfig) -> Dataset:
    """List and hash every file below `config.root`.

    Raises:
        DataError: the folder is missing, empty, of neither layout, or cannot be trained on.
    """
    root = config.root
    if not root.is_dir():
        raise DataError(f"{root.absolute()}: there is no such folder; set data.root to your image folder")
    found = _with_splits(root) if (root / "train").is_dir() else _images(root, root, None)
    return assemble(found, Files(root), config, str(root))


def _with_splits(root: Path) -> Iterator[Found]:
    if missing := [split for split in SPLITS if not (root / split).is_dir()]:
        raise DataError(
            f"{root / missing[0]}: is missing. A folder with train/ needs val/ and test/ as well; a folder of "
            "<class>/* without any of them is split for you"
        )
    for split in SPLITS:
        yield from _images(root, root / split, split)


def _images(root: Path, parent: Path, split: Split | None) -> Iterator[Found]:
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
                yield Found(
                    name=directory.name,
                    file=path.relative_to(root).as_posix(),
                    sha256=_sha256(path),
                    split=split,
                )
    if ignored:
        logger.info("%s: ignored, not images: %s", parent, ", ".join(ignored))


def _sha256(path: Path) -> str:
    try:
        return hashing.of_file(path)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error}); mend or remove it") from error

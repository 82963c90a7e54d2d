"""An image folder as a source of images.

Two layouts are understood: `<root>/{train,val,test}/<class>/*`, taken as it stands, and `<root>/<class>/*`, split
by content hash.
"""

import logging
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from slipway import hashing
from slipway.sealed import MANIFEST
from train.config import DataConfig
from train.dataset import DataError, Dataset, Found, assemble
from train.split import SPLITS, Split

# What image folders really contain besides: github.com/pytorch/vision/issues/2831, issue 507 of mmpretrain.
_IGNORED_FILES = {"thumbs.db", "desktop.ini", MANIFEST}
_IGNORED_FOLDERS = (".", "__", "lost+found")  # by how their names begin; the last one is root's alone
_SHOWN_FILES = 3  # of those in no class folder: there may be all images of a data set

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
        DataError: the folder is missing, empty, of neither layout, cannot be read as a whole, or not be trained on.
    """
    root = config.root
    with _readable(root):
        if not root.is_dir():
            raise DataError(f"{root.absolute()}: there is no such folder; set data.root to your image folder")
        found = list(_with_splits(root) if (root / "train").is_dir() else _images(root, root, None))
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
    """Every file of every class folder. What is no data, and what has none, is named in the log and passed over."""
    _require_class_folders(parent)
    ignored, empty = list[Path](), list[Path]()
    for folder in sorted(parent.iterdir()):
        if folder.name.startswith(_IGNORED_FOLDERS) or not folder.exists():
            ignored.append(folder)
        elif split is None and all((folder / name).is_dir() for name in SPLITS):
            raise DataError(
                f"{folder}: is no class but a data set of its own, with {', '.join(SPLITS)} in it; set data.root to it"
            )
        elif folder.is_dir():
            images = list[Path]()
            for path in sorted(_entries(folder)):
                (images if _is_data(path.relative_to(folder), path) else ignored).append(path)
            for path in images:
                with _readable(path):
                    sha256 = hashing.of_file(path)
                file = path.relative_to(root).as_posix()
                yield Found(name=folder.name, file=file, sha256=sha256, split=split)
            if not images:
                empty.append(folder)
    if ignored:
        logger.info("%s: ignored, not images: %s", parent, _names(ignored, parent))
    if empty:
        logger.warning("WARNING: %s: no image in the class folder %s", parent, _names(empty, parent))


def _require_class_folders(parent: Path) -> None:
    """Files beside class folders are of no class, and named in the log. Raises DataError if there is no such folder."""
    entries = sorted(parent.iterdir())
    files = [path for path in entries if _is_data(Path(path.name), path)]
    if not files:
        return
    more = f" and {len(files) - _SHOWN_FILES} more" if len(files) > _SHOWN_FILES else ""
    shown = f"{_names(files[:_SHOWN_FILES], parent)}{more}"
    if not any(path.is_dir() for path in entries):
        raise DataError(
            f"{parent}: there is no class folder in it; put the images of each class into one of its own. Found {shown}"
        )
    logger.info("%s: ignored, in no class folder: %s", parent, shown)


def _names(paths: Iterable[Path], parent: Path) -> str:
    return ", ".join(str(path.relative_to(parent)) for path in paths)


def _entries(folder: Path) -> Iterator[Path]:
    """What lies in a folder and in those below it, but for these. A link to a folder is not followed: it may lead back.

    Path.rglob would pass over a folder that it may not read, without a word.
    """
    for parent, folders, names in os.walk(folder, onerror=_raise):
        yield from (Path(parent, name) for name in names)
        yield from (path for name in folders if (path := Path(parent, name)).is_symlink())


def _raise(error: OSError) -> None:
    raise error


def _is_data(within: Path, path: Path) -> bool:
    """within: the same path inside its class folder."""
    hidden = any(part.startswith(".") for part in within.parts)
    return not hidden and path.name.lower() not in _IGNORED_FILES and path.is_file()


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        where, why = error.filename or path, error.strerror or error
        raise DataError(f"{where}: cannot be read ({why}); mend or remove it") from error

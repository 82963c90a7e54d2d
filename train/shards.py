"""Tar shards as a source of images, local or in S3-compatible storage, in the layout of WebDataset.

Files of one sample share a name up to the first dot: `0001.jpg` is the image, `0001.cls` holds the name of its class
(or its number in data.classes). Shards whose names, or folders, begin with train, val and test are taken as these
splits; where none does, content decides.

Each shard is read once, from its beginning to its end, to note where every image lies and what its SHA-256 is. From
then on images are read at random, by byte range: so the order of samples stays a pure function, the position in the
data stays one integer, and no shuffle buffer has to be filled after a restart.
"""

import json
import logging
import tarfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path, PurePosixPath

from slipway import hashing
from slipway.files import write_whole, writing
from train import storage
from train.config import DataConfig
from train.dataset import DataError, Dataset, Found, assemble, plain_name, read_classes
from train.split import SPLITS, Split

FORMAT = "slipway-shard-index/1"
CLASS = "cls"
# What a sample may carry besides; none of it is a picture.
_NO_IMAGE = {CLASS, "json", "txt", "npy", "pyd", "id", "index"}
_READERS = 8

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """An image inside a shard. file: its name there. label: the text of its class file."""

    file: str
    offset: int
    size: int
    sha256: str
    label: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """Where an image lies."""

    shard: str
    offset: int
    size: int
    sha256: str


@dataclass(frozen=True)
class Shards:
    """Images by byte range."""

    spans: Mapping[str, Span]

    def read(self, file: str) -> bytes:
        """Raises DataError if these are not the bytes that were indexed, and what `storage` raises."""
        span = self.spans[file]
        data = storage.read_range(span.shard, span.offset, span.size)
        if hashing.of_bytes(data) != span.sha256:
            raise DataError(f"{self.where(file)}: the shard has changed since training began; start again")
        return data

    def where(self, file: str) -> str:
        span = self.spans[file]
        return f"{span.shard}, {PurePosixPath(file).name} at byte {span.offset}"


def read_shards(config: DataConfig) -> Dataset:
    """Index every `*.tar` below `config.url`, or else `config.root`; what was indexed before is only looked up.

    Raises:
        DataError: there is none, one is no tar or not of this layout, or the data set cannot be trained on.
        SlipwayError: the index cannot be written below `config.cache`.
    """
    place = config.url or str(config.root)
    shards = storage.listing(place, ".tar")
    if not shards:
        raise DataError(f"{place}: holds no *.tar; set data.root or data.url to where the shards are")
    with ThreadPoolExecutor(_READERS) as pool:
        indices = pool.map(partial(_index, cache=config.cache), shards, shards.values())
        members = dict(zip(shards, indices, strict=True))
    splits = _splits(place, list(shards))
    names = None if config.classes is None else read_classes(config.classes)
    found, spans = [], {}
    for shard, own in members.items():
        for member in own:
            file = plain_name(f"{_relative(place, shard).removesuffix('.tar')}/{member.file}")
            name = _class_name(member.label, names)
            found.append(Found(name=name, file=file, sha256=member.sha256, split=splits[shard]))
            spans[file] = Span(shard=shard, offset=member.offset, size=member.size, sha256=member.sha256)
    return assemble(found, Shards(spans), config, place)


def _class_name(label: str, names: tuple[str, ...] | None) -> str:
    """Numbers are looked up in a class list, unless it lists numbers itself."""
    if names and label not in names and label.isdecimal() and int(label) < len(names):
        return names[int(label)]
    return label


def _splits(place: str, shards: list[str]) -> dict[str, Split | None]:
    splits = {shard: _split_of(_relative(place, shard)) for shard in shards}
    there = set(splits.values())
    if there == {None}:
        return splits
    if None in there:
        stray = next(shard for shard, split in splits.items() if split is None)
        raise DataError(
            f"{stray}: other shards are named train, val or test, but this one belongs to none of them"
        )
    if missing := [split for split in SPLITS if split not in there]:
        raise DataError(f"{place}: no shard's name begins with {missing[0]}; train, val and test are needed")
    return splits


def _split_of(shard: str) -> Split | None:
    """`train-0001.tar`, `train/0001.tar`, but not `training.tar`."""
    first = shard.removesuffix(".tar").split("/")[0]
    for split in SPLITS:
        if first.startswith(split) and not first[len(split) : len(split) + 1].isalpha():
            return split
    return None


def _relative(place: str, shard: str) -> str:
    return shard.removeprefix(place).lstrip("/")


def _index(shard: str, version: str, cache: Path) -> list[Member]:
    """What is in a shard. version: changes with its content, so that an index is never one of another content."""
    path = cache / "shards" / f"{hashing.of_data([FORMAT, shard, version])[:32]}.json"
    if path.exists():
        return [Member(**entry) for entry in json.loads(path.read_bytes())]
    members = list(_read_index(shard))
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        # Ranks that start together may all write it: whole and alike, so the last one may win.
        write_whole(path, json.dumps([asdict(member) for member in members]))
    logger.info("%s: %d images", shard, len(members))
    return members


def _read_index(shard: str) -> Iterator[Member]:
    """Read a shard from end to end. Raises DataError where it is no tar or lacks a class or an image."""
    images: dict[str, tuple[str, int, int, str]] = {}
    labels: dict[str, str] = {}
    try:
        with storage.stream(shard) as file, tarfile.open(fileobj=file, mode="r|") as tar:
            for entry in tar:
                if not entry.isfile() or PurePosixPath(entry.name).name.startswith("."):
                    continue
                content = tar.extractfile(entry)
                data = content.read() if content else b""
                key, kind = _key_and_kind(entry.name)
                if kind == CLASS:
                    labels[key] = data.decode().strip()
                elif kind not in _NO_IMAGE:
                    if key in images:
                        raise DataError(
                            f"{shard}: {entry.name} and {images[key][0]} are images of one sample"
                        )
                    images[key] = entry.name, entry.offset_data, len(data), hashing.of_bytes(data)
    except (tarfile.TarError, OSError, EOFError, UnicodeDecodeError) as error:
        raise DataError(f"{shard}: cannot be read as an uncompressed tar ({error})") from error
    if lonely := sorted(images.keys() ^ labels.keys()):
        raise DataError(f"{shard}: {lonely[0]} has no {'class (.cls)' if lonely[0] in images else 'image'}")
    for key, (name, offset, size, sha256) in images.items():
        yield Member(file=name, offset=offset, size=size, sha256=sha256, label=labels[key])


def _key_and_kind(name: str) -> tuple[str, str]:
    """`a/0001.seg.png` -> `a/0001` and `seg.png`, as WebDataset splits names."""
    path = PurePosixPath(name)
    stem, _, kind = path.name.partition(".")
    return str(path.parent / stem), kind.lower()

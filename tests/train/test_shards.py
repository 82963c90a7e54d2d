"""Tar shards mean what the folder means that they were packed from, on this machine and in S3."""

import io
import os
import re
import tarfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from slipway.contract import Preprocessing
from slipway.errors import SlipwayError
from tests.train.conftest import MakeFolder, data_config
from tests.train.sources import upload, write_shards, write_tar
from train import shards, storage
from train.config import AugmentConfig, DataConfig
from train.dataset import DataError, Dataset
from train.folder import read_folder
from train.loader import TrainingSamples, training_batches
from train.order import Order
from train.shards import read_shards
from train.sources import folder_of

RULES = Preprocessing(image_size=16, resize_size=16)


def config_of(place: Path | str, cache: Path) -> DataConfig:
    if isinstance(place, Path):
        return DataConfig(source="shards", root=place, cache=cache)
    return DataConfig(source="shards", url=place, cache=cache)


def contents(dataset: Dataset) -> dict[str, list[tuple[str, bytes]]]:
    """What is in each split: class and bytes of every image, whatever it is called."""
    return {
        split: sorted((dataset.classes[sample.label], dataset.read(sample)) for sample in samples)
        for split, samples in dataset.splits.items()
    }


def images_of(dataset: Dataset, workers: int) -> list[torch.Tensor]:
    samples = TrainingSamples(dataset, RULES, AugmentConfig(), seed=0)
    order = Order(samples=len(samples.samples), batch_size=6, epochs=1, seed=0, fingerprint="fixed")
    batches = training_batches(samples, order, cursor=6, accumulate=1, rank=0, world_size=1, workers=workers)
    return [batch.images for batch in batches]


def test_shards_hold_what_the_folder_held(make_folder: MakeFolder, tmp_path: Path) -> None:
    root = make_folder()
    dataset = read_shards(config_of(write_shards(root, tmp_path / "shards"), tmp_path / "cache"))
    folder = read_folder(data_config(root))
    assert dataset.classes == folder.classes
    assert contents(dataset) == contents(folder)


def test_shards_in_s3_are_read_at_random_by_every_worker(
    make_folder: MakeFolder, tmp_path: Path, s3: None
) -> None:
    """Against a real S3 server. The order is the pure one, from any cursor; no worker shares a connection."""
    local = write_shards(make_folder(), tmp_path / "shards")
    upload(local, "photos")
    here = read_shards(config_of(local, tmp_path / "cache"))
    there = read_shards(config_of("s3://photos", tmp_path / "cache"))
    assert there.fingerprint == here.fingerprint
    assert contents(there) == contents(here)
    expected = images_of(here, workers=0)
    for workers in (0, 2):
        for image, other in zip(images_of(there, workers), expected, strict=True):
            assert torch.equal(image, other)


def test_index_is_built_once_and_again_for_a_shard_that_changed(
    make_folder: MakeFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, s3: None
) -> None:
    root = make_folder()
    local = write_shards(root, tmp_path / "shards")
    upload(local, "indexed")
    read: list[str] = []
    really = shards._read_index

    def count(shard: str) -> Iterator[shards.Member]:
        read.append(Path(shard).name)
        return really(shard)

    monkeypatch.setattr(shards, "_read_index", count)
    for place in (local, "s3://indexed"):
        config = config_of(place, tmp_path / "cache")
        before = read_shards(config)
        assert len(read) == 6
        assert read_shards(config) == before
        assert len(read) == 6
        files = {"1.png": (root / "test" / "ant" / "0.png").read_bytes(), "1.cls": b"bee"}
        write_tar(tmp_path / "new" / "test-1.tar", files)
        if isinstance(place, Path):
            (tmp_path / "new" / "test-1.tar").replace(local / "test-1.tar")
        else:
            storage.client().upload_file(str(tmp_path / "new" / "test-1.tar"), "indexed", "test-1.tar")
        after = read_shards(config)
        assert read[6:] == ["test-1.tar"]
        assert after.fingerprint != before.fingerprint
        with pytest.raises(DataError, match=r"test-1\.tar.*: (the shard has changed|cannot be read)"):
            [before.read(sample) for sample in before.splits["test"]]
        read.clear()


def test_prefix_is_a_folder(make_folder: MakeFolder, tmp_path: Path, s3: None) -> None:
    write_shards(make_folder(), tmp_path / "all" / "photos" / "small")
    write_tar(tmp_path / "all" / "photos" / "smallest.tar", {"1.png": b"", "1.cls": b"other"})
    upload(tmp_path / "all", "prefixed")
    dataset = read_shards(config_of("s3://prefixed/photos/small", tmp_path / "cache"))
    assert dataset.classes == ("ant", "bee", "cat")


def test_access_comes_from_the_environment_and_its_lack_is_said(tmp_path: Path, s3: None) -> None:
    with pytest.raises(DataError, match=r"s3://nowhere: cannot be read .*AWS_\* in the environment"):
        read_shards(config_of("s3://nowhere", tmp_path))


def test_shards_without_splits_are_split_by_content(make_folder: MakeFolder, tmp_path: Path) -> None:
    """Case A09: wherever an image lies; repacking moves none."""
    root = make_folder(train=30, val=10, test=10)
    packed = write_shards(root, tmp_path / "packed")
    for path in list(packed.iterdir()):
        path.rename(path.with_name(f"part-{path.name}"))
    before = read_shards(config_of(packed, tmp_path / "cache"))
    assert all(before.splits.values())
    expected = contents(before)
    for number, path in enumerate(sorted(packed.iterdir())):
        path.rename(path.with_name(f"{9 - number}.tar"))
    assert contents(read_shards(config_of(packed, tmp_path / "cache"))) == expected


def test_numbers_are_looked_up_in_the_class_list(make_folder: MakeFolder, tmp_path: Path) -> None:
    """Case A03: what number 10 means is said once."""
    packed = write_shards(
        make_folder(tuple(str(number) for number in range(12)), train=2, val=1, test=1), tmp_path / "shards"
    )
    names = [f"species {number}" for number in range(12)]
    (tmp_path / "classes.txt").write_text("\n".join(names))
    config = replace(config_of(packed, tmp_path / "cache"), classes=tmp_path / "classes.txt")
    dataset = read_shards(config)
    assert dataset.classes == tuple(names)
    by_number = read_shards(config_of(packed, tmp_path / "cache"))
    for sample, other in zip(
        *(sorted(each.splits["train"], key=lambda s: s.file) for each in (dataset, by_number)), strict=True
    ):
        assert dataset.classes[sample.label] == f"species {by_number.classes[other.label]}"


def broken() -> dict[str, tuple[dict[str, bytes], str]]:
    return {
        "class": ({"a/1.png": b"x"}, r"a/1 has no class \(\.cls\)"),
        "image": ({"a/1.cls": b"x"}, "a/1 has no image"),
        "two images": ({"1.png": b"x", "1.jpg": b"y", "1.cls": b"x"}, r"1\.jpg and 1\.png are images of one"),
        "text": ({"1.png": b"x", "1.cls": b"\xff"}, "cannot be read"),
    }


@pytest.mark.parametrize("kind", broken())
def test_shard_of_another_layout_is_refused_in_words(kind: str, tmp_path: Path) -> None:
    files, message = broken()[kind]
    write_tar(tmp_path / "one.tar", files)
    with pytest.raises(DataError, match=rf"one\.tar: .*{message}"):
        read_shards(config_of(tmp_path, tmp_path / "cache"))


@pytest.mark.parametrize("damage", ["no tar", "cut short", "compressed"])
def test_damaged_shard_is_named(damage: str, make_folder: MakeFolder, tmp_path: Path) -> None:
    packed = write_shards(make_folder(), tmp_path / "shards")
    shard = packed / "val-1.tar"
    data = shard.read_bytes()
    if damage == "compressed":
        file = io.BytesIO()
        with tarfile.open(fileobj=file, mode="w:gz") as tar:
            tar.add(packed / "val-0.tar")
        data = file.getvalue()
    shard.write_bytes({"no tar": b"x" * 5000, "cut short": data[:700], "compressed": data}[damage])
    with pytest.raises(DataError, match=re.escape(f"{shard}: cannot be read as an uncompressed tar")):
        read_shards(config_of(packed, tmp_path / "cache"))


def test_folder_without_shards_and_shards_of_no_split_are_refused(
    make_folder: MakeFolder, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=r"holds no \*\.tar"):
        read_shards(config_of(tmp_path, tmp_path / "cache"))
    packed = write_shards(make_folder(), tmp_path / "shards")
    (packed / "val-0.tar").rename(packed / "training.tar")
    with pytest.raises(DataError, match=r"training\.tar: other shards are named train, val or test"):
        read_shards(config_of(packed, tmp_path / "cache"))
    (packed / "training.tar").unlink()
    (packed / "val-1.tar").unlink()
    with pytest.raises(DataError, match="no shard's name begins with val"):
        read_shards(config_of(packed, tmp_path / "cache"))


def test_cache_that_cannot_be_written_is_named(make_folder: MakeFolder, tmp_path: Path) -> None:
    packed = write_shards(make_folder(), tmp_path / "shards")
    (tmp_path / "cache").write_text("no directory")
    with pytest.raises(SlipwayError, match=rf"{tmp_path}/cache/shards/.*: cannot be written .* MB are free"):
        read_shards(config_of(packed, tmp_path / "cache"))


def test_name_inside_a_shard_leads_out_of_no_folder(make_folder: MakeFolder, tmp_path: Path) -> None:
    """A shard may come from anybody, and its test images are copied into a folder."""
    packed = write_shards(make_folder(), tmp_path / "shards")
    data = next(path for path in (tmp_path / "images" / "test" / "ant").iterdir()).read_bytes()
    write_tar(packed / "test-2.tar", {"../../../out.png": data, "../../../out.cls": b"ant"})
    dataset = read_shards(config_of(packed, tmp_path / "cache"))
    images = folder_of(dataset, "test", tmp_path / "cache")
    assert (images / "test-2" / "out.png").read_bytes() == data
    assert not list(tmp_path.glob("*.png")) + list(Path(os.sep).glob("out.png"))

"""Whatever a data set is kept in, everybody else sees classes, samples and files."""

from pathlib import Path

import pytest

from slipway import hashing
from slipway.config import ConfigError, load
from slipway.sealed import SealError
from tests.train.conftest import MakeFolder
from tests.train.sources import rows_of, write_csv, write_shards
from train.config import Config, DataConfig
from train.dataset import DataError
from train.sources import folder_of, read_dataset


def every_source(root: Path, cache: Path) -> list[DataConfig]:
    table = write_csv(cache.parent / "table.csv", [("path", "label", "split"), *absolute(root)])
    shards = write_shards(root, cache.parent / "shards")
    return [
        DataConfig(root=root, cache=cache),
        DataConfig(source="manifest", root=table, cache=cache),
        DataConfig(source="shards", root=shards, cache=cache),
    ]


def absolute(root: Path) -> list[tuple[str, str, str]]:
    return [(str(root / path), label, split) for path, label, split in rows_of(root)]


def test_every_source_gives_a_folder_of_its_test_images(make_folder: MakeFolder, tmp_path: Path) -> None:
    """The smoke test and the report read files, and hold them against their SHA-256."""
    root = make_folder()
    for config in every_source(root, tmp_path / "cache"):
        dataset = read_dataset(config)
        folder = folder_of(dataset, "test", config.cache)
        for sample in dataset.splits["test"]:
            assert hashing.of_file(folder / sample.file) == sample.sha256
        before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
        assert folder_of(dataset, "test", config.cache) == folder
        assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before
    assert folder != root
    copied = folder / dataset.splits["test"][0].file
    copied.chmod(0o644)
    copied.write_bytes(b"changed")
    with pytest.raises(SealError, match="differs from the manifest"):
        folder_of(dataset, "test", config.cache)


def test_image_that_is_gone_is_named(make_folder: MakeFolder, tmp_path: Path) -> None:
    root = make_folder()
    for config in every_source(root, tmp_path / "cache")[:2]:
        dataset = read_dataset(config)
        path = Path(dataset.where(dataset.splits["train"][0]))
        data = path.read_bytes()
        path.unlink()
        with pytest.raises(DataError, match=rf"{path}: cannot be read \(No such file"):
            dataset.read(dataset.splits["train"][0])
        path.write_bytes(data)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"data.url": "s3://bucket"}, r"data\.url is for data\.source: shards"),
        ({"data.url": "https://x", "data.source": "shards"}, r"data\.url .*begins with s3://"),
        (
            {"data.embedded": "digits", "data.source": "manifest"},
            r"data\.embedded is written as an image folder",
        ),
    ],
)
def test_settings_that_do_not_fit_each_other_are_refused(settings: dict[str, str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        load(Config, None, settings)

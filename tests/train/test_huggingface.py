"""A data set that Hugging Face's library saved means what the folder means that it was made from."""

import importlib.util
from pathlib import Path

import datasets
import pytest

from tests.train.conftest import MakeConfig, MakeFolder, data_config
from tests.train.sources import rows_of
from train import huggingface
from train.config import DataConfig
from train.dataset import DataError, Dataset
from train.fit import fit
from train.folder import read_folder
from train.huggingface import read_saved
from train.split import SPLITS

CLASSES = ["ant", "bee", "cat"]
FEATURES = datasets.Features({"picture": datasets.Image(), "kind": datasets.ClassLabel(names=CLASSES)})
CALLED = {"train": "train", "val": "validation", "test": "test"}


@pytest.fixture(autouse=True)
def nothing_is_remembered() -> None:
    huggingface._tables.cache_clear()
    datasets.disable_progress_bars()


def split_of(root: Path, split: str) -> datasets.Dataset:
    rows = [(root / path, label) for path, label, own in rows_of(root) if own == split]
    content = {
        "picture": [{"bytes": path.read_bytes(), "path": path.name} for path, _ in rows],
        "kind": [CLASSES.index(label) for _, label in rows],
    }
    return datasets.Dataset.from_dict(content, FEATURES)


def with_images(rows: datasets.Dataset, image: dict[str, object] | None) -> datasets.Dataset:
    return datasets.Dataset.from_dict({"picture": [image] * len(rows), "kind": rows["kind"]}, FEATURES)


@pytest.fixture
def saved(make_folder: MakeFolder, tmp_path: Path) -> tuple[Path, Path]:
    """A folder of images, and the same as a data set of three splits."""
    root = make_folder()
    everything = datasets.DatasetDict({CALLED[split]: split_of(root, split) for split in SPLITS})
    everything.save_to_disk(str(tmp_path / "saved"))
    return root, tmp_path / "saved"


def read(root: Path) -> Dataset:
    return read_saved(DataConfig(source="huggingface", root=root))


def test_data_set_holds_what_the_folder_holds(saved: tuple[Path, Path]) -> None:
    dataset, folder = read(saved[1]), read_folder(data_config(saved[0]))
    assert dataset.classes == folder.classes
    for split, samples in folder.splits.items():
        own = dataset.splits[split]
        assert [(each.sha256, each.label) for each in own] == [(each.sha256, each.label) for each in samples]
        assert [dataset.read(each) for each in own] == [folder.read(each) for each in samples]
        assert all(each.file.endswith(".png") for each in own)
    assert dataset.where(dataset.splits["val"][0]) == f"{saved[1]}, split validation, row 0"


def test_one_split_is_split_by_content(saved: tuple[Path, Path], tmp_path: Path) -> None:
    alone = datasets.concatenate_datasets([split_of(saved[0], split) for split in SPLITS])
    alone.save_to_disk(str(tmp_path / "alone"))
    dataset = read(tmp_path / "alone")
    assert all(dataset.splits[split] for split in SPLITS)
    assert sum(map(len, dataset.splits.values())) == len(alone)


def test_a_run_trains_on_it_with_loader_workers(saved: tuple[Path, Path], make_config: MakeConfig) -> None:
    config = make_config(saved[1], data__source="huggingface", data__workers="2", training__epochs="1")
    run = fit(config, read_saved(config.data))
    assert list(run.glob("checkpoints/step-*"))


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda each: each.remove_columns("kind"), "needs one column of the type ClassLabel, and has none"),
        (
            lambda each: datasets.concatenate_datasets(
                [each, each.select_columns("picture").rename_column("picture", "more")], axis=1
            ),
            r"needs one column of the type Image, and has \['picture', 'more'\]",
        ),
        (
            lambda each: each.map(lambda row: {"kind": -1}, features=FEATURES),
            "split train, row 0: has no label",
        ),
        (lambda each: with_images(each, None), "split train, row 0: has no image"),
    ],
    ids=["no label column", "two image columns", "unlabelled", "no image"],
)
def test_what_cannot_be_trained_on_is_told(saved, tmp_path: Path, change, complaint: str) -> None:  # type: ignore[no-untyped-def]
    change(split_of(saved[0], "train")).save_to_disk(str(tmp_path / "changed"))
    with pytest.raises(DataError, match=complaint):
        read(tmp_path / "changed")


def test_unknown_split_and_what_is_no_data_set_are_told(saved: tuple[Path, Path], tmp_path: Path) -> None:
    odd = datasets.DatasetDict({"train": split_of(saved[0], "train"), "dev": split_of(saved[0], "val")})
    odd.save_to_disk(str(tmp_path / "odd"))
    with pytest.raises(DataError, match="has the split 'dev'; splits are called train, validation"):
        read(tmp_path / "odd")
    with pytest.raises(DataError, match="cannot be read as a data set that was saved to disk"):
        read(saved[0])


def test_missing_library_is_told(saved: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DataError, match="its library is not installed; run `make extras`"):
        read(saved[1])

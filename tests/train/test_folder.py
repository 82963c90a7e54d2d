import logging
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.train.conftest import MakeFolder, data_config, save_image
from train.dataset import DataError
from train.folder import read_folder


def test_class_list_is_that_of_training_when_validation_lacks_a_class(
    make_folder: MakeFolder, caplog: pytest.LogCaptureFixture
) -> None:
    """Case A02: the indices of the other classes must not shift; one warning names the class."""
    root = make_folder(("a", "b", "c", "d"))
    shutil.rmtree(root / "val" / "b")
    folder = read_folder(data_config(root))
    assert folder.classes == ("a", "b", "c", "d")
    assert {folder.classes[s.label]: Path(s.file).parent.name for s in folder.splits["val"]} == {
        "a": "a",
        "c": "c",
        "d": "d",
    }
    assert [record.message for record in caplog.records if "no image of class b" in record.message]


def test_empty_class_directory_in_validation_shifts_nothing(make_folder: MakeFolder) -> None:
    root = make_folder(("a", "b", "c", "d"))
    for file in (root / "val" / "b").iterdir():
        file.unlink()
    folder = read_folder(data_config(root))
    assert all(folder.classes[s.label] == Path(s.file).parent.name for s in folder.splits["val"])


def test_class_unknown_to_training_is_an_error_that_names_it(make_folder: MakeFolder) -> None:
    root = make_folder(("a", "b"))
    shutil.copytree(root / "val" / "a", root / "val" / "z")
    with pytest.raises(DataError, match=r"val/z: is a class that the training split does not have"):
        read_folder(data_config(root))


def test_numeric_class_names_keep_their_names(make_folder: MakeFolder) -> None:
    """Case A03: '10' sorts before '2'; whoever reads the class list must find the right name anyway."""
    folder = read_folder(data_config(make_folder(tuple(str(n) for n in range(12)), train=2, val=1, test=1)))
    assert folder.classes[2] == "10"
    assert all(folder.classes[s.label] == Path(s.file).parent.name for s in folder.splits["train"])


def test_hidden_folders_and_files_are_neither_classes_nor_samples(
    make_folder: MakeFolder, caplog: pytest.LogCaptureFixture
) -> None:
    """Case A06."""
    root = make_folder(("a", "b"))
    before = read_folder(data_config(root))
    random = np.random.default_rng(1)
    for name in (".ipynb_checkpoints", "__MACOSX"):
        (root / "train" / name).mkdir()
        save_image(root / "train" / name / "x.png", (0, 0, 0), random)
    for name in ("._x.jpg", ".DS_Store", "Thumbs.db"):
        (root / "train" / "a" / name).write_bytes(b"no image")
    caplog.set_level(logging.INFO)
    after = read_folder(data_config(root))
    assert after.classes == ("a", "b")
    assert after.splits == before.splits
    assert after.fingerprint == before.fingerprint
    ignored = [record.message for record in caplog.records if "ignored" in record.message]
    assert len(ignored) == 1
    assert ".ipynb_checkpoints" in ignored[0]
    assert "a/._x.jpg" in ignored[0]


def test_every_file_name_is_found_whatever_its_characters(make_folder: MakeFolder) -> None:
    """Case A16."""
    root = make_folder(("kla sse ä", "b"))
    random = np.random.default_rng(1)
    names = ["unié spa ce.png", "图.png", "X.PNG", "li\nne.png", "quo'te\".png"]
    for name in names:
        save_image(root / "train" / "kla sse ä" / name, (9, 9, 9), random)
    folder = read_folder(data_config(root))
    assert set(names) <= {Path(s.file).name for s in folder.splits["train"]}


def test_folder_without_splits_is_split_by_content(tmp_path: Path) -> None:
    root = tmp_path / "flat"
    random = np.random.default_rng(2)
    for name in ("a", "b"):
        (root / name).mkdir(parents=True)
        for number in range(40):
            save_image(root / name / f"{number}.png", (50, 60, 70), random)
    before = read_folder(data_config(root))
    assert sum(map(len, before.splits.values())) == 80
    assert all(before.splits.values())
    save_image(root / "a" / "another.png", (50, 60, 70), random)
    shutil.copy(root / "a" / "0.png", root / "b" / "copy of a 0.png")
    after = read_folder(data_config(root))
    where = {s.file: split for split, samples in after.splits.items() for s in samples}
    assert all(where[s.file] == split for split, samples in before.splits.items() for s in samples)
    # Case A09: equal contents land on one side, so none leaks from training into the test.
    assert where["b/copy of a 0.png"] == where["a/0.png"]


def test_fingerprint_follows_content_and_names(make_folder: MakeFolder) -> None:
    root = make_folder()
    before = read_folder(data_config(root)).fingerprint
    assert read_folder(data_config(root)).fingerprint == before
    save_image(root / "test" / "ant" / "0.png", (1, 2, 3), np.random.default_rng(3))
    assert read_folder(data_config(root)).fingerprint != before


def test_missing_folder_and_missing_split_say_what_is_expected(
    make_folder: MakeFolder, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=f"{tmp_path}/nowhere: there is no such folder; set data.root"):
        read_folder(data_config(tmp_path / "nowhere"))
    root = make_folder()
    shutil.rmtree(root / "val")
    with pytest.raises(DataError, match=r"images/val: is missing"):
        read_folder(data_config(root))


def test_folder_of_data_sets_is_no_data_set(make_folder: MakeFolder) -> None:
    """`data`, where all of them lie, is one level too high, and names of data sets would be its classes."""
    root = make_folder()
    with pytest.raises(
        DataError, match=f"{root}: is no class but a data set of its own, with train, val, test"
    ):
        read_folder(data_config(root.parent))


def test_images_without_class_folders_are_no_data_set(make_folder: MakeFolder) -> None:
    root = make_folder()
    for folder in ("ant", "bee", "cat"):
        for file in (root / "val" / folder).iterdir():
            file.rename(root / "val" / f"{folder}-{file.name}")
        (root / "val" / folder).rmdir()
    with pytest.raises(
        DataError, match=r"/val: there is no class folder in it; .* Found ant-.*, .* and \d+ more$"
    ):
        read_folder(data_config(root))


def test_one_class_is_not_enough(make_folder: MakeFolder) -> None:
    with pytest.raises(DataError, match="at least two classes"):
        read_folder(data_config(make_folder(("only",))))


def test_class_name_with_a_line_break_is_refused(make_folder: MakeFolder) -> None:
    with pytest.raises(DataError, match="line break"):
        read_folder(data_config(make_folder(("a\nb", "c"))))


def test_folder_that_cannot_be_read_is_named(
    make_folder: MakeFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by its permissions, which mean nothing to root. Left out, it would be a class fewer, without a word."""
    closed, scandir = make_folder() / "train" / "bee", os.scandir

    def closed_to_us(path: Path) -> Any:
        if Path(path) == closed:
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr("os.scandir", closed_to_us)
    with pytest.raises(
        DataError, match=r"train/bee: cannot be read \(Permission denied\); mend or remove it"
    ):
        read_folder(data_config(closed.parents[1]))


def test_what_is_passed_over_is_named(make_folder: MakeFolder, caplog: pytest.LogCaptureFixture) -> None:
    root = make_folder()
    before = read_folder(data_config(root))
    for name in ("empty", "lost+found", "cat/deeper"):
        (root / "train" / name).mkdir()
    (root / "train" / "moved").symlink_to("nowhere")
    (root / "train" / "ant" / "linked").symlink_to(root / "train" / "bee")
    (root / "train" / "ant" / "gone.png").symlink_to("nowhere.png")
    for name in ("README.md", "Thumbs.db"):
        (root / "train" / name).touch()
    caplog.set_level(logging.INFO)
    assert read_folder(data_config(root)).fingerprint == before.fingerprint
    assert caplog.messages == [
        f"{root}/train: ignored, in no class folder: README.md",
        f"{root}/train: ignored, not images: ant/gone.png, ant/linked, lost+found, moved",
        f"WARNING: {root}/train: no image in the class folder empty",
    ]


def test_class_folder_that_is_a_link_is_a_class(make_folder: MakeFolder) -> None:
    root = make_folder()
    before = read_folder(data_config(root))
    (root / "train" / "bee").rename(root.parent / "elsewhere")
    (root / "train" / "bee").symlink_to(root.parent / "elsewhere")
    assert read_folder(data_config(root)).fingerprint == before.fingerprint


def test_file_that_cannot_be_read_is_named(make_folder: MakeFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by its permissions, which mean nothing to root."""
    root = make_folder()

    def of_file(path: Path) -> str:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("slipway.hashing.of_file", of_file)
    with pytest.raises(DataError, match=r"0\.png: cannot be read \(Permission denied\); mend or remove it"):
        read_folder(data_config(root))

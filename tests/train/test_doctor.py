import logging
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_sample_image

from slipway.config import load
from slipway.contract import Preprocessing
from tests.images import truncated
from tests.train.conftest import MakeFolder, data_config, save_image
from train.config import Config
from train.dataset import DataError
from train.doctor import Diagnosis, diagnose, findings, require_healthy, to_record
from train.examine import examine
from train.folder import read_folder

RULES = Preprocessing(image_size=16, resize_size=16)


def diagnosis_of(root: Path) -> Diagnosis:
    folder = read_folder(data_config(root))
    return diagnose(folder, examine(folder, RULES, root.parent / "memory"), RULES.image_size)


def settings(**options: str) -> Config:
    return load(Config, None, {name.replace("__", "."): value for name, value in options.items()})


def check(root: Path, **options: str) -> None:
    require_healthy(diagnosis_of(root), settings(**options), lambda file: str(root / file))


def test_good_folder_passes(make_folder: MakeFolder, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    check(make_folder())
    assert [record.message for record in caplog.records] == ["39 images of 3 classes decode"]


def test_every_bad_file_is_named_with_its_code_and_reason(make_folder: MakeFolder) -> None:
    """Case A07: all of them at once, whatever split they are in; a half file passes a check of its header."""
    root = make_folder()
    bad = {
        root / "test" / "cat" / "1.png": b"<html>404</html>",
        root / "train" / "bee" / "3.png": truncated(),
        root / "val" / "ant" / "0.png": b"",
    }
    for path, data in bad.items():
        path.write_bytes(data)
    with pytest.raises(DataError) as caught:
        check(root)
    message = str(caught.value)
    for path, code in zip(bad, ("NOT_AN_IMAGE", "DAMAGED", "EMPTY"), strict=True):
        assert f"{path}: {code}: " in message
    assert message.startswith("images that cannot be used: 3; mend or remove them")


def test_long_list_of_bad_files_is_not_cut(make_folder: MakeFolder) -> None:
    root = make_folder(train=30)
    for path in (root / "train").rglob("*.png"):
        path.write_bytes(b"no image" + str(path).encode())
    with pytest.raises(DataError) as caught:
        check(root)
    assert str(caught.value).count("NOT_AN_IMAGE") == 90


def test_bad_training_images_may_be_skipped_but_no_others(
    make_folder: MakeFolder, caplog: pytest.LogCaptureFixture
) -> None:
    root = make_folder()
    (root / "train" / "ant" / "0.png").write_bytes(b"")
    check(root, data__on_bad_sample="skip")
    assert "training images that will be skipped: 1" in caplog.text
    assert f"{root}/train/ant/0.png: EMPTY: " in caplog.text
    (root / "val" / "ant" / "0.png").write_bytes(b"")
    with pytest.raises(DataError) as caught:
        check(root, data__on_bad_sample="skip")
    assert "images that cannot be used: 1" in str(caught.value)
    assert "train/ant" not in str(caught.value)


def test_same_image_in_two_splits_is_an_error_that_names_both(
    make_folder: MakeFolder, caplog: pytest.LogCaptureFixture
) -> None:
    """Case A09: three files copied under other names; or a warning, by option."""
    root = make_folder()
    copies = {
        root / "train" / name / "0.png": root / "val" / name / f"copy of {name}.png"
        for name in ("ant", "bee", "cat")
    }
    for original, copy in copies.items():
        shutil.copy(original, copy)
    with pytest.raises(DataError) as caught:
        check(root)
    assert "images in more than one split: 3" in str(caught.value)
    for original, copy in copies.items():
        assert f"{original} and {copy} are the same image" in str(caught.value)
    check(root, doctor__leaks="warn")
    assert f"{root}/train/ant/0.png and {root}/val/ant/copy of ant.png are the same image" in caplog.text


def test_list_of_leaks_is_cut_and_says_so(make_folder: MakeFolder) -> None:
    root = make_folder(train=10)
    for path in (root / "train").rglob("*.png"):
        shutil.copy(path, root / "test" / path.parent.name / f"copy {path.name}")
    with pytest.raises(DataError, match=r"and 10 more; `python -m train data stats` writes all of them"):
        check(root)


def test_same_image_under_two_classes_is_a_warning_or_by_option_an_error(
    make_folder: MakeFolder, caplog: pytest.LogCaptureFixture
) -> None:
    root = make_folder()
    shutil.copy(root / "train" / "ant" / "0.png", root / "train" / "bee" / "no bee.png")
    check(root)
    assert "images under more than one class: 1" in caplog.text
    with pytest.raises(DataError, match=r"train/ant/0.png and .*train/bee/no bee.png are the same image"):
        check(root, doctor__contradictions="error")


def test_resaved_copy_in_another_split_is_found(
    make_folder: MakeFolder, caplog: pytest.LogCaptureFixture
) -> None:
    """Case A09, as it usually is: scaled and compressed again, no byte is the same."""
    root = make_folder()
    china = Image.fromarray(load_sample_image("china.jpg"))
    china.resize((400, 267)).save(root / "train" / "ant" / "china.png")
    china.resize((200, 134)).save(root / "test" / "ant" / "again.jpg", quality=60)
    Image.fromarray(load_sample_image("flower.jpg")).save(root / "test" / "bee" / "flower.jpg")
    diagnosis = diagnosis_of(root)
    assert [(pair.first.file, pair.second.file) for pair in diagnosis.near_leaks()] == [
        ("train/ant/china.png", "test/ant/again.jpg")
    ]
    check(root)
    assert f"{root}/train/ant/china.png and {root}/test/ant/again.jpg" in caplog.text
    with pytest.raises(DataError, match="pairs that look alike, in different splits: 1"):
        check(root, doctor__near_leaks="error")


def test_look_alikes_within_a_split_are_no_finding(make_folder: MakeFolder) -> None:
    root = make_folder()
    china = Image.fromarray(load_sample_image("china.jpg"))
    china.resize((400, 267)).save(root / "train" / "ant" / "china.png")
    china.resize((200, 134)).save(root / "train" / "ant" / "again.jpg")
    diagnosis = diagnosis_of(root)
    assert len(diagnosis.look_alikes) == 1
    assert not findings(diagnosis, settings())


def test_imbalance_and_absent_classes_are_reported(make_folder: MakeFolder) -> None:
    root = make_folder(("few", "many"), train=2)
    random = np.random.default_rng(5)
    for number in range(30):
        save_image(root / "train" / "many" / f"more {number}.png", (1, 2, 3), random)
    shutil.rmtree(root / "val" / "few")
    diagnosis = diagnosis_of(root)
    assert diagnosis.imbalance() == 16
    assert diagnosis.absent() == [("val", "few")]
    (finding,) = findings(diagnosis, settings())
    assert finding.title == "the largest class has 16 times the images of the smallest"
    assert list(finding.examples) == ["few: 2", "many: 32"]


def test_bad_copies_are_bad_files_and_not_leaks_as_well(make_folder: MakeFolder) -> None:
    root = make_folder()
    for split in ("train", "val"):
        (root / split / "ant" / "empty.png").write_bytes(b"")
    diagnosis = diagnosis_of(root)
    assert [place.file for place, _ in diagnosis.refused] == ["train/ant/empty.png", "val/ant/empty.png"]
    assert not diagnosis.copies


def test_figures_count_files_and_not_contents(make_folder: MakeFolder) -> None:
    root = make_folder(train=1, val=1, test=1)
    wide = Image.fromarray(np.zeros((10, 40, 3), np.uint8))
    for name in ("a", "b"):
        wide.save(root / "train" / "ant" / f"{name}.jpg")
    diagnosis = diagnosis_of(root)
    assert diagnosis.formats == {"PNG": 9, "JPEG": 2}
    assert diagnosis.orientations == {"1": 11}
    spreads = {name: (each.least, each.median, each.most) for name, each in diagnosis.sizes.items()}
    assert spreads == {
        "width": (12, 12, 40),
        "height": (10, 12, 12),
        "shorter side": (10, 12, 12),
        "aspect": (1, 1, 4),
    }
    assert all(sum(each.counts) == 11 for each in diagnosis.sizes.values())
    assert diagnosis.counts["train"] == {"ant": 3, "bee": 1, "cat": 1}


def test_colours_are_those_of_the_training_split(make_folder: MakeFolder) -> None:
    root = make_folder(("a", "b"), train=1, val=1, test=1)
    for split, level in (("train", 51), ("val", 255), ("test", 255)):
        for name in ("a", "b"):
            Image.new("RGB", (9, 9), (level, level, level)).save(root / split / name / "0.png")
    diagnosis = diagnosis_of(root)
    assert diagnosis.mean == pytest.approx([0.2] * 3)
    assert diagnosis.std == pytest.approx([0] * 3, abs=1e-9)


def test_record_holds_what_messages_cut(make_folder: MakeFolder) -> None:
    root = make_folder(train=10)
    for path in (root / "train").rglob("*.png"):
        shutil.copy(path, root / "test" / path.parent.name / f"copy {path.name}")
    diagnosis = diagnosis_of(root)
    record = to_record(diagnosis, findings(diagnosis, settings()))
    assert len(record["copies"]) == len(record["findings"][0]["examples"]) == 30
    assert record["copies"][0] == [
        {"split": "test", "file": "test/ant/copy 0.png", "label": "ant"},
        {"split": "train", "file": "train/ant/0.png", "label": "ant"},
    ]

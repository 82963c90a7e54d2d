"""The page of `data show`: what it shows is what will be trained on, and it stands alone."""

import base64
import io
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_sample_image

from slipway.preprocessing import preprocess
from tests.train.conftest import MakeConfig, MakeFolder, save_image
from tests.train.test_charts import Tags
from train import charts
from train.config import Config
from train.dataset import Dataset
from train.doctor import Diagnosis, diagnose
from train.doctor_page import MOST_CLASSES, SAMPLES, galleries, shown_classes, side_by_side, write_data_page
from train.examine import examine
from train.folder import read_folder
from train.loader import TrainingSamples
from train.order import Draw

AUGMENTED = {"augment__policy": "trivial", "augment__erase": "0.5", "training__seed": "7"}


def examined(config: Config) -> tuple[Dataset, Diagnosis]:
    folder = read_folder(config.data)
    found = examine(folder, config.image.preprocessing(), config.run.directory / ".examined")
    return folder, diagnose(folder, found, config.image.size)


def page_of(config: Config, tmp_path: Path) -> Tags:
    folder, diagnosis = examined(config)
    path = write_data_page(tmp_path / "doctor.html", config, folder, diagnosis)
    return Tags(path.read_text(encoding="utf-8"))


def pixels(picture: charts.Picture) -> np.ndarray:
    """uint8 [3, height, width] of a picture small enough to be embedded exactly."""
    data = base64.b64decode(picture.uri.partition(",")[2])
    return np.asarray(Image.open(io.BytesIO(data))).transpose(2, 0, 1)


def test_pictures_are_those_of_serving_and_of_training_bit_for_bit(
    make_config: MakeConfig, make_folder: MakeFolder
) -> None:
    config = make_config(make_folder(), **AUGMENTED)
    folder, diagnosis = examined(config)
    rules = config.image.preprocessing()
    training = TrainingSamples(folder, rules, config.augment, config.training.seed)
    for label, gallery in enumerate(galleries(config, folder, diagnosis, folder.classes)):
        mine = [index for index, sample in enumerate(folder.splits["train"]) if sample.label == label]
        first = folder.read(folder.splits["train"][mine[0]])
        assert np.array_equal(pixels(gallery.served[0]), preprocess(first, rules))
        for epoch, picture in enumerate(gallery.drawn):
            image, *_ = training[Draw(epoch=epoch, index=mine[0], weight=1.0)]
            assert np.array_equal(pixels(picture), image)
        assert len(gallery.served) == len(gallery.drawn) == SAMPLES


def test_page_stands_alone_and_shows_every_kind_of_finding(
    make_config: MakeConfig, make_folder: MakeFolder, tmp_path: Path
) -> None:
    root = make_folder()
    shutil.copy(root / "train" / "ant" / "0.png", root / "test" / "ant" / "leak.png")
    (root / "val" / "bee" / "<script>.png").write_bytes(b"<html>404</html>")
    page = page_of(make_config(root, **AUGMENTED), tmp_path)
    assert "Images in more than one split: 1" in page.text
    assert "The same image, in two splits" in page.text
    assert "val/bee/<script>.png" in page.text
    assert "NOT_AN_IMAGE" in page.text
    assert "TrivialAugment, a part erased with probability 0.5" in page.text
    assert not page.all("script")
    assert all(image["src"].startswith("data:image/") for image in page.all("img"))
    assert all(link["href"].startswith(("#", "data:")) for link in page.all("a") + page.all("link"))
    # Absolute paths say more about a machine than a page that is passed around should.
    assert str(tmp_path) not in (tmp_path / "doctor.html").read_text(encoding="utf-8")


def test_healthy_folder_says_so(make_config: MakeConfig, make_folder: MakeFolder, tmp_path: Path) -> None:
    page = page_of(make_config(make_folder()), tmp_path)
    text = re.sub(r"\s+", " ", page.text)
    assert "Fit to train on Yes 0 errors, 0 warnings" in text
    assert "No two files hold the same picture" in text
    assert "12 in all images." in text


def test_class_without_a_usable_image_is_named(
    make_config: MakeConfig, make_folder: MakeFolder, tmp_path: Path
) -> None:
    root = make_folder()
    for path in (root / "train" / "bee").iterdir():
        path.write_bytes(b"")
    assert "None of its training images can be used." in page_of(make_config(root), tmp_path).text


def test_folder_of_nothing_but_bad_files_still_gets_its_page(
    make_config: MakeConfig, make_folder: MakeFolder, tmp_path: Path
) -> None:
    root = make_folder()
    for path in root.rglob("*.png"):
        path.write_bytes(b"no image")
    assert "39 of 39 files that cannot be used" in page_of(make_config(root), tmp_path).text


def test_of_many_classes_the_smallest_and_the_largest_are_shown(
    make_config: MakeConfig, make_folder: MakeFolder, tmp_path: Path
) -> None:
    names = tuple(f"class {number:03d}" for number in range(MOST_CLASSES + 20))
    root = make_folder(names, train=1, val=1, test=1)
    random = np.random.default_rng(1)
    for number in range(3):
        save_image(root / "train" / names[30] / f"more {number}.png", (1, 2, 3), random)
    shown = shown_classes(examined(make_config(root))[1])
    assert len(shown) == MOST_CLASSES
    assert shown[0] == names[0]
    assert shown[-1] == names[30]


def test_pairs_that_matter_most_come_first(make_config: MakeConfig, make_folder: MakeFolder) -> None:
    root = make_folder()
    china = Image.fromarray(load_sample_image("china.jpg"))
    for name in ("train/ant/a.png", "train/ant/b.png", "test/ant/c.jpg"):
        china.resize((200, 134)).save(root / name)
    shutil.copy(root / "train" / "ant" / "0.png", root / "train" / "bee" / "other class.png")
    pairs = side_by_side(examined(make_config(root))[1])
    assert [(pair.second.file, pair.bits is None) for pair in pairs[1:]] == [
        ("train/bee/other class.png", True),
        ("train/ant/b.png", True),
    ]
    assert {pairs[0].first.split, pairs[0].second.split} == {"train", "test"}


@pytest.mark.parametrize("large", [False, True])
def test_page_is_the_same_again(
    make_config: MakeConfig, make_folder: MakeFolder, tmp_path: Path, large: bool
) -> None:
    config = make_config(make_folder(), **({"image__size": "80", "image__resize": "96"} if large else {}))
    folder, diagnosis = examined(config)
    path = tmp_path / "doctor.html"
    first = write_data_page(path, config, folder, diagnosis).read_bytes()
    assert write_data_page(path, config, folder, diagnosis).read_bytes() == first

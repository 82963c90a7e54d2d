from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from slipway.sealed import SealError
from tests.train.conftest import data_config
from train.config import DataConfig
from train.embedded import write_embedded
from train.folder import read_folder


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_embedded(DataConfig(embedded="digits", root=tmp_path_factory.mktemp("data") / "digits"))


def test_digits_become_an_ordinary_image_folder(digits: Path) -> None:
    folder = read_folder(data_config(digits))
    assert folder.classes == tuple("0123456789")
    assert sum(map(len, folder.splits.values())) == 1797
    brightest = 0
    for sample in folder.splits["train"][:20]:
        with Image.open(digits / sample.file) as image:
            assert (image.size, image.mode) == ((8, 8), "L")
            brightest = max(brightest, int(np.asarray(image).max()))
    assert brightest == 255


def test_no_image_is_in_two_splits(digits: Path) -> None:
    splits = read_folder(data_config(digits)).splits
    contents = {split: {sample.sha256 for sample in samples} for split, samples in splits.items()}
    assert not contents["train"] & contents["test"]
    assert not contents["train"] & contents["val"]


def test_photographs_become_patches_that_share_no_pixel(tmp_path: Path) -> None:
    """Case A09: each patch is there once, so nothing of the test split was seen in training."""
    folder = read_folder(data_config(write_embedded(DataConfig(embedded="photos", root=tmp_path / "photos"))))
    assert folder.classes == tuple(
        f"{photo}-{third}" for photo in ("china", "flower") for third in ("bottom", "middle", "top")
    )
    files = [sample.file.split("/", 1)[1] for samples in folder.splits.values() for sample in samples]
    assert len(files) == len(set(files)) == 2 * 13 * 20
    with Image.open(tmp_path / "photos" / folder.splits["test"][0].file) as image:
        assert (image.size, image.mode) == ((32, 32), "RGB")


def test_second_call_changes_nothing_and_other_splits_are_refused(digits: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in digits.rglob("*")}
    write_embedded(DataConfig(embedded="digits", root=digits))
    assert before == {path: path.stat().st_mtime_ns for path in digits.rglob("*")}
    with pytest.raises(SealError, match="another split"):
        write_embedded(DataConfig(embedded="digits", root=digits, split_seed=1))
    with pytest.raises(SealError, match="another data set"):
        write_embedded(DataConfig(embedded="photos", root=digits))


def test_folder_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "photo.png").write_bytes(b"precious")
    with pytest.raises(SealError, match="not a sealed directory"):
        write_embedded(DataConfig(embedded="digits", root=tmp_path / "mine"))
    assert (tmp_path / "mine" / "photo.png").read_bytes() == b"precious"

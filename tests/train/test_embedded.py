from pathlib import Path

import pytest
from PIL import Image

from slipway.sealed import SealError
from tests.train.conftest import data_config
from train.embedded import write_digits
from train.folder import read_folder


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_digits(tmp_path_factory.mktemp("data") / "digits", 0.15, 0.15, 0)


def test_digits_become_an_ordinary_image_folder(digits: Path) -> None:
    folder = read_folder(data_config(digits))
    assert folder.classes == tuple("0123456789")
    assert sum(map(len, folder.splits.values())) == 1797
    brightest = 0
    for sample in folder.splits["train"][:20]:
        with Image.open(digits / sample.file) as image:
            assert (image.size, image.mode) == ((8, 8), "L")
            brightest = max(brightest, image.getextrema()[1])
    assert brightest == 255


def test_no_image_is_in_two_splits(digits: Path) -> None:
    splits = read_folder(data_config(digits)).splits
    contents = {split: {sample.sha256 for sample in samples} for split, samples in splits.items()}
    assert not contents["train"] & contents["test"]
    assert not contents["train"] & contents["val"]


def test_second_call_changes_nothing_and_other_splits_are_refused(digits: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in digits.rglob("*")}
    write_digits(digits, 0.15, 0.15, 0)
    assert before == {path: path.stat().st_mtime_ns for path in digits.rglob("*")}
    with pytest.raises(SealError, match="another split"):
        write_digits(digits, 0.15, 0.15, 1)


def test_folder_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "photo.png").write_bytes(b"precious")
    with pytest.raises(SealError, match="not a sealed directory"):
        write_digits(tmp_path / "mine", 0.15, 0.15, 0)
    assert (tmp_path / "mine" / "photo.png").read_bytes() == b"precious"

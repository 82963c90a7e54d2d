import io

import pytest
from PIL import Image

from slipway.contract import Preprocessing
from tests.train.conftest import MakeFolder, data_config
from train.dataset import DataError
from train.folder import read_folder
from train.preflight import require_decodable

RULES = Preprocessing(image_size=16, resize_size=16)


def jpeg() -> bytes:
    file = io.BytesIO()
    Image.effect_noise((64, 64), 90).convert("RGB").save(file, "JPEG")
    return file.getvalue()


def test_every_bad_file_is_named_with_its_reason(make_folder: MakeFolder) -> None:
    """Case A07: all of them at once, whatever split they are in; a half file passes a check of its header."""
    root = make_folder()
    bad = {
        root / "train" / "bee" / "3.png": jpeg()[: len(jpeg()) // 2],
        root / "val" / "ant" / "0.png": b"",
        root / "test" / "cat" / "1.png": b"<html>404</html>",
    }
    for path, data in bad.items():
        path.write_bytes(data)
    with pytest.raises(DataError) as caught:
        require_decodable(read_folder(data_config(root)), RULES)
    message = str(caught.value)
    for path, code in zip(bad, ("DAMAGED", "EMPTY", "NOT_AN_IMAGE"), strict=True):
        assert f"{path}: {code}: " in message
    assert "3 images cannot be used" in message


def test_long_list_is_cut_and_says_so(make_folder: MakeFolder) -> None:
    root = make_folder(train=30)
    for path in (root / "train").rglob("*.png"):
        path.write_bytes(b"no image")
    with pytest.raises(DataError, match=r"and 70 more\n.*90 images cannot be used"):
        require_decodable(read_folder(data_config(root)), RULES)


def test_good_folder_passes(make_folder: MakeFolder) -> None:
    require_decodable(read_folder(data_config(make_folder())), RULES)


def test_limits_are_those_of_serving(make_folder: MakeFolder) -> None:
    """Case A11: what the server would refuse is not trained on."""
    strict = Preprocessing(image_size=16, resize_size=16, max_pixels=100)
    with pytest.raises(DataError, match=r"TOO_MANY_PIXELS: 12 x 12 is over the limit of 100 pixels"):
        require_decodable(read_folder(data_config(make_folder())), strict)

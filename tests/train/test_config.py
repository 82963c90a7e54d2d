"""An option whose default follows another one."""

from pathlib import Path

import pytest

from slipway.config import load, to_dict
from train.config import Config, ImageConfig


@pytest.mark.parametrize(("size", "resize"), [(1, 1), (16, 18), (64, 73), (224, 256), (320, 366)])
def test_size_alone_leaves_the_share_of_a_picture_that_is_seen(size: int, resize: int) -> None:
    config = load(Config, None, {"image.size": str(size)})
    assert config.image == ImageConfig(size=size)
    assert config.image.preprocessing().resize_size == resize
    assert to_dict(config)["image"]["resize"] == resize


def test_resize_is_256_where_nothing_is_given_and_what_is_given_where_something_is(tmp_path: Path) -> None:
    assert ImageConfig().resize == load(Config, None, {}).image.resize == 256
    assert load(Config, None, {"image.size": "64", "image.resize": "256"}).image.resize == 256
    file = tmp_path / "a.yaml"
    file.write_text("image: {size: 64, resize: 64}\n")
    assert load(Config, file, {}).image.resize == 64
    assert load(Config, file, {"image.resize": "0"}).image.resize == 73

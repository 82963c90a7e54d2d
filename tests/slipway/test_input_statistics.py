"""What is measured when a bundle is made is what the service counts: the same bins, of the same pixels."""

import json
from pathlib import Path

import numpy as np
import pytest

from slipway import input_statistics
from slipway.contract import Preprocessing
from slipway.input_statistics import (
    BRIGHTNESS,
    EDGES,
    PREDICTED,
    SHORTER_SIDE,
    StatisticsError,
    bin_of,
    bins,
    brightness,
    measured,
)
from slipway.preprocessing import preprocess, preprocess_sized
from tests import images

RULES = Preprocessing(image_size=64, resize_size=72)


@pytest.mark.parametrize("feature", EDGES)
def test_an_edge_belongs_to_the_bin_that_it_names(feature: str) -> None:
    for edge in EDGES[feature]:
        assert bin_of(feature, edge) == str(edge)
        assert bin_of(feature, edge + 0.5) != str(edge)
    assert bin_of(feature, EDGES[feature][-1] + 1) == "+Inf" == bins(feature)[-1]


def test_brightness_of_a_grid_is_that_of_the_image() -> None:
    for size in (8, 32, 224, 500):
        pixels = images.noise(size, size, size).transpose(2, 0, 1)
        assert brightness(pixels) == pytest.approx(pixels.mean(), abs=8)
    assert brightness(np.full((3, 224, 224), 77, np.uint8)) == 77


def test_size_is_that_of_the_upright_image_and_the_pixels_are_those_of_the_model() -> None:
    data = images.odd()["exif-sideways"]
    pixels, size = preprocess_sized(data, RULES)
    assert size == (60, 40)
    assert np.array_equal(pixels, preprocess(data, RULES))


@pytest.mark.parametrize("content", ["", "[]", "null", "{}", '{"format": "slipway-statistics/1"}'])
def test_file_that_holds_none_is_told(tmp_path: Path, content: str) -> None:
    (tmp_path / input_statistics.STATISTICS).write_text(content)
    with pytest.raises(StatisticsError, match=r"statistics\.json: cannot be read as statistics"):
        input_statistics.load(tmp_path)


def test_shares_add_up_to_one_and_name_every_bin(tmp_path: Path) -> None:
    sized = [preprocess_sized(data, RULES) for data in images.normal(20).values()]
    measured(sized, ["b", "a", "b", "b"], ("a", "b", "never")).save(tmp_path)
    statistics = input_statistics.load(tmp_path)
    assert statistics is not None
    assert statistics.images == 20
    assert statistics.shares[PREDICTED] == {"a": 0.25, "b": 0.75, "never": 0}
    for feature in (BRIGHTNESS, SHORTER_SIDE):
        assert set(statistics.shares[feature]) == set(bins(feature))
        assert sum(statistics.shares[feature].values()) == pytest.approx(1)


def test_a_bundle_from_before_has_none_and_another_format_is_refused(tmp_path: Path) -> None:
    assert input_statistics.load(tmp_path) is None
    (tmp_path / input_statistics.STATISTICS).write_text(json.dumps({"format": "other/1"}))
    with pytest.raises(StatisticsError, match=r"statistics\.json: has format 'other/1'; this Slipway reads"):
        input_statistics.load(tmp_path)

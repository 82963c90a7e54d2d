import re

import pytest

from tests.train.test_charts import Tags
from train.doctor import Spread
from train.histograms import class_bars, histogram
from train.split import Split


def spread(edges: list[float], counts: list[int]) -> Spread:
    return Spread(least=edges[0], median=edges[0], most=edges[-1], edges=edges, counts=counts)


def numbers(rects: list[dict[str, str]], name: str) -> list[float]:
    return [float(rect[name].removesuffix("%")) for rect in rects]


def test_bars_stand_beside_each_other_and_are_as_high_as_their_counts() -> None:
    rects = Tags(histogram("Side", spread([10, 20, 30, 40], [5, 0, 10]))).all("rect")
    assert numbers(rects, "x") == pytest.approx([0, 33.33, 66.67])
    assert numbers(rects, "width") == pytest.approx([33.33] * 3, abs=0.01)
    assert numbers(rects, "height") == [50, 0, 100]


def test_wide_range_gets_a_logarithmic_axis_and_says_so() -> None:
    figure = histogram("Side", spread([10, 100, 1000], [1, 1]))
    assert numbers(Tags(figure).all("rect"), "width") == pytest.approx([50, 50])
    assert "log scale" in figure


def test_one_value_is_said_and_not_drawn() -> None:
    page = Tags(histogram("Side", Spread(least=8, median=8, most=8, edges=[7, 9], counts=[3])))
    assert not page.all("rect")
    assert "8 in all images." in page.text


def test_counts_are_marked_in_whole_images() -> None:
    labels = re.findall(r'class="y"[^>]*>([^<]+)<', histogram("Side", spread([1, 2, 3], [1, 0])))
    assert labels == ["0", "1"]


def test_class_bars_share_one_scale_and_name_what_cannot_break_out() -> None:
    counts: dict[Split, dict[str, int]] = {
        "train": {"a": 6, "<b>": 1},
        "val": {"a": 2, "<b>": 0},
        "test": {"a": 2, "<b>": 1},
    }
    page = Tags(class_bars(counts, ["a", "<b>"]))
    assert [part["style"] for part in page.all("i", "train")] == ["width:60.00%", "width:10.00%"]
    assert "<b>" in page.text

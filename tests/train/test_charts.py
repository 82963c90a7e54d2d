"""What the report draws: axes, thinning, curves, heat maps, pictures."""

import base64
import io
import json
import math
import re
from html.parser import HTMLParser

import numpy as np
import pytest
from PIL import Image

from train import charts
from train.charts import Series, line_chart, linear_axis, log_axis, number, step_axis, thin


class Tags(HTMLParser):
    """Every start tag as (name, attributes), and all text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.text = ""
        self.feed(str(page))  # a Markup would escape what the parser unescapes

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))

    def handle_data(self, data: str) -> None:
        self.text += data

    def all(self, tag: str, kind: str = "") -> list[dict[str, str]]:
        return [found for name, found in self.tags if name == tag and kind in found.get("class", "")]


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "–"),
        (math.nan, "NaN"),
        (math.inf, "∞"),
        (-math.inf, "-∞"),
        (0, "0"),
        (7, "7"),
        (1234567, "1,234,567"),
        (1480.6, "1,481"),
        (0.048231, "0.04823"),
        (0.001, "1e-3"),
        (1e-4, "1e-4"),
        (3.4e-6, "3.40e-6"),
        (-2.5e-7, "-2.50e-7"),
    ],
)
def test_figures_are_short_and_never_hide_what_is_not_finite(value: float | None, shown: str) -> None:
    assert number(value) == shown


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0, 600, [0, 200, 400, 600]),
        (34.2, 98.7, [20, 40, 60, 80, 100]),
        (0, 1e-3, [0, 5e-4, 1e-3]),
        (99.1, 99.6, [99, 99.2, 99.4, 99.6]),
        (-3, 5, [-4, -2, 0, 2, 4, 6]),
    ],
)
def test_linear_ticks_are_round_and_enclose_the_values(low: float, high: float, ticks: list[float]) -> None:
    assert linear_axis(low, high).ticks == pytest.approx(ticks)


@pytest.mark.parametrize(
    ("last", "ticks"),
    [
        (600, [0, 100, 200, 300, 400, 500, 600]),
        (9990, [0, 2000, 4000, 6000, 8000]),
        (121, [0, 50, 100]),
        (3, [0, 1, 2, 3]),
        (1, [0, 1]),
        (0, [0, 1]),
    ],
)
def test_the_axis_of_steps_ends_at_the_last_and_marks_whole_ones(last: float, ticks: list[float]) -> None:
    axis = step_axis(last)
    assert axis.ticks == pytest.approx(ticks)
    assert axis.high == (last or 1)


@pytest.mark.parametrize("constant", [0.0, 0.1, -3.0, 1e-9, 1e12])
def test_a_constant_still_has_an_axis(constant: float) -> None:
    axis = linear_axis(constant, constant)
    assert axis.low < axis.high
    assert axis.low <= constant <= axis.high


def test_linear_axis_of_any_range_has_few_ticks() -> None:
    for exponent in range(-12, 13):
        for mantissa in (1.0, 1.7, 2.3, 4.9, 9.99):
            assert 3 <= len(linear_axis(0, mantissa * 10.0**exponent).ticks) <= 6


@pytest.mark.parametrize(("low", "high"), [(0.023, 2.4), (1e-9, 1e6), (0.5, 10), (1, 1000), (0.3, 20.5)])
def test_log_axis_encloses_the_values_with_few_round_ticks(low: float, high: float) -> None:
    axis = log_axis(low, high)
    assert axis.low <= low
    assert axis.high >= high
    assert 2 <= len(axis.ticks) <= 10
    assert all(f"{tick:e}"[0] in "125" for tick in axis.ticks)
    assert axis.place(axis.low) == 0
    assert axis.place(axis.high) == pytest.approx(1)


def test_thinning_keeps_spikes_and_the_last_point() -> None:
    points = [(float(step), 1.0) for step in range(100_000)]
    points[54_321] = (54_321.0, 99.0)
    points[77_777] = (77_777.0, -99.0)
    kept = thin(points)
    assert len(kept) <= charts.MOST_POINTS + 1
    assert {points[54_321], points[77_777], points[-1]} <= set(kept)
    assert kept == sorted(kept)


def test_short_curves_are_not_thinned() -> None:
    points = [(1.0, 2.0), (2.0, math.nan)]
    assert thin(points) == points


def test_loss_over_two_decades_is_logarithmic_and_reads_out_its_last_values() -> None:
    train = Series(name="train", points=[(10, 2.0), (20, 0.2), (30, 0.02)], emphasis="quiet")
    page = Tags(line_chart("Loss", [train, Series(name="validation", points=[(30, 0.05)])]))
    assert "log scale" in page.text
    assert "train 0.02" in page.text
    assert "validation 0.05" in page.text
    (figure,) = page.all("figure")
    assert json.loads(figure["data-series"]) == [[[10, "2"], [20, "0.2"], [30, "0.02"]], [[30, "0.05"]]]
    (label,) = [svg["aria-label"] for svg in page.all("svg") if "aria-label" in svg]
    assert "train: 2 at step 10, 0.02 at step 30, lowest 0.02, highest 2." in label


def test_a_loss_of_zero_is_drawn_on_a_linear_axis() -> None:
    page = Tags(line_chart("Loss", [Series(name="train", points=[(1, 5.0), (2, 0.0)])]))
    assert "log scale" not in page.text


def test_values_that_are_not_finite_leave_a_gap_and_are_counted() -> None:
    points = [(1, 3.0), (2, math.nan), (3, 1.0), (4, math.inf), (5, 2.0)]
    page = Tags(line_chart("Loss", [Series(name="train", points=points)]))
    assert "2 of 5 values of train are not finite (first at step 2)" in page.text
    (path,) = page.all("path")
    assert len(re.findall(r"M[\d.]+,[\d.]+h0", path["d"])) == 3  # each a dot of its own
    assert "nan" not in path["d"].lower()


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_curve_without_one_finite_value_is_no_accident(value: float) -> None:
    page = Tags(line_chart("Loss", [Series(name="train", points=[(1, value)])]))
    assert "1 of 1 values of train are not finite" in page.text


def test_nothing_recorded_is_said() -> None:
    assert "Not recorded." in line_chart("Loss", [Series(name="train", points=[])])


def test_one_lone_evaluation_gets_a_dot_in_the_right_place() -> None:
    page = Tags(line_chart("Accuracy", [Series(name="validation", points=[(10, 50.0)])], from_zero=True))
    (dot,) = page.all("circle")
    assert (dot["cx"], dot["cy"]) == ("100.00%", "16.67%")  # 50 on an axis of 0 to 60


def test_charts_beside_each_other_share_their_steps() -> None:
    page = Tags(line_chart("Accuracy", [Series(name="validation", points=[(10, 50.0)])], last_step=40))
    assert page.all("circle")[0]["cx"] == "25.00%"
    assert page.all("figure")[0]["data-last"] == "40"
    assert "step 10" in page.text


def test_all_coordinates_lie_inside_the_drawing() -> None:
    points = [(float(step), math.sin(step) * 10 ** (step / 50)) for step in range(1, 500)]
    page = Tags(line_chart("Anything", [Series(name="train", points=points)]))
    (path,) = page.all("path")
    assert all(0 <= float(value) <= 1000 for value in re.findall(r"[\d.]+", path["d"]))


def test_names_in_a_chart_are_escaped() -> None:
    page = line_chart(
        '<b>"Loss"</b>', [Series(name="a<i>", points=[(1, 1.0)]), Series(name="'&", points=[(1, 1.0)])]
    )
    assert not Tags(page).all("i")
    assert "<b>&#34;" not in str(Tags(page).all("svg"))
    assert "a<i>" in Tags(page).text


def test_heat_map_tells_right_from_wrong_and_tints_by_share_of_the_true_class() -> None:
    (first, cells), (_, other) = charts.heat_map(["cat", "dog"], np.array([[3, 1], [0, 0]]))
    assert first == "cat"
    assert [(cell.count, cell.kind, cell.strength) for cell in cells] == [
        (3, "right", 0.87),
        (1, "wrong", 0.5),
    ]
    assert cells[1].words == "cat taken for dog: 1 of 4"
    assert [cell.kind for cell in other] == ["none", "none"]


def test_a_small_picture_is_embedded_pixel_by_pixel() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    picture = charts.embed(Image.fromarray(pixels))
    assert picture.small
    data = base64.b64decode(picture.uri.removeprefix("data:image/png;base64,"))
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(data))), pixels)


def test_a_large_picture_is_shrunk() -> None:
    picture = charts.embed(Image.new("RGB", (4000, 1000)))
    assert not picture.small
    data = base64.b64decode(picture.uri.removeprefix("data:image/jpeg;base64,"))
    assert Image.open(io.BytesIO(data)).size == (192, 48)

"""What the report draws: learning curves as inline SVG, the confusion matrix as a heat map, pictures as data URIs.

A chart stretches to the width it is given and its text does not: positions are percentages, and only the inner
`<svg>` that holds the lines is scaled. So the same markup reads well on a telephone, a wide screen and paper. The
figure shows each curve's last value; with JavaScript (`report.html.j2`) it shows the value under the pointer.
"""

import base64
import io
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
from markupsafe import Markup
from PIL import Image

Point = tuple[float, float]

MOST_POINTS = 400
"""Points drawn a curve: more than a screen can show apart, and the page stays small however long the run was."""

Emphasis = Literal["quiet", "strong", "dashed"]

MOST_MARKERS = 40
"""A strong curve of at most so many points gets a dot at each."""

SMALL, THUMBNAIL = 64, 192
"""Longest side, pixels: up to SMALL a picture is embedded as it is, a larger one is shrunk to THUMBNAIL."""

LOG_FROM = 20.0
"""Ratio of the largest to the smallest value from which a logarithmic axis shows more than a linear one."""


@dataclass(frozen=True, kw_only=True)
class Series:
    """One curve: (optimiser step, value), steps ascending. Values that are not finite leave a gap."""

    name: str
    points: Sequence[Point]
    emphasis: Emphasis = "strong"


@dataclass(frozen=True, kw_only=True)
class Axis:
    """A range and the values marked in it."""

    low: float
    high: float
    ticks: Sequence[float]
    log: bool = False

    def place(self, value: float) -> float:
        """Where `value` lies: 0 at `low`, 1 at `high`."""
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One cell of a heat map. kind: right, wrong or none. strength: of its tint, 0..1. words: what it says."""

    count: int
    kind: Literal["right", "wrong", "none"]
    strength: float
    words: str


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A picture inside the page. small: it is to be enlarged with its pixels showing."""

    uri: str
    small: bool


def number(value: float | None) -> str:
    """A figure for people: four significant digits, thousands separated, `–` for one that was not recorded."""
    if value is None:
        return "–"
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    if abs(value) >= 1000 or value == int(value):
        return f"{value:,.0f}"
    if abs(value) > 1e-3:
        return f"{value:.4g}"
    mantissa, exponent = f"{value:.2e}".split("e")
    return f"{mantissa.removesuffix('.00')}e{int(exponent)}"


def step_axis(last: float) -> Axis:
    """From step 0 to the last one, with whole steps marked. A run of no step at all gets one for scale."""
    high = last or 1.0
    step = max(1.0, _round_step(high / 6))
    return Axis(low=0.0, high=high, ticks=[index * step for index in range(int(high / step + 1e-9) + 1)])


def linear_axis(low: float, high: float) -> Axis:
    """An axis that begins and ends at a tick, with three to six ticks at multiples of 1, 2 or 5."""
    if low == high:
        # A constant is compared with nothing; zero gives it a scale.
        low, high = min(low, 0.0), max(high, 0.0) or 1.0
    step = _round_step((high - low) / 4)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = [index * step for index in range(first, last + 1)]
    return Axis(low=ticks[0], high=ticks[-1], ticks=ticks)


def _round_step(rough: float) -> float:
    """The next 1, 2 or 5 times a power of ten."""
    unit = 10.0 ** math.floor(math.log10(rough))
    return next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough * 0.999)


def log_axis(low: float, high: float) -> Axis:
    """A logarithmic axis between values 1, 2 or 5 times a power of ten. `low` must be above 0."""
    exponents = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1)
    candidates = [float(f"{factor}e{exponent}") for exponent in exponents for factor in (1, 2, 5)]
    first = max(value for value in candidates if value <= low)
    last = min(value for value in [*candidates, 10.0**exponents.stop] if value >= high)
    marks = [value for value in candidates if first <= value <= last]
    if len(marks) > 10:
        marks = [value for value in marks if math.log10(value) % 1 < 1e-9]
        marks = marks[:: math.ceil(len(marks) / 10)]
    return Axis(low=first, high=last, ticks=marks, log=True)


def value_axis(values: Sequence[float], *, from_zero: bool) -> Axis:
    """The axis for finite `values`: logarithmic when they span much and none is zero, unless it must show zero."""
    low, high = min(values, default=0.0), max(values, default=1.0)
    if from_zero:
        return linear_axis(min(low, 0.0), high)
    if low > 0 and high / low >= LOG_FROM:
        return log_axis(low, high)
    return linear_axis(low, high)


def thin(points: Sequence[Point], limit: int = MOST_POINTS) -> list[Point]:
    """At most about `limit` points with the same outline: of each stretch its lowest and its highest, and the last."""
    if len(points) <= limit:
        return list(points)
    stretch = math.ceil(len(points) / (limit // 2))
    kept: list[Point] = []
    for start in range(0, len(points), stretch):
        part = points[start : start + stretch]
        finite = [point for point in part if math.isfinite(point[1])] or part[:1]
        ends = {min(finite, key=lambda point: point[1]), max(finite, key=lambda point: point[1])}
        kept.extend(sorted(ends))
    return kept if kept[-1] == points[-1] else [*kept, points[-1]]


def line_chart(
    title: str, series: Sequence[Series], *, last_step: float = 0, from_zero: bool = False
) -> Markup:
    """A `<figure>` with one chart over optimiser steps: title, last values, grid, axes and curves.

    last_step: how far the axis of steps reaches at least, so that charts beside each other can be compared.
    """
    curves = [curve for curve in series if curve.points]
    if not curves:
        return Markup(
            '<figure class="chart"><figcaption><b>{}</b></figcaption><p>Not recorded.</p></figure>'
        ).format(title)
    values = [value for curve in curves for _, value in curve.points if math.isfinite(value)]
    reached = max(curve.points[-1][0] for curve in curves)
    steps = step_axis(max(last_step, reached))
    scale = value_axis(values, from_zero=from_zero)
    drawn = [thin(curve.points) for curve in curves]
    return Markup(
        '<figure class="chart" data-last="{last}" data-series="{data}">\n'
        "<figcaption><b>{title}</b>{log}{legend}<output>step {at}</output></figcaption>\n"
        '<svg role="img" aria-label="{summary}">{grid}{lines}<line class="cursor" y2="100%"/></svg>\n'
        "{gaps}</figure>"
    ).format(
        last=steps.high,
        data=json.dumps([[[x, number(y)] for x, y in points] for points in drawn], separators=(",", ":")),
        title=title,
        log=Markup(" <small>log scale</small>") if scale.log else "",
        legend=_concat(_legend(curve, alone=len(curves) == 1) for curve in curves),
        at=number(reached),
        summary=" ".join([f"{title} over optimiser steps.", *map(_summary, curves)]),
        grid=grid(steps, scale),
        lines=_concat(
            _curve(curve, points, steps, scale) for curve, points in zip(curves, drawn, strict=True)
        ),
        gaps=_concat(map(_gaps, curves)),
    )


def heat_map(classes: Sequence[str], confusion: npt.NDArray[np.int64]) -> list[tuple[str, list[Cell]]]:
    """Rows (true class, cells) of a confusion matrix [classes, classes], tinted by share of the true class."""
    return [
        (
            true,
            [
                _cell(true, predicted, count, sum(counts))
                for predicted, count in zip(classes, counts, strict=True)
            ],
        )
        for true, counts in zip(classes, confusion.tolist(), strict=True)
    ]


def _cell(true: str, predicted: str, count: int, total: int) -> Cell:
    if count == 0:
        return Cell(count=0, kind="none", strength=0, words="")
    # The square root keeps one mistake in a hundred visible.
    strength = round(math.sqrt(count / total), 2)
    words = f"{true} taken for {predicted}: {count:,} of {total:,}"
    return Cell(count=count, kind="right" if true == predicted else "wrong", strength=strength, words=words)


def embed(image: Image.Image) -> Picture:
    """An RGB picture as a data URI: exact when small, else shrunk and compressed."""
    small = max(image.size) <= SMALL
    image.thumbnail((THUMBNAIL, THUMBNAIL), Image.Resampling.BICUBIC)
    encoded = io.BytesIO()
    image.save(encoded, "PNG" if small else "JPEG", quality=88)
    kind = "png" if small else "jpeg"
    return Picture(
        uri=f"data:image/{kind};base64,{base64.b64encode(encoded.getvalue()).decode()}", small=small
    )


def _concat(parts: Iterable[Markup]) -> Markup:
    return Markup().join(parts)


def _legend(curve: Series, *, alone: bool) -> Markup:
    name = "" if alone else f"{curve.name} "
    return Markup('<span class="key {}">{}<data>{}</data></span>').format(
        curve.emphasis, name, number(curve.points[-1][1])
    )


def _summary(curve: Series) -> str:
    """What a screen reader says of a curve."""
    finite = [value for _, value in curve.points if math.isfinite(value)]
    if not finite:
        return f"{curve.name}: no finite value."
    (first, start), (last, end) = curve.points[0], curve.points[-1]
    return (
        f"{curve.name}: {number(start)} at step {number(first)}, {number(end)} at step {number(last)}, "
        f"lowest {number(min(finite))}, highest {number(max(finite))}."
    )


def _gaps(curve: Series) -> Markup:
    missing = [step for step, value in curve.points if not math.isfinite(value)]
    if not missing:
        return Markup("")
    return Markup(
        '<p class="bad">{} of {} values of {} are not finite (first at step {}) and leave gaps.</p>'
    ).format(number(len(missing)), number(len(curve.points)), curve.name, number(missing[0]))


def grid(steps: Axis, scale: Axis) -> Markup:
    """Lines across at the ticks of `scale`, and the words at both axes."""
    levels = [(as_percent(1 - scale.place(tick)), number(tick)) for tick in scale.ticks]
    marks = [(as_percent(steps.place(tick)), number(tick)) for tick in steps.ticks]
    level = Markup(
        '<line class="grid" x2="100%" y1="{0}" y2="{0}"/><text class="y" x="0" dx="-8" y="{0}" dy=".33em">{1}</text>'
    )
    mark = Markup('<text class="x" x="{0}" y="100%" dy="1.6em">{1}</text>')
    return _concat([*(level.format(*item) for item in levels), *(mark.format(*item) for item in marks)])


def _curve(curve: Series, points: Sequence[Point], steps: Axis, scale: Axis) -> Markup:
    # Stretched to the chart's width and height; `vector-effect` keeps the line as thin as the style says.
    path = Markup(
        '<svg viewBox="0 0 1000 1000" preserveAspectRatio="none">'
        '<path class="{}" d="{}" vector-effect="non-scaling-stroke"/></svg>'
    ).format(curve.emphasis, _path(points, steps, scale))
    dot = Markup('<circle class="{}" cx="{}" cy="{}" r="2.5"/>')
    finite = [point for point in points if math.isfinite(point[1])]
    dots = [
        dot.format(curve.emphasis, as_percent(steps.place(x)), as_percent(1 - scale.place(y)))
        for x, y in (finite if curve.emphasis == "strong" and len(finite) <= MOST_MARKERS else [])
    ]
    return _concat([path, *dots])


def _path(points: Sequence[Point], steps: Axis, scale: Axis) -> str:
    """SVG path data in a square of 1000 x 1000; a value that is not finite lifts the pen."""
    commands, pen = [], "M"
    for x, y in points:
        if math.isfinite(y):
            at = f"{1000 * steps.place(x):.1f},{1000 * (1 - scale.place(y)):.1f}"
            # `h0` and a round cap: a lone point between two gaps is still a dot.
            commands.append(f"M{at}h0" if pen == "M" else f"L{at}")
        pen = "L" if math.isfinite(y) else "M"
    return "".join(commands)


def as_percent(fraction: float) -> str:
    """A place or a length as CSS and SVG write it."""
    return f"{100 * fraction:.2f}%"

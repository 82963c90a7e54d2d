"""What images look like on the whole, to notice that a service is sent others than its model was evaluated on.

Export measures the images of the evaluation and puts the result into the bundle. The served models count the same
things of what they are sent, in the same bins, so that the two can be compared (docs/monitoring.md).
"""

import json
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from slipway.errors import SlipwayError
from slipway.sealed import write_json

STATISTICS = "statistics.json"
FORMAT = "slipway-statistics/1"

BRIGHTNESS = "brightness"
SHORTER_SIDE = "shorter_side"
PREDICTED = "predicted"
# Upper edges, inclusive; what is above the last falls into the bin "+Inf". Brightness is the mean of a model input,
# 0..255; the shorter side is that of the upright image before it is cut and scaled, in pixels.
EDGES: Mapping[str, tuple[int, ...]] = MappingProxyType(
    {
        BRIGHTNESS: tuple(range(15, 255, 16)),
        SHORTER_SIDE: (16, 32, 64, 128, 256, 512, 1024, 2048, 4096),
    }
)
# Brightness is looked at on a grid of about this many pixels a side: a tenth of the time, and as good.
GRID = 32


class StatisticsError(SlipwayError):
    """Statistics that cannot be read."""


@dataclass(frozen=True, kw_only=True)
class InputStatistics:
    """shares: feature -> bin -> which part of the images falls into it; the parts of a feature add up to 1.

    images: how many were looked at.
    """

    images: int
    shares: Mapping[str, Mapping[str, float]]

    def save(self, directory: Path) -> None:
        content = {"format": FORMAT, "images": self.images, "shares": self.shares}
        write_json(directory / STATISTICS, content)


def load(directory: Path) -> InputStatistics | None:
    """Those of a bundle; None if it was exported before there were any. Raises StatisticsError."""
    path = directory / STATISTICS
    if not path.exists():
        return None
    try:
        content = json.loads(path.read_bytes())
        if content["format"] != FORMAT:
            raise StatisticsError(f"{path}: has format {content['format']!r}; this Slipway reads {FORMAT!r}")
        return InputStatistics(images=content["images"], shares=content["shares"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StatisticsError(f"{path}: cannot be read as statistics ({error!r})") from error


def measured(
    images: Iterable[tuple[npt.NDArray[np.uint8], tuple[int, int]]],
    predicted: Iterable[str],
    classes: tuple[str, ...],
) -> InputStatistics:
    """Of images as slipway.preprocessing.preprocess_sized returns them, and of the classes predicted for them.

    The two need not be of equal length: decoding all images of a large evaluation would take long.
    """
    counts: dict[str, Counter[str]] = {BRIGHTNESS: Counter(), SHORTER_SIDE: Counter()}
    for pixels, size in images:
        counts[BRIGHTNESS][bin_of(BRIGHTNESS, brightness(pixels))] += 1
        counts[SHORTER_SIDE][bin_of(SHORTER_SIDE, min(size))] += 1
    shares = {feature: _shares(counts[feature], bins(feature)) for feature in counts}
    shares[PREDICTED] = _shares(Counter(predicted), classes)
    return InputStatistics(images=counts[BRIGHTNESS].total(), shares=shares)


def brightness(pixels: npt.NDArray[np.uint8]) -> float:
    """Mean of a model input, uint8 [3, S, S], on a grid of its pixels: 0..255."""
    step = max(1, pixels.shape[-1] // GRID)
    return float(pixels[:, ::step, ::step].mean())


def bins(feature: str) -> tuple[str, ...]:
    return (*map(str, EDGES[feature]), "+Inf")


def bin_of(feature: str, value: float) -> str:
    edges = EDGES[feature]
    place = bisect_left(edges, value)
    return str(edges[place]) if place < len(edges) else "+Inf"


def _shares(counts: Counter[str], names: tuple[str, ...]) -> dict[str, float]:
    total = counts.total()
    return {name: counts[name] / total for name in names}

"""What one image file is, as far as a data set can be judged by it: from one decode, and small enough to keep."""

import base64
import io
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image

from slipway.contract import Preprocessing
from slipway.preprocessing import FORMATS, ImageError, centre_square, crop_and_resize, decode

THUMB = 8
"""Side of the thumbnail that confirms what perceptual hashes only suspect, pixels."""

_GRID, _KEPT = 32, 8
# Rows: the `_KEPT` lowest frequencies of a cosine transform of `_GRID` values.
_COSINES = np.cos(np.pi * np.outer(np.arange(_KEPT), 2 * np.arange(_GRID) + 1) / (2 * _GRID))
_LEVELS = np.arange(256)
_ORIENTATION_TAG = 0x0112


class Refusal(NamedTuple):
    """Why a file is no usable image. code: one of `ImageError`'s, or UNREADABLE. reason: a sentence."""

    code: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """One image that decodes.

    format, mode: as stored, in Pillow's words. width, height: upright, pixels.
    orientation: EXIF, 1 (upright) to 8, as far as the header tells.
    look: 64-bit perceptual hash; pictures that look alike differ in few bits.
    thumb: RGB pixels of an 8 x 8 thumbnail, 192 bytes.
    sums, squares: per channel, over the pixels as the model sees them (0..255); exact.
    """

    format: str
    mode: str
    width: int
    height: int
    orientation: int
    look: int
    thumb: bytes
    sums: tuple[int, int, int]
    squares: tuple[int, int, int]


def facts_of(data: bytes, rules: Preprocessing) -> Facts | Refusal:
    """Decode fully (a check of the header passes a truncated file: case A07) and measure."""
    try:
        image = decode(data, rules)
    except ImageError as error:
        return Refusal(error.code, error.reason)
    header = Image.open(io.BytesIO(data), formats=FORMATS)
    seen = crop_and_resize(image, centre_square(image.size, rules), rules)
    counts = np.array(seen.histogram()).reshape(3, 256)
    grid = image.resize((_GRID, _GRID), Image.Resampling.BOX, reducing_gap=2.0)
    return Facts(
        format=str(header.format),
        mode=header.mode,
        width=image.width,
        height=image.height,
        orientation=_orientation(header),
        look=perceptual_hash(grid),
        thumb=grid.resize((THUMB, THUMB), Image.Resampling.BOX).tobytes(),
        sums=_three(counts @ _LEVELS),
        squares=_three(counts @ _LEVELS**2),
    )


def perceptual_hash(grid: Image.Image) -> int:
    """64 bits of a picture scaled to 32 x 32: which of its lowest frequencies are above their median.

    The hash known as pHash (hackerfactor.com/blog/index.php?/archives/432-Looks-Like-It.html). Scaling,
    compression and small changes of colour move few bits. Ours, because it is these lines: ImageHash would bring
    wavelets along, and has no search (`duplicates.py`).
    """
    waves = _COSINES @ np.asarray(grid.convert("L"), dtype=np.float64) @ _COSINES.T
    # Rounded, so that what is zero in theory is zero: a picture of one colour has the hash 0, not one of noise.
    values = np.rint(waves).ravel()
    values[0] = 0  # the overall brightness says nothing about the shape
    return int.from_bytes(np.packbits(values > np.median(values[1:])).tobytes(), "big")


def to_record(facts: Facts | Refusal) -> dict[str, Any]:
    """As JSON; `from_record` reads it back."""
    if isinstance(facts, Refusal):
        return facts._asdict()
    fields = {name: getattr(facts, name) for name in Facts.__slots__}
    return {**fields, "thumb": base64.b64encode(facts.thumb).decode()}


def from_record(record: dict[str, Any]) -> Facts | Refusal:
    """Raises KeyError, TypeError or ValueError for a record that `to_record` did not write."""
    if "code" in record:
        return Refusal(record["code"], record["reason"])
    lists = {name: tuple(record[name]) for name in ("sums", "squares")}
    return Facts(**{**record, **lists, "thumb": base64.b64decode(record["thumb"], validate=True)})


def colour_statistics(facts: list[Facts], image_size: int) -> tuple[list[float], list[float]]:
    """Mean and standard deviation per channel over all pixels that the model sees, of values in 0..1."""
    pixels = image_size**2 * len(facts)
    means = [sum(each.sums[c] for each in facts) / pixels for c in range(3)]
    squares = [sum(each.squares[c] for each in facts) / pixels for c in range(3)]
    deviations = [math.sqrt(max(0.0, square - mean**2)) for mean, square in zip(means, squares, strict=True)]
    return [mean / 255 for mean in means], [deviation / 255 for deviation in deviations]


def _orientation(header: Image.Image) -> int:
    # Where the header names none, asking Pillow would decode a PNG a second time to look at its end.
    if "exif" not in header.info and header.format != "TIFF":
        return 1
    try:
        found = int(header.getexif().get(_ORIENTATION_TAG, 1))
    except Exception:  # noqa: BLE001 - damaged metadata of an image that decodes, as in slipway.preprocessing
        return 1
    return found if 1 <= found <= 8 else 1


def _three(values: npt.NDArray[np.int64]) -> tuple[int, int, int]:
    red, green, blue = values.tolist()
    return red, green, blue

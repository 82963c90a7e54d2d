"""Inputs that are rare in a data set and certain to come in production: extremes of pixels, and extremes of files."""

import io
from contextlib import suppress

import numpy as np
import numpy.typing as npt
from PIL import Image

from slipway.contract import Preprocessing
from slipway.preprocessing import ImageError, preprocess

Pixels = npt.NDArray[np.uint8]


def nasty(rules: Preprocessing) -> dict[str, Pixels]:
    """Name -> uint8 [3, size, size]. The same for the same rules; files that these refuse are left out."""
    pixels = _patterns(rules.image_size)
    for name, data in _files().items():
        with suppress(ImageError):
            pixels[name] = preprocess(data, rules)
    return pixels


def _patterns(size: int) -> dict[str, Pixels]:
    """What drives a network, or its quantisation, to the ends of its range."""
    row, column = np.indices((size, size))
    one_hot = np.zeros((3, size, size), np.uint8)
    one_hot[:, size // 2, size // 2] = 255
    two_values = np.random.default_rng(1).integers(0, 2, (3, size, size), np.uint8) * np.uint8(255)
    return {
        "black": np.zeros((3, size, size), np.uint8),
        "white": np.full((3, size, size), 255, np.uint8),
        **{name: _only_channel(index, size) for index, name in enumerate(("red", "green", "blue"))},
        "chequered": np.broadcast_to((row + column) % 2 * 255, (3, size, size)).astype(np.uint8),
        "striped": np.broadcast_to(column % 2 * 255, (3, size, size)).astype(np.uint8),
        "ramp": np.broadcast_to(column * 255 // max(size - 1, 1), (3, size, size)).astype(np.uint8),
        "one bright pixel": one_hot,
        "salt and pepper": two_values,
    }


def _only_channel(index: int, size: int) -> Pixels:
    pixels = np.zeros((3, size, size), np.uint8)
    pixels[index] = 255
    return pixels


def _files() -> dict[str, bytes]:
    """What decoders disagree about, so that a row of the corpus went the whole way that a request goes."""
    noise = Image.fromarray(np.random.default_rng(2).integers(0, 256, (60, 40, 3), np.uint8))
    transparent = noise.convert("RGBA")
    transparent.putalpha(noise.convert("L"))
    deep = np.linspace(0, 65535, 256).astype(np.uint16).reshape(16, 16)
    return {
        "one pixel": _encoded(noise.crop((0, 0, 1, 1)), "PNG"),
        "elongated": _encoded(noise.resize((400, 8)), "PNG"),
        "CMYK": _encoded(noise.convert("CMYK"), "JPEG"),
        "transparent": _encoded(transparent, "PNG"),
        "1 bit": _encoded(noise.convert("1"), "PNG"),
        "16 bit": _encoded(Image.fromarray(deep), "PNG"),
    }


def _encoded(image: Image.Image, encoding: str) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, encoding)
    return buffer.getvalue()

"""Encoded images made by code, for the tests of preprocessing."""

import struct
import zlib
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from PIL import Image

from tests.images import encode

COLOUR = (200, 100, 50)
GREY = (124, 124, 124)  # COLOUR in grey, by ITU-R 601: 0.299 R + 0.587 G + 0.114 B
WHITE = (255, 255, 255)

# The modes that Pillow writes each format in. Opening may give another one: GIF makes a palette of anything.
MODES = {
    "JPEG": ("1", "L", "RGB", "CMYK", "YCbCr"),
    "PNG": ("1", "L", "LA", "P", "RGB", "RGBA"),
    "WEBP": ("L", "P", "RGB", "RGBA"),
    "GIF": ("1", "L", "P", "RGB", "RGBA"),
    "BMP": ("1", "L", "P", "RGB", "RGBA"),
    "TIFF": ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr", "LAB"),
    "AVIF": ("L", "P", "RGB", "RGBA"),
}
MODES_AND_FORMATS = [(mode, encoding) for encoding, modes in MODES.items() for mode in modes]

# EXIF orientation -> how the stored rows and columns become the upright image, after the EXIF 2.3 standard:
# 6, for example, says that row 0 as stored is the right-hand side, and column 0 the top.
UPRIGHT: dict[int, Callable[[npt.NDArray[np.uint8]], npt.NDArray[np.uint8]]] = {
    1: lambda stored: stored,
    2: lambda stored: stored[:, ::-1],
    3: lambda stored: stored[::-1, ::-1],
    4: lambda stored: stored[::-1],
    5: lambda stored: stored.transpose(1, 0, 2),
    6: lambda stored: np.rot90(stored, -1),
    7: lambda stored: stored[::-1, ::-1].transpose(1, 0, 2),
    8: lambda stored: np.rot90(stored, 1),
}


def photo(width: int, height: int, seed: int = 0) -> Image.Image:
    """A smooth RGB image, as photos are: no detail finer than a fifth of its sides."""
    coarse = np.random.default_rng(seed).integers(0, 256, (5, 5, 3), np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


def quadrants(width: int, height: int) -> npt.NDArray[np.uint8]:
    """Four flat colours, so that every way to turn or mirror the image makes another one."""
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[: height // 2, : width // 2] = (230, 30, 30)
    pixels[: height // 2, width // 2 :] = (30, 200, 30)
    pixels[height // 2 :, : width // 2] = (30, 30, 220)
    pixels[height // 2 :, width // 2 :] = (240, 240, 240)
    return pixels


def flat(mode: str, size: tuple[int, int] = (24, 20)) -> tuple[Image.Image, tuple[int, int, int]]:
    """An image of one colour in `mode`, and what it is in RGB."""
    if mode == "1":
        return Image.new("1", size, 1), WHITE
    if mode == "LAB":
        return Image.new("LAB", size, (255, 128, 128)), WHITE
    if mode == "PA":
        return Image.new("RGB", size, COLOUR).quantize(2).convert("PA"), COLOUR
    if mode == "P":
        return Image.new("RGB", size, COLOUR).quantize(2), COLOUR
    return Image.new("RGB", size, COLOUR).convert(mode), GREY if mode in ("L", "LA") else COLOUR


def oriented(image: Image.Image, encoding: str, orientation: int, **options: object) -> bytes:
    """`image` as it is, with an EXIF tag that says how it is meant."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encode(image, encoding, exif=exif, **options)


def animation(encoding: str, colours: tuple[tuple[int, int, int], ...]) -> bytes:
    first, *others = (Image.new("RGB", (24, 20), colour) for colour in colours)
    return encode(first, encoding, save_all=True, append_images=others)


def ramp16() -> npt.NDArray[np.uint16]:
    """One value of each of the 256 levels of 8 bits, with all kinds of lower bits, 16 x 16."""
    return (np.arange(256) * 256 + np.arange(256)[::-1]).astype(np.uint16).reshape(16, 16)


def png(
    width: int,
    height: int,
    rows: bytes,
    *,
    bits: int = 8,
    colour_type: int = 2,
    before: tuple[tuple[bytes, bytes], ...] = (),
    after: tuple[tuple[bytes, bytes], ...] = (),
) -> bytes:
    """A PNG by hand. `rows`: each with its filter byte. before, after: chunks around the pixels."""
    header = struct.pack(">IIBBBBB", width, height, bits, colour_type, 0, 0, 0)
    chunks = [(b"IHDR", header), *before, (b"IDAT", zlib.compress(rows)), *after, (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(png_chunk(kind, content) for kind, content in chunks)


def png_chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def bomb(side: int) -> bytes:
    """A black 1-bit PNG of side x side pixels in a few kB; making it takes no more memory than that."""
    row = bytes(1 + (side + 7) // 8)
    packer = zlib.compressobj(9)
    pixels = b"".join(packer.compress(row) for _ in range(side)) + packer.flush()
    header = png_chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + png_chunk(b"IDAT", pixels) + png_chunk(b"IEND", b"")

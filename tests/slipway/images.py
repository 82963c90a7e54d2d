"""Encoded images made by code, for the tests of preprocessing."""

import struct
import zlib
from collections.abc import Callable
from typing import Any

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


def png_of(
    samples: npt.NDArray[np.integer[Any]],
    bits: int,
    colour_type: int,
    *,
    interlaced: bool = False,
    before: tuple[tuple[bytes, bytes], ...] = (),
) -> bytes:
    """A PNG of samples [height, width, channels] of any depth and colour type, plain or interlaced (Adam7)."""
    height, width, _ = samples.shape
    passes = _ADAM7 if interlaced else ((0, 0, 1, 1),)
    rows = b"".join(
        b"\0" + pack(row, bits)
        for left, top, right, down in passes
        for row in samples[top::down, left::right]
        if row.size
    )
    data = bytearray(png(width, height, rows, bits=bits, colour_type=colour_type, before=before))
    data[28] = interlaced
    return with_right_crcs(bytes(data))


# Left and upper start, and the steps to the right and down, of the seven passes: www.w3.org/TR/png-3/#8Interlace
_ADAM7 = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))


def pack(samples: npt.NDArray[np.integer[Any]], bits: int, order: str = ">") -> bytes:
    """Samples one behind the other, `bits` each, the last byte filled up with zeros."""
    if bits >= 8 and bits % 8 == 0:
        return samples.astype(f"{order}u{bits // 8}").tobytes()
    digits = "".join(f"{sample:0{bits}b}" for sample in samples.ravel().tolist())
    return np.packbits(np.array(list(digits), np.uint8)).tobytes()


def with_right_crcs(data: bytes) -> bytes:
    """A PNG whose chunks are consistent again, so that damage gets past the CRCs and into the decoder."""
    whole, position = data[:8], 8
    while position + 12 <= len(data):
        (length,) = struct.unpack(">I", data[position : position + 4])
        kind, content = data[position + 4 : position + 8], data[position + 8 : position + 8 + length]
        whole, position = whole + png_chunk(kind, content), position + 12 + length
    return whole + data[position:]


def tiff(
    samples: npt.NDArray[np.integer[Any]],
    bits: int,
    photometric: int,
    *,
    sample_format: int = 1,
    order: str = "<",
) -> bytes:
    """An uncompressed TIFF of samples [height, width, channels]. photometric: 0 white is zero, 1 black, 2 RGB."""
    height, width, channels = samples.shape
    pixels = b"".join(pack(row, bits, order) for row in samples)
    tags = {
        256: (width,),
        257: (height,),
        258: (bits,) * channels,
        259: (1,),
        262: (photometric,),
        273: (0,),
        277: (channels,),
        278: (height,),
        279: (len(pixels),),
        339: (sample_format,) * channels,
    }
    behind = 8 + 2 + 12 * len(tags) + 4  # where values that need more than 4 bytes lie
    tags[273] = (behind + 8 * len(tags),)
    entries, values = b"", b""
    for tag, value in tags.items():
        packed = struct.pack(f"{order}{len(value)}{'H' if len(value) > 2 else 'I'}", *value)
        if len(value) > 2:
            entries += struct.pack(f"{order}HHII", tag, 3, len(value), behind + len(values))
            values += packed
        else:
            entries += struct.pack(f"{order}HHI", tag, 4, len(value)) + packed
    header = (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(f"{order}IH", 8, len(tags))
    return header + entries + bytes(4) + values.ljust(8 * len(tags), b"\0") + pixels


def bmp(
    width: int, height: int, pixels: bytes, bits: int, *, compression: int = 0, before: bytes = b""
) -> bytes:
    """A BMP by hand; a negative height runs from the top. before: the palette, or the masks of 16-bit pixels."""
    offset = 14 + 40 + len(before)
    colours = len(before) // 4 if bits <= 8 else 0
    header = struct.pack(
        "<IiiHHIIiiII", 40, width, height, 1, bits, compression, len(pixels), 0, 0, colours, 0
    )
    return b"BM" + struct.pack("<IHHI", offset + len(pixels), 0, 0, offset) + header + before + pixels


def without_adobe_marker(jpeg: bytes) -> bytes:
    start = jpeg.index(b"\xff\xee")
    (length,) = struct.unpack(">H", jpeg[start + 2 : start + 4])
    return jpeg[:start] + jpeg[start + 2 + length :]


def as_ycck(jpeg: bytes) -> bytes:
    """Declare the channels of a CMYK JPEG with an Adobe marker to be luminance, two colour differences, and black."""
    data = bytearray(jpeg)
    data[jpeg.index(b"Adobe") + 11] = 2
    return bytes(data)


def small() -> list[bytes]:
    """A small image of every kind, to be damaged."""
    picture, ramp = photo(24, 20), ramp16()
    deep = ramp[:, :, None]
    return [
        *(encode(flat(mode)[0], encoding) for mode, encoding in MODES_AND_FORMATS),
        *(oriented(picture, encoding, 6) for encoding in ("JPEG", "PNG", "WEBP", "TIFF", "AVIF")),
        *(animation(encoding, (COLOUR, WHITE)) for encoding in ("GIF", "WEBP", "PNG", "TIFF", "AVIF")),
        encode(Image.fromarray(ramp), "PNG"),
        encode(picture, "JPEG", progressive=True),
        as_ycck(encode(picture.convert("CMYK"), "JPEG")),
        encode(picture.quantize(8), "PNG", transparency=bytes(range(8))),
        *(
            encode(picture, "TIFF", compression=compression)
            for compression in ("tiff_adobe_deflate", "tiff_lzw", "packbits", "jpeg")
        ),
        encode(picture.convert("1"), "TIFF", compression="group4"),
        png_of(deep, 16, 0, interlaced=True, before=((b"tRNS", b"\1\2"),)),
        png_of(deep % 4, 2, 0, interlaced=True, before=((b"tRNS", b"\0\2"),)),
        tiff(deep >> 4, 12, 1),
        tiff(deep, 16, 0),
        bmp(16, 16, ramp.tobytes(), 16),
        bmp(8, 8, bytes([8, 1, 0, 0]) * 8 + b"\0\1", 8, compression=1, before=bytes(range(8))),
    ]


def bomb(side: int) -> bytes:
    """A black 1-bit PNG of side x side pixels in a few kB; making it takes no more memory than that."""
    row = bytes(1 + (side + 7) // 8)
    packer = zlib.compressobj(9)
    pixels = b"".join(packer.compress(row) for _ in range(side)) + packer.flush()
    header = png_chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + png_chunk(b"IDAT", pixels) + png_chunk(b"IEND", b"")

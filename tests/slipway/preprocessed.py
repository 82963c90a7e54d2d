"""The images whose preprocessed bytes are fixed in `preprocessed.json`, bit for bit, in both environments.

    python -m tests.slipway.preprocessed    writes the hashes anew: what every bundle promised has changed

What lossy encoders wrote is committed, in `lossy/`, because they may differ between processors and versions; only
their decoders are under test. Everything else is made here by code, losslessly, by the Pillow that both locks pin.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image

from slipway import hashing
from slipway.contract import Preprocessing
from slipway.preprocessing import preprocess
from tests.images import encode
from tests.slipway import images

HASHES = Path(__file__).with_suffix(".json")
LOSSY = Path(__file__).parent / "lossy"

RULES = Preprocessing(image_size=32, resize_size=36)
COLOURED = Preprocessing(image_size=32, resize_size=36, background=(250, 120, 30))
DIGITS = Preprocessing(image_size=16, resize_size=16)
IMAGENET = Preprocessing(image_size=224, resize_size=256)
BICUBIC = Preprocessing(image_size=32, resize_size=36, interpolation="bicubic")

SIZES = ((1, 1), (1, 100), (100, 1), (3, 2), (8, 8), (31, 33), (37, 53), (256, 224), (601, 499))


def corpus() -> dict[str, tuple[bytes, Preprocessing]]:
    """Name -> encoded image and the rules to apply."""
    groups = (_lossy(), _modes(), _alpha(), _depths(), _by_hand(), _geometry())
    return {name: entry for group in groups for name, entry in group}


def hashes() -> dict[str, str]:
    """Name -> SHA-256 of the preprocessed bytes."""
    return {
        name: hashing.of_bytes(preprocess(data, rules).tobytes()) for name, (data, rules) in corpus().items()
    }


def _lossy() -> Iterator[tuple[str, tuple[bytes, Preprocessing]]]:
    for path in sorted(LOSSY.iterdir()):
        yield f"lossy/{path.name}", (path.read_bytes(), COLOURED)


def _modes() -> Iterator[tuple[str, tuple[bytes, Preprocessing]]]:
    photo = images.photo(60, 44)
    for encoding in ("PNG", "GIF", "BMP", "TIFF"):
        for mode in images.MODES[encoding]:
            if mode == "LAB":
                image = Image.frombytes("LAB", photo.size, photo.tobytes())
            else:
                image = photo.quantize(64).convert("PA") if mode == "PA" else photo.convert(mode)
            yield f"{encoding}/{mode}", (encode(image, encoding), RULES)
    yield "WEBP/lossless", (encode(photo, "WEBP", lossless=True), RULES)
    for encoding in ("PNG", "GIF", "TIFF"):
        yield f"{encoding}/first-frame", (images.animation(encoding, ((200, 10, 10), (10, 10, 200))), RULES)


def _alpha() -> Iterator[tuple[str, tuple[bytes, Preprocessing]]]:
    see_through = images.photo(60, 44)
    see_through.putalpha(images.photo(60, 44, seed=1).convert("L"))
    palette = images.photo(60, 44).quantize(16)
    for name, rules in (("black", RULES), ("coloured", COLOURED)):
        yield f"alpha/RGBA-on-{name}", (encode(see_through, "PNG"), rules)
        yield f"alpha/LA-on-{name}", (encode(see_through.convert("LA"), "PNG"), rules)
        yield f"alpha/P-on-{name}", (encode(palette, "PNG", transparency=bytes(range(0, 256, 16))), rules)
        yield f"alpha/GIF-on-{name}", (encode(palette, "GIF", transparency=3), rules)


def _depths() -> Iterator[tuple[str, tuple[bytes, Preprocessing]]]:
    little, big = images.ramp16(), images.ramp16().astype(">u2")
    yield "16-bit/PNG", (encode(Image.fromarray(little), "PNG"), DIGITS)
    yield "16-bit/TIFF", (encode(Image.fromarray(little), "TIFF"), DIGITS)
    yield (
        "16-bit/TIFF-big-endian",
        (encode(Image.frombytes("I;16B", (16, 16), big.tobytes()), "TIFF"), DIGITS),
    )
    colours = np.random.default_rng(0).integers(0, 65536, (8, 8, 3)).astype(">u2")
    rows = b"".join(b"\0" + row.tobytes() for row in colours)
    yield "16-bit/PNG-RGB", (images.png(8, 8, rows, bits=16), DIGITS)


def _by_hand() -> Iterator[tuple[str, tuple[bytes, Preprocessing]]]:
    """What Pillow reads but does not write."""
    random = np.random.default_rng(2)
    for colour_type, bits, channels in ((0, 2, 1), (0, 4, 1), (0, 16, 1), (2, 16, 3), (4, 16, 2), (6, 16, 4)):
        samples = random.integers(0, 2**bits, (13, 11, channels))
        transparent = ((b"tRNS", samples[0, 0].astype(">u2").tobytes()),) if channels in (1, 3) else ()
        data = images.png_of(samples, bits, colour_type, interlaced=True, before=transparent)
        yield f"by-hand/PNG-{colour_type}-{bits}", (data, COLOURED)
    for bits, photometric in ((4, 0), (12, 1), (16, 0)):
        samples = random.integers(0, 2**bits, (13, 11, 1))
        yield f"by-hand/TIFF-{bits}-{photometric}", (images.tiff(samples, bits, photometric), RULES)
    yield "by-hand/BMP-16", (images.bmp(12, -13, random.bytes(12 * 13 * 2), 16), RULES)


def _geometry() -> Iterator[tuple[str, tuple[bytes, Preprocessing]]]:
    for width, height in SIZES:
        data = encode(images.photo(width, height), "PNG")
        for name, rules in (("bilinear", RULES), ("bicubic", BICUBIC), ("digits", DIGITS)):
            yield f"{width}x{height}/{name}", (data, rules)
    yield "601x499/imagenet", (encode(images.photo(601, 499), "PNG"), IMAGENET)
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (111, 157, 3), np.uint8))
    yield "noise/bilinear", (encode(noise, "PNG"), RULES)
    yield "noise/bicubic", (encode(noise, "PNG"), BICUBIC)
    for orientation in range(1, 9):
        yield f"orientation/{orientation}", (images.oriented(images.photo(60, 44), "PNG", orientation), RULES)


if __name__ == "__main__":
    HASHES.write_text(json.dumps(hashes(), indent=2) + "\n", encoding="utf-8")

"""An image folder as people really have them: odd modes, orientations, sizes, names and suffixes."""

from pathlib import Path

import numpy as np
from PIL import Image

CLASSES = tuple(str(number) for number in range(12))  # sorted as text, '10' comes before '2'


def write_odd_folder(root: Path) -> Path:
    random = np.random.default_rng(7)
    for label, name in enumerate(CLASSES):
        for split, count in (("train", 6), ("val", 2), ("test", 10)):
            directory = root / split / name
            directory.mkdir(parents=True)
            for number in range(count):
                _write(directory, number, _picture(label, random))
    return root


def _picture(label: int, random: np.random.Generator) -> Image.Image:
    width, height = (int(side) for side in random.integers(9, 60, 2))
    colour = np.array([(20 * label) % 256, (255 - 20 * label) % 256, (90 * label) % 256])
    pixels = np.clip(colour + random.integers(-30, 31, (height, width, 3)), 0, 255)
    return Image.fromarray(pixels.astype(np.uint8))


def _write(directory: Path, number: int, image: Image.Image) -> None:
    """Ten kinds of file, in turn."""
    exif = Image.Exif()
    exif[0x0112] = number % 8 + 1
    grey16 = Image.fromarray((np.asarray(image.convert("L")).astype(np.uint16)) * 257)
    kinds = [
        lambda: image.save(directory / "plain.png"),
        lambda: image.save(directory / "turned.JPG", "JPEG", exif=exif),
        lambda: image.convert("CMYK").save(directory / "print.jpeg", "JPEG"),
        lambda: grey16.save(directory / "deep.png"),
        lambda: image.convert("RGBA").save(directory / "with alpha ä.webp", lossless=True),
        lambda: image.convert("P").save(directory / "palette.gif"),
        lambda: image.convert("1").save(directory / "bilevel.tiff"),
        lambda: image.convert("LA").save(directory / "grey-alpha.png"),
        lambda: image.save(directory / "really-a-jpeg.png", "JPEG"),
        lambda: image.save(directory / "图.bmp"),
    ]
    kinds[number % len(kinds)]()

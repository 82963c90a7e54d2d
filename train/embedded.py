"""Embedded data sets: real images from a pinned package, written out as an ordinary image folder."""

import io
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image
from sklearn.datasets import load_digits, load_sample_images

from slipway import hashing, sealed
from train.config import DataConfig
from train.split import split_of

KIND = "data"
PATCH = 32  # pixels, of the photographs

_Labelled = Iterator[tuple[str, str, npt.NDArray[np.uint8]]]  # class, name, grey or RGB pixels


def write_embedded(config: DataConfig) -> Path:
    """Write the data set `config.embedded` to `config.root`/{train,val,test}/<class>/*.png, unless it is there.

    The folder is sealed: an interrupted run leaves none, a second run finds it and does nothing.

    Raises:
        SealError: the folder exists and is not this data set, or was changed.
    """
    root, name = config.root, config.embedded
    assert name
    inputs = hashing.of_data(
        [name, config.val_fraction, config.test_fraction, config.split_seed, hashing.of_file(Path(__file__))]
    )
    with sealed.only_one(root, "the data set"):
        if root.exists():
            manifest = sealed.verify(root, KIND)
            if manifest.inputs != inputs:
                raise sealed.SealError(
                    f"{root}: holds the {name} with another split, or another data set; remove the folder or "
                    "choose another data.root"
                )
            return root
        with sealed.stage(root, kind=KIND, inputs=inputs) as staging:
            for label, file, pixels in _IMAGES[name]():
                data = _encode(pixels)
                split = split_of(
                    hashing.of_bytes(data), config.val_fraction, config.test_fraction, config.split_seed
                )
                path = staging / split / label / f"{file}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)
    return root


def _digits() -> _Labelled:
    """1,797 scans of 8 x 8 grey pixels with 17 levels (archive.ics.uci.edu/dataset/80), scaled to 0..255."""
    digits = load_digits()
    for number, (pixels, label) in enumerate(zip(digits.images, digits.target, strict=True)):
        yield str(label), f"digit-{number:04d}", np.rint(pixels * 255 / 16).astype(np.uint8)


def _photos() -> _Labelled:
    """Two photographs, cut into 520 patches that do not overlap. To tell: which one, and which third of its height."""
    photos = load_sample_images()
    for path, pixels in zip(photos.filenames, photos.images, strict=True):
        photo = Path(path).stem
        rows, columns = (side // PATCH for side in pixels.shape[:2])
        for row, column in np.ndindex(rows, columns):
            third = ("top", "middle", "bottom")[3 * row // rows]
            top, left = PATCH * row, PATCH * column
            patch = pixels[top : top + PATCH, left : left + PATCH]
            yield f"{photo}-{third}", f"patch-{row:02d}-{column:02d}", patch


_IMAGES = {"digits": _digits, "photos": _photos}


def _encode(pixels: npt.NDArray[np.uint8]) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()

"""The embedded data set: real images from a pinned package, written out as an ordinary image folder."""

import io
from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

from slipway import hashing, sealed
from train.split import split_of

KIND = "data"


def write_digits(root: Path, val_fraction: float, test_fraction: float, seed: int) -> Path:
    """Write scikit-learn's digits to `root`/{train,val,test}/<digit>/*.png, unless they are there already.

    1,797 scans of 8 x 8 grey pixels with 17 levels (archive.ics.uci.edu/dataset/80), scaled to 0..255.
    The folder is sealed: an interrupted run leaves none, a second run finds it and does nothing.

    Raises:
        SealError: `root` exists and is not this data set, or was changed.
    """
    inputs = hashing.of_data(["digits", val_fraction, test_fraction, seed, hashing.of_file(Path(__file__))])
    with sealed.only_one(root, "the data set"):
        if root.exists():
            manifest = sealed.verify(root, KIND)
            if manifest.inputs != inputs:
                raise sealed.SealError(
                    f"{root}: holds the digits with another split; remove the folder or choose another data.root"
                )
            return root
        digits = load_digits()
        with sealed.stage(root, kind=KIND, inputs=inputs) as staging:
            for number, (pixels, label) in enumerate(zip(digits.images, digits.target, strict=True)):
                data = _encode(pixels)
                split = split_of(hashing.of_bytes(data), val_fraction, test_fraction, seed)
                path = staging / split / str(label) / f"digit-{number:04d}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)
    return root


def _encode(pixels: np.ndarray) -> bytes:
    """float64 [8, 8], 0..16 -> PNG, grey, 0..255."""
    file = io.BytesIO()
    Image.fromarray(np.rint(pixels * 255 / 16).astype(np.uint8)).save(file, "PNG")
    return file.getvalue()

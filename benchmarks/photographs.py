"""A folder of photographs to train and to measure on: 500 x 375 JPEG files, as phones and the web have them.

    python -m benchmarks.photographs FOLDER

They are parts of the two photographs that scikit-learn ships, which are the two classes.
"""

import argparse
import io
import sys
from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_sample_images

FILES = 48  # in each split
WIDTH, HEIGHT = 500, 375


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.photographs", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    write_photographs(parser.parse_args(arguments).folder)
    return 0


def write_photographs(root: Path) -> Path:
    """Write {train,val,test}/{china,flower}/*.jpg below `root`, always the same; returns it."""
    random = np.random.default_rng(0)
    for split in ("train", "val", "test"):
        for label, pixels in zip(("china", "flower"), load_sample_images().images, strict=True):
            rows, columns, _ = pixels.shape
            for number in range(FILES // 2):
                top, left = random.integers(0, rows - HEIGHT + 1), random.integers(0, columns - WIDTH + 1)
                file = io.BytesIO()
                Image.fromarray(pixels[top : top + HEIGHT, left : left + WIDTH]).save(
                    file, "JPEG", quality=90
                )
                path = root / split / label / f"{number}.jpg"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(file.getvalue())
    return root


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

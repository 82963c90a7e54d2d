"""Random crops, flips, distortions and erasing, on top of the one decoder and the one antialiased resize.

What is drawn for a sample depends on (seed, epoch, index) alone, so it is the same in any worker, on any rank,
and after a restart.
"""

import math

import numpy as np
import numpy.typing as npt
from PIL import Image

from slipway.contract import Preprocessing
from slipway.preprocessing import crop_and_resize, to_array
from train.config import AugmentConfig
from train.policies import distort


def augment(
    image: Image.Image, rules: Preprocessing, config: AugmentConfig, random: np.random.Generator
) -> npt.NDArray[np.uint8]:
    """Upright RGB image -> uint8 [3, image_size, image_size], RGB, 0..255."""
    cropped = crop_and_resize(image, random_box(image.size, config, random), rules)
    if random.random() < config.flip:
        cropped = cropped.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    distorted = distort(cropped, config.policy, rules.background, random)
    return erase(to_array(distorted), config.erase, random)


def erase(
    pixels: npt.NDArray[np.uint8], probability: float, random: np.random.Generator
) -> npt.NDArray[np.uint8]:
    """With `probability`, put noise in place of 2 % to 33 % of the image, at an aspect ratio of 1:3.3 to 3.3:1.

    pixels: uint8 [3, height, width]. Noise, because of the paper's four fillings (arxiv.org/abs/1708.04896) it did
    best. At probability 0 nothing is drawn.
    """
    if not probability or random.random() >= probability:
        return pixels
    _, height, width = pixels.shape
    area, stretch = random.uniform(0.02, 0.33) * height * width, random.uniform(-1, 1)
    side = math.sqrt(area)
    # As with crops there are no retries: what would not fit is cut to the image.
    rows = min(height, max(1, round(side * math.sqrt(3.3) ** stretch)))
    columns = min(width, max(1, round(side / math.sqrt(3.3) ** stretch)))
    top, left = random.integers(height - rows + 1), random.integers(width - columns + 1)
    erased = pixels.copy()
    noise = random.integers(0, 256, (3, rows, columns), dtype=np.uint8)
    erased[:, top : top + rows, left : left + columns] = noise
    return erased


def random_box(
    size: tuple[int, int], config: AugmentConfig, random: np.random.Generator
) -> tuple[float, float, float, float]:
    """A box (left, upper, right, lower) of random area, aspect ratio and place inside an image (width, height).

    The area is drawn as a share of the largest box with the drawn aspect ratio, so the box always fits: no
    retries, and elongated images are treated like any other (arxiv.org/abs/1409.4842 draws and retries).
    """
    width, height = size
    stretch = math.log(config.max_stretch)
    ratio = math.exp(random.uniform(-stretch, stretch))
    side = math.sqrt(random.uniform(config.min_scale, 1.0))
    box_width = min(width, height * ratio) * side
    box_height = min(height, width / ratio) * side
    left = random.uniform(0, width - box_width)
    upper = random.uniform(0, height - box_height)
    return left, upper, left + box_width, upper + box_height


def generator_for(seed: int, epoch: int, index: int) -> np.random.Generator:
    return np.random.default_rng([seed, epoch, index])

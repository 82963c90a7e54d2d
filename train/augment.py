"""Random crops and flips, on top of the one decoder and the one antialiased resize.

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


def augment(
    image: Image.Image, rules: Preprocessing, config: AugmentConfig, random: np.random.Generator
) -> npt.NDArray[np.uint8]:
    """Upright RGB image -> uint8 [3, image_size, image_size], RGB, 0..255."""
    cropped = crop_and_resize(image, random_box(image.size, config, random), rules)
    if random.random() < config.flip:
        cropped = cropped.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return to_array(cropped)


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

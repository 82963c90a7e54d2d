"""TrivialAugment and RandAugment: distortions of a cropped image, drawn from the sample's own generator.

Ours, because torchvision's draw from torch's global generator: what a sample gets would depend on what its worker
did before, and not on (seed, epoch, index) alone. The ranges are those of the papers, in torchvision's units:

TrivialAugment, wide (arxiv.org/abs/2103.10158): one operation, of a strength drawn anew.
RandAugment (arxiv.org/abs/1909.13719): two operations, each at 9 of 30 of its range.
"""

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import numpy as np
from PIL import Image, ImageEnhance, ImageOps

Policy = Literal["none", "trivial", "rand"]
Colour = tuple[int, int, int]

STEPS = 30
"""A strength is a whole number of steps, 0 (nothing, or nearly) to 30 (all of the range)."""
RAND_OPERATIONS, RAND_STRENGTH = 2, 9


class Operation(NamedTuple):
    """apply: (image, amount, colour of what comes in from outside) -> image of the same size.

    trivial, rand: the largest amount under each policy. signed: whether it is turned round half of the time.
    """

    apply: Callable[[Image.Image, float, Colour], Image.Image]
    trivial: float = 0.0
    rand: float = 0.0
    signed: bool = False


def distort(image: Image.Image, policy: Policy, outside: Colour, random: np.random.Generator) -> Image.Image:
    """RGB -> RGB of the same size. outside: what geometric operations fill corners with, 0..255."""
    if policy == "trivial":
        return _distort_once(image, policy, int(random.integers(STEPS + 1)), outside, random)
    for _ in range(RAND_OPERATIONS if policy == "rand" else 0):
        image = _distort_once(image, policy, RAND_STRENGTH, outside, random)
    return image


def _distort_once(
    image: Image.Image, policy: Policy, strength: int, outside: Colour, random: np.random.Generator
) -> Image.Image:
    operation = _OPERATIONS[int(random.integers(len(_OPERATIONS)))]
    most = operation.trivial if policy == "trivial" else operation.rand
    amount = most * strength / STEPS
    # Drawn whether it is used or not, so that every operation takes as much from the generator.
    turned = bool(random.integers(2))
    return operation.apply(image, -amount if operation.signed and turned else amount, outside)


def _affine(image: Image.Image, matrix: tuple[float, ...], outside: Colour) -> Image.Image:
    """matrix: where a pixel (x, y) comes from: (a x + b y + c, d x + e y + f)."""
    return image.transform(
        image.size, Image.Transform.AFFINE, matrix, Image.Resampling.BILINEAR, fillcolor=outside
    )


def _shear_x(image: Image.Image, amount: float, outside: Colour) -> Image.Image:
    return _affine(image, (1, amount, -amount * image.height / 2, 0, 1, 0), outside)


def _shear_y(image: Image.Image, amount: float, outside: Colour) -> Image.Image:
    return _affine(image, (1, 0, 0, amount, 1, -amount * image.width / 2), outside)


def _translate_x(image: Image.Image, amount: float, outside: Colour) -> Image.Image:
    return _affine(image, (1, 0, amount * image.width, 0, 1, 0), outside)


def _translate_y(image: Image.Image, amount: float, outside: Colour) -> Image.Image:
    return _affine(image, (1, 0, 0, 0, 1, amount * image.height), outside)


def _rotate(image: Image.Image, amount: float, outside: Colour) -> Image.Image:
    return image.rotate(amount, Image.Resampling.BILINEAR, fillcolor=outside)


def _posterize(image: Image.Image, amount: float, outside: Colour) -> Image.Image:  # noqa: ARG001
    return ImageOps.posterize(image, 8 - math.floor(amount))


def _solarize(image: Image.Image, amount: float, outside: Colour) -> Image.Image:  # noqa: ARG001
    return ImageOps.solarize(image, 256 - math.floor(amount))


def _enhance(kind: Callable[[Image.Image], Any]) -> Callable[[Image.Image, float, Colour], Image.Image]:
    return lambda image, amount, _: kind(image).enhance(1 + amount)


# Translations are shares of the side, of what the papers move an image of 224 (32) or 331 (150) pixels.
_OPERATIONS = (
    Operation(lambda image, _, __: image),
    Operation(_shear_x, trivial=0.99, rand=0.3, signed=True),
    Operation(_shear_y, trivial=0.99, rand=0.3, signed=True),
    Operation(_translate_x, trivial=32 / 224, rand=150 / 331, signed=True),
    Operation(_translate_y, trivial=32 / 224, rand=150 / 331, signed=True),
    Operation(_rotate, trivial=135.0, rand=30.0, signed=True),
    Operation(_enhance(ImageEnhance.Brightness), trivial=0.99, rand=0.9, signed=True),
    Operation(_enhance(ImageEnhance.Color), trivial=0.99, rand=0.9, signed=True),
    Operation(_enhance(ImageEnhance.Contrast), trivial=0.99, rand=0.9, signed=True),
    Operation(_enhance(ImageEnhance.Sharpness), trivial=0.99, rand=0.9, signed=True),
    Operation(_posterize, trivial=6.0, rand=4.0),
    Operation(_solarize, trivial=256.0, rand=256.0),
    Operation(lambda image, _, __: ImageOps.autocontrast(image)),
    Operation(lambda image, _, __: ImageOps.equalize(image)),
)

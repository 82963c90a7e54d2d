import numpy as np
import pytest
from PIL import Image

from train.augment import generator_for
from train.policies import _OPERATIONS, Policy, distort

OUTSIDE = (200, 10, 30)


def picture() -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(20, 220, (32, 32, 3), dtype=np.uint8))


@pytest.mark.parametrize("policy", ["trivial", "rand"])
@pytest.mark.parametrize("size", [(1, 1), (7, 3), (32, 32)])
def test_every_draw_is_an_rgb_image_of_the_same_size(policy: Policy, size: tuple[int, int]) -> None:
    for index in range(100):
        made = distort(picture().resize(size), policy, OUTSIDE, generator_for(0, 0, index))
        assert (made.mode, made.size) == ("RGB", size)


def test_no_policy_does_nothing_and_draws_nothing() -> None:
    random = generator_for(0, 0, 0)
    assert distort(picture(), "none", OUTSIDE, random) == picture()
    assert random.random() == generator_for(0, 0, 0).random()


@pytest.mark.parametrize("number", range(len(_OPERATIONS)))
def test_operation_of_strength_zero_does_nothing(number: int) -> None:
    operation = _OPERATIONS[number]
    if operation.trivial:  # the others are all or nothing
        assert operation.apply(picture(), 0.0, OUTSIDE) == picture()


@pytest.mark.parametrize("number", range(1, len(_OPERATIONS)))
def test_operation_at_its_largest_changes_the_picture_both_ways(number: int) -> None:
    operation = _OPERATIONS[number]
    for most in (operation.trivial, operation.rand):
        there = operation.apply(picture(), most, OUTSIDE)
        assert there != picture()
        if operation.signed:
            assert operation.apply(picture(), -most, OUTSIDE) not in (picture(), there)


def test_corners_are_filled_with_the_background() -> None:
    turned = _OPERATIONS[5].apply(picture(), 45.0, OUTSIDE)
    assert turned.getpixel((0, 0)) == OUTSIDE


def test_trivial_draws_widely() -> None:
    made = {distort(picture(), "trivial", OUTSIDE, generator_for(0, 0, i)).tobytes() for i in range(300)}
    assert len(made) > 150

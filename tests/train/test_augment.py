import hashlib

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

from slipway.contract import Preprocessing
from slipway.preprocessing import centre_square, crop_and_resize, to_array
from train.augment import augment, erase, generator_for, random_box
from train.config import AugmentConfig
from train.policies import Policy

RULES = Preprocessing(image_size=16, resize_size=16)


def picture() -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8))


def global_state() -> tuple[bytes, int]:
    """Of NumPy's own generator, which must not be used. Most draws move its position alone, and not its key."""
    state = np.random.get_state(legacy=False)["state"]  # noqa: NPY002
    return state["key"].tobytes(), state["pos"]


def test_draw_depends_on_seed_epoch_and_index_alone() -> None:
    """Case B18: distinct for every sample and epoch, the same after a restart, whoever draws."""
    draws = {
        (seed, epoch, index): generator_for(seed, epoch, index).random(4).tobytes()
        for seed in range(3)
        for epoch in range(3)
        for index in range(3)
    }
    assert len(set(draws.values())) == 27
    assert all(generator_for(*key).random(4).tobytes() == value for key, value in draws.items())


def test_box_lies_inside_the_image_and_keeps_its_share() -> None:
    config = AugmentConfig(min_scale=0.3, max_stretch=2.0)
    for index in range(300):
        width, height = [(60, 40), (5, 500), (1, 1)][index % 3]
        left, upper, right, lower = random_box((width, height), config, generator_for(0, 0, index))
        assert 0 <= left < right <= width + 1e-9
        assert 0 <= upper < lower <= height + 1e-9


def test_augmented_image_has_the_form_of_a_served_one() -> None:
    result = augment(picture(), RULES, AugmentConfig(), generator_for(0, 0, 0))
    assert (result.shape, result.flags["C_CONTIGUOUS"]) == ((3, 16, 16), True)
    assert result.dtype == np.uint8


def test_training_scales_with_the_filter_that_serving_uses() -> None:
    """Case A01: with nothing left to chance, the training image of a square is the served one, bit for bit."""
    square = picture().crop((0, 0, 40, 40))
    nothing = AugmentConfig(min_scale=1.0, max_stretch=1.0, flip=0.0)
    served = to_array(crop_and_resize(square, centre_square(square.size, RULES), RULES))
    assert np.array_equal(augment(square, RULES, nothing, generator_for(0, 0, 0)), served)


def test_flip_flips() -> None:
    square = picture().crop((0, 0, 40, 40))
    plain = AugmentConfig(min_scale=1.0, max_stretch=1.0, flip=0.0)
    flipped = AugmentConfig(min_scale=1.0, max_stretch=1.0, flip=1.0)
    a = augment(square, RULES, plain, generator_for(0, 0, 0))
    b = augment(square, RULES, flipped, generator_for(0, 0, 0))
    assert np.array_equal(a[:, :, ::-1], b)


def test_defaults_make_the_pixels_they_always_made() -> None:
    """A run that is continued after an update must go on with the images it began with."""
    made = [
        hashlib.sha256(augment(picture(), RULES, AugmentConfig(), generator_for(3, 1, i)).tobytes())
        for i in range(4)
    ]
    assert [each.hexdigest()[:16] for each in made] == [
        "aaea8e3c4cbc50f5",
        "fbb42894d82c4c56",
        "80e7d68aa6af2792",
        "620c94c9696505f8",
    ]


@pytest.mark.parametrize("policy", ["trivial", "rand"])
def test_distortions_and_erasing_depend_on_the_draw_alone(policy: Policy) -> None:
    """Case B18: whatever order samples are asked for in, and nothing else is drawn from or disturbed."""
    config = AugmentConfig(policy=policy, erase=0.5)

    def made(index: int) -> bytes:
        return augment(picture(), RULES, config, generator_for(0, 0, index)).tobytes()

    before = global_state()
    forwards = [made(index) for index in range(40)]
    backwards = [made(index) for index in reversed(range(40))]
    assert forwards == backwards[::-1]
    assert len(set(forwards)) == 40
    assert global_state() == before


def test_erasing_leaves_the_rest_and_covers_its_share() -> None:
    black = np.zeros((3, 40, 60), np.uint8)
    for index in range(100):
        random = generator_for(0, 0, index)
        changed: npt.NDArray[np.bool_] = np.any(erase(black, 1.0, random) > 0, axis=0)
        rows, columns = np.flatnonzero(changed.any(axis=1)), np.flatnonzero(changed.any(axis=0))
        box = (np.ptp(rows) + 1) * (np.ptp(columns) + 1)
        assert 0.01 < box / changed.size < 0.34
        assert changed.sum() > 0.9 * box  # one box, and nothing outside it
    assert not black.any()


def test_erasing_happens_as_often_as_it_is_asked_for() -> None:
    black = np.zeros((3, 16, 16), np.uint8)
    erased = sum(bool(erase(black, 0.3, generator_for(0, 0, index)).any()) for index in range(1000))
    assert 250 < erased < 350


@pytest.mark.parametrize("size", [(1, 1), (1, 50), (50, 1)])
def test_smallest_image_can_be_erased(size: tuple[int, int]) -> None:
    for index in range(50):
        assert erase(np.zeros((3, *size), np.uint8), 1.0, generator_for(0, 0, index)).shape == (3, *size)

import numpy as np
from PIL import Image

from slipway.contract import Preprocessing
from slipway.preprocessing import centre_square, crop_and_resize, to_array
from train.augment import augment, generator_for, random_box
from train.config import AugmentConfig

RULES = Preprocessing(image_size=16, resize_size=16)


def picture() -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8))


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
    assert (result.shape, result.dtype, result.flags["C_CONTIGUOUS"]) == ((3, 16, 16), np.uint8, True)


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

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy, one_hot

from train.config import AugmentConfig
from train.loader import Batch
from train.mixing import mix

# Four images of one value each, so that what came from where can be read off the pixels.
VALUES = torch.tensor([0, 50, 100, 200], dtype=torch.uint8)
BATCH = Batch(
    images=VALUES.reshape(4, 1, 1, 1).expand(4, 3, 10, 12),
    labels=torch.tensor([0, 1, 2, 3]),
    weights=torch.ones(4),
)


def generator(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng([seed, 8, 0, 0])


def test_without_it_nothing_is_touched() -> None:
    mixed = mix(BATCH, AugmentConfig(), generator())
    assert mixed.images is BATCH.images
    logits = torch.randn(4, 5, generator=torch.Generator().manual_seed(0))
    assert torch.equal(
        mixed.losses(logits, 0.1), cross_entropy(logits, BATCH.labels, reduction="none", label_smoothing=0.1)
    )


def test_mixup_blends_images_by_their_share() -> None:
    mixed = mix(BATCH, AugmentConfig(mixup=0.8), generator())
    assert 0 < mixed.share < 1
    expected = mixed.share * VALUES.float() + (1 - mixed.share) * VALUES.roll(1).float()
    assert torch.allclose(mixed.images[:, 0, 0, 0], expected, atol=1e-4)
    assert mixed.others.tolist() == [3, 0, 1, 2]


@pytest.mark.parametrize("seed", range(20))
def test_share_of_cutmix_is_the_area_that_is_left(seed: int) -> None:
    mixed = mix(BATCH, AugmentConfig(cutmix=1.0), generator(seed))
    own = (mixed.images == BATCH.images).float().mean(dim=(1, 2, 3))
    assert torch.allclose(own, torch.full((4,), mixed.share), atol=1e-6)
    assert mixed.images.dtype == torch.uint8


def test_loss_is_that_of_the_mixed_target() -> None:
    mixed = mix(BATCH, AugmentConfig(mixup=0.8), generator())
    logits = torch.randn(4, 5, generator=torch.Generator().manual_seed(0))
    target = mixed.share * one_hot(mixed.labels, 5) + (1 - mixed.share) * one_hot(mixed.others, 5)
    expected = cross_entropy(logits, target, reduction="none", label_smoothing=0.1)
    assert torch.allclose(mixed.losses(logits, 0.1), expected, atol=1e-6)


def test_same_position_draws_the_same_and_both_kinds_take_turns() -> None:
    config = AugmentConfig(mixup=0.2, cutmix=1.0)
    first, again = mix(BATCH, config, generator(3)), mix(BATCH, config, generator(3))
    assert torch.equal(first.images, again.images)
    assert first.share == again.share
    assert {mix(BATCH, config, generator(seed)).images.dtype for seed in range(20)} == {
        torch.uint8,
        torch.float32,
    }


def test_image_alone_in_its_micro_batch_stays_what_it_is() -> None:
    alone = Batch(images=BATCH.images[:1], labels=BATCH.labels[:1], weights=BATCH.weights[:1])
    mixed = mix(alone, AugmentConfig(mixup=0.8), generator())
    assert torch.equal(mixed.images, alone.images.float())


def test_nobody_learns_from_a_neighbour_that_weighs_nothing() -> None:
    """A sample that could not be decoded: another image stands in its place, with weight 0."""
    batch = replace(BATCH, weights=torch.tensor([1.0, 0.0, 1.0, 1.0]))
    for config in (AugmentConfig(mixup=0.8), AugmentConfig(cutmix=1.0)):
        mixed = mix(batch, config, generator())
        assert torch.equal(mixed.images[2].float(), BATCH.images[2].float())
        assert mixed.others.tolist() == [3, 0, 2, 2]

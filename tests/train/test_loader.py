import io
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from slipway.contract import Preprocessing
from tests.train.conftest import MakeFolder, data_config
from train.config import AugmentConfig
from train.folder import DataError, ImageFolder, read_folder
from train.loader import Batch, PlainSamples, TrainingSamples, plain_batches, training_batches
from train.order import Order

RULES = Preprocessing(image_size=16, resize_size=16)


def stream(
    folder: ImageFolder, *, cursor: int = 0, rank: int = 0, world_size: int = 1, workers: int = 0
) -> list[Batch]:
    samples = TrainingSamples(folder, RULES, AugmentConfig(), seed=0)
    order = Order(
        samples=len(folder.splits["train"]), batch_size=6, epochs=2, seed=0, fingerprint=folder.fingerprint
    )
    batches = training_batches(
        samples,
        order,
        cursor=cursor,
        accumulate=1,
        rank=rank,
        world_size=world_size,
        workers=workers,
    )
    return list(batches)


def pixels(batches: list[Batch]) -> torch.Tensor:
    return torch.cat([batch.images[batch.weights > 0] for batch in batches])


def test_stream_is_the_same_with_any_number_of_workers(make_folder: MakeFolder) -> None:
    """Cases B02 and B18: order and augmentation, bit for bit."""
    folder = read_folder(data_config(make_folder()))
    alone = stream(folder)
    for workers in (1, 2):
        together = stream(folder, workers=workers)
        assert len(alone) == len(together)
        for a, b in zip(alone, together, strict=True):
            assert torch.equal(a.images, b.images)
            assert torch.equal(a.labels, b.labels)


def test_stream_continues_where_it_was_cut(make_folder: MakeFolder) -> None:
    folder = read_folder(data_config(make_folder()))
    assert torch.equal(pixels(stream(folder))[12:], pixels(stream(folder, cursor=12)))


def test_ranks_together_see_what_one_sees_alone(make_folder: MakeFolder) -> None:
    folder = read_folder(data_config(make_folder()))
    ranks = [stream(folder, rank=rank, world_size=2) for rank in range(2)]
    together = [pixels([a, b]) for a, b in zip(*ranks, strict=True)]
    assert torch.equal(torch.cat(together), pixels(stream(folder)))


def test_augmentation_differs_between_epochs(make_folder: MakeFolder) -> None:
    folder = read_folder(data_config(make_folder()))
    sample = TrainingSamples(folder, RULES, AugmentConfig(), seed=0)
    order = Order(samples=3, batch_size=3, epochs=2, seed=0, fingerprint="")
    first, second = (order.micro_batches(window, 1, 0, 1)[0][0] for window in order.windows(0))
    assert not np.array_equal(sample[replace(first, index=0)][0], sample[replace(second, index=0)][0])


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("batch_size", [1, 4, 7])
def test_evaluation_takes_every_sample_once(
    make_folder: MakeFolder, world_size: int, batch_size: int
) -> None:
    """Case B06."""
    folder = read_folder(data_config(make_folder()))
    samples = PlainSamples(folder, "val", RULES)
    seen = [
        batch.images
        for rank in range(world_size)
        for batch in plain_batches(samples, batch_size, rank=rank, world_size=world_size, workers=0)
    ]
    expected = {samples[index][0].tobytes() for index in range(len(samples))}
    assert sum(map(len, seen)) == len(samples)
    assert {image.numpy().tobytes() for images in seen for image in images} == expected


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("damage", ["half", "almost whole", "empty", "html"])
def test_undecodable_file_is_named(make_folder: MakeFolder, workers: int, damage: str) -> None:
    """Case A07: hours into training, the message must say which file, in one line."""
    root = make_folder()
    file = io.BytesIO()
    Image.effect_noise((64, 64), 90).convert("RGB").save(file, "JPEG")
    data = file.getvalue()
    damaged = {
        "half": data[: len(data) // 2],
        "almost whole": data[: int(len(data) * 0.99)],
        "empty": b"",
        "html": b"<html>",
    }
    bad = root / "train" / "bee" / "3.png"
    bad.write_bytes(damaged[damage])
    with pytest.raises(DataError) as caught:
        stream(read_folder(data_config(root)), workers=workers)
    assert str(caught.value).startswith(f"{bad}: ")
    assert "\n" not in str(caught.value)


def test_images_of_every_mode_share_a_batch(make_folder: MakeFolder) -> None:
    """Case A15."""
    root = make_folder(("a", "b"), val=1)
    modes = {"1": "png", "L": "png", "LA": "png", "P": "png", "RGBA": "png", "CMYK": "jpg", "I;16": "png"}
    for mode, suffix in modes.items():
        Image.new(mode, (20, 14)).save(root / "val" / "a" / f"{mode.replace(';', '')}.{suffix}")
    samples = PlainSamples(read_folder(data_config(root)), "val", RULES)
    (batch,) = plain_batches(samples, 100, rank=0, world_size=1, workers=0)
    assert batch.images.shape == (len(modes) + 2, 3, 16, 16)
    assert batch.images.dtype == torch.uint8


def test_extension_does_not_matter(make_folder: MakeFolder, tmp_path: Path) -> None:
    """Case A08: content decides."""
    root = make_folder()
    file = io.BytesIO()
    Image.new("RGB", (30, 30), (1, 2, 3)).save(file, "JPEG")
    (root / "val" / "ant" / "0.png").write_bytes(file.getvalue())
    folder = read_folder(data_config(root))
    assert len(PlainSamples(folder, "val", RULES)[0][0]) == 3

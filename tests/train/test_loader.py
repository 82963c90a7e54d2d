import io
import multiprocessing
import subprocess
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from slipway.contract import Preprocessing
from tests.train.conftest import MakeFolder, data_config
from train import loader
from train.config import AugmentConfig
from train.dataset import DataError, Dataset
from train.folder import read_folder
from train.loader import (
    Batch,
    LoaderError,
    PlainSamples,
    TrainingSamples,
    plain_batches,
    training_batches,
    warn_of_little_shared_memory,
    worker_deaths_in_words,
)
from train.order import Draw, Order

RULES = Preprocessing(image_size=16, resize_size=16)


def stream(
    folder: Dataset, *, cursor: int = 0, rank: int = 0, world_size: int = 1, workers: int = 0
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
    ranks = [
        list(plain_batches(samples, batch_size, rank=rank, world_size=world_size, workers=0))
        for rank in range(world_size)
    ]
    seen = [batch.images[batch.weights > 0] for batches in ranks for batch in batches]
    expected = {samples[Draw(0, index)][0].tobytes() for index in range(len(samples))}
    assert sum(map(len, seen)) == len(samples)
    assert {image.numpy().tobytes() for images in seen for image in images} == expected
    # Where the model is sharded, every forward is one of all ranks.
    assert len({len(batches) for batches in ranks}) == 1


@pytest.mark.parametrize("workers", [0, 1])
def test_undecodable_file_whose_name_has_lines_is_named(make_folder: MakeFolder, workers: int) -> None:
    """Case A16: from a worker the name comes at the end of a traceback."""
    root = make_folder()
    path = root / "train" / "ant" / "li\nne\u2028s.png"
    path.write_bytes(b"")
    with pytest.raises(DataError, match=rf"^{path}: EMPTY"):
        stream(read_folder(data_config(root)), workers=workers)


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


def skipping(folder: Dataset, **place: int) -> list[Batch]:
    """As `stream`, but skipping, and in an order that does not depend on the files' contents."""
    samples = TrainingSamples(folder, RULES, AugmentConfig(), seed=0, on_bad_sample="skip")
    order = Order(samples=len(samples.samples), batch_size=6, epochs=2, seed=0, fingerprint="fixed")
    whole = {"cursor": 0, "accumulate": 1, "rank": 0, "world_size": 1, "workers": 0}
    return list(training_batches(samples, order, **{**whole, **place}))


def test_rank_of_many_says_what_is_wrong_and_has_a_batch_all_the_same(make_folder: MakeFolder) -> None:
    """Case A07: a rank that ended by itself would leave the others waiting for it."""
    root = make_folder()
    for split in ("train", "val"):
        path = root / split / "bee" / "0.png"
        path.write_bytes(path.read_bytes()[:-20])
    folder = read_folder(data_config(root))
    samples = TrainingSamples(folder, RULES, AugmentConfig(), seed=0)
    order = Order(samples=21, batch_size=6, epochs=99, seed=0, fingerprint=folder.fingerprint)
    stream = training_batches(samples, order, cursor=0, accumulate=1, rank=0, world_size=2, workers=0)
    for batch in islice((batch for batch in stream if batch.failure), 3):
        assert "train/bee/0.png: " in batch.failure
        assert batch.images.shape == (2, 3, 16, 16)
        assert not batch.weights.any()
    validation = PlainSamples(folder, "val", RULES)
    ranks = [list(plain_batches(validation, 2, rank=rank, world_size=2, workers=0)) for rank in (0, 1)]
    assert [len(batches) for batches in ranks] == [3, 3]
    failed = [any("val/bee/0.png: " in batch.failure for batch in batches) for batches in ranks]
    assert sorted(failed) == [False, True]


def test_skipped_sample_weighs_nothing_and_moves_no_other(
    make_folder: MakeFolder, caplog: pytest.LogCaptureFixture
) -> None:
    """Case A07: the order stays, the count is exact, the file is named once, and no black image takes its place."""
    root = make_folder()
    whole = skipping(read_folder(data_config(root)))
    (root / "train" / "bee" / "3.png").write_bytes(b"<html>404</html>")
    folder = read_folder(data_config(root))
    bad = [sample.file for sample in folder.splits["train"]].index("train/bee/3.png")
    good = TrainingSamples(folder, RULES, AugmentConfig(), seed=0)
    skipped = skipping(folder)
    assert [len(batch.labels) for batch in skipped] == [len(batch.labels) for batch in whole]
    assert sum(len(batch.weights) - int(batch.weights.sum()) for batch in skipped) == 2  # once an epoch
    for before, after in zip(whole, skipped, strict=True):
        kept = after.weights > 0
        assert torch.equal(after.images[kept], before.images[kept])
        assert torch.equal(after.labels[kept], before.labels[kept])
        assert torch.equal(
            after.labels[~kept], torch.full((int((~kept).sum()),), good.samples[bad + 1].label)
        )
        # Made of the next sample, so that batch statistics are those of real images.
        assert (after.images[~kept].amax(dim=(2, 3)) > after.images[~kept].amin(dim=(2, 3))).all()
    warnings = [record.message for record in caplog.records if "skipped" in record.message]
    assert len(warnings) == 1
    assert f"{root}/train/bee/3.png: NOT_AN_IMAGE" in warnings[0]


def test_skipping_is_the_same_with_any_workers_ranks_and_cursor(make_folder: MakeFolder) -> None:
    """Cases A07, B02, B11: what takes a bad sample's place depends on nothing but the data set."""
    root = make_folder()
    for name in ("ant/0.png", "bee/3.png", "bee/4.png", "cat/6.png"):
        (root / "train" / name).write_bytes(b"")
    folder = read_folder(data_config(root))
    alone = skipping(folder)
    for batches in (skipping(folder, workers=2), skipping(folder, cursor=12)):
        for expected, batch in zip(alone[-len(batches) :], batches, strict=True):
            for field in ("images", "labels", "weights"):
                assert torch.equal(getattr(batch, field), getattr(expected, field))
    ranks = [skipping(folder, rank=rank, world_size=2) for rank in range(2)]
    assert len(ranks[0]) == len(ranks[1]) == len(alone)
    for expected, *parts in zip(alone, *ranks, strict=True):
        images, weights = (torch.cat([getattr(part, of) for part in parts]) for of in ("images", "weights"))
        assert torch.equal(images[: len(expected.images)], expected.images)
        assert torch.equal(weights[: len(expected.weights)], expected.weights)
        # 3 samples on 2 ranks: the second one has a single one, and another image beside it.
        assert not weights[len(expected.weights) :].any()


def test_nothing_to_put_in_a_bad_samples_place_is_an_error(make_folder: MakeFolder) -> None:
    root = make_folder(train=2)
    for path in (root / "train").rglob("*.png"):
        path.write_bytes(b"no image")
    with pytest.raises(DataError, match="none of the 6 training images can be decoded"):
        skipping(read_folder(data_config(root)))


def test_bad_sample_of_validation_is_never_skipped(make_folder: MakeFolder) -> None:
    """Case A07: a score over fewer images is another score."""
    root = make_folder()
    (root / "val" / "ant" / "1.png").write_bytes(b"")
    samples = PlainSamples(read_folder(data_config(root)), "val", RULES)
    with pytest.raises(DataError, match=r"val/ant/1.png: EMPTY"):
        list(plain_batches(samples, 4, rank=0, world_size=1, workers=0))


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
    assert len(PlainSamples(folder, "val", RULES)[Draw(0, 0)][0]) == 3


def test_signal_to_every_process_leaves_workers_to_their_trainer(make_folder: MakeFolder) -> None:
    """Case B04: the step that the signal interrupts needs them. Of the batches to come two are ready, at the most."""
    folder = read_folder(data_config(make_folder(train=20)))
    samples = TrainingSamples(folder, RULES, AugmentConfig(), seed=0)
    order = Order(samples=60, batch_size=6, epochs=2, seed=0, fingerprint=folder.fingerprint)
    batches = training_batches(samples, order, cursor=0, accumulate=1, rank=0, world_size=1, workers=1)
    others = multiprocessing.active_children()
    next(batches)
    (worker,) = set(multiprocessing.active_children()) - set(others)
    for name in ("-TERM", "-USR1"):
        subprocess.run(
            ["kill", name, str(worker.pid)], check=True
        )  # not this process, which is their trainer
    assert len(list(batches)) == 19


# PyTorch raises in whatever line the signal of the death arrives, of a destructor too, where Python only says so.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_death_of_a_worker_is_said_in_words(make_folder: MakeFolder) -> None:
    """Case B13: as when the kernel runs out of memory; nothing hangs, and the message says what to do."""
    folder = read_folder(data_config(make_folder()))
    samples = TrainingSamples(folder, RULES, AugmentConfig(), seed=0)
    order = Order(samples=21, batch_size=1, epochs=50, seed=0, fingerprint=folder.fingerprint)
    batches = training_batches(samples, order, cursor=0, accumulate=1, rank=0, world_size=1, workers=1)
    others = multiprocessing.active_children()  # of whose death PyTorch would tell another test
    next(batches)
    (worker,) = set(multiprocessing.active_children()) - set(others)

    def kill_and_go_on() -> None:
        worker.kill()
        list(batches)

    # All of it has to lie inside.
    with (
        pytest.raises(LoaderError, match=r"a loader worker died .* lower data\.workers"),
        worker_deaths_in_words(),
    ):
        kill_and_go_on()


def test_other_errors_keep_their_words() -> None:
    with pytest.raises(RuntimeError, match="shapes"), worker_deaths_in_words():
        raise RuntimeError("shapes do not match")


def test_little_shared_memory_is_said_before_workers_die_of_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Case B13, on a container with 64 MB."""
    monkeypatch.setattr(loader, "_free_mb", lambda: 64)
    warn_of_little_shared_memory(224, 64, workers=2)
    assert not caplog.records
    warn_of_little_shared_memory(224, 64, workers=8)
    assert "has 64 MB free, and 8 loader workers may need 147 MB (in Docker: --shm-size=294m)" in caplog.text

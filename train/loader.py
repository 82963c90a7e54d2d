"""Samples -> batches of uint8 tensors. Workers hold no state: a batch depends on what was asked for, nothing else."""

import logging
import math
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

from slipway.contract import Preprocessing
from slipway.errors import SlipwayError
from slipway.preprocessing import ImageError, decode, preprocess
from train.augment import augment, generator_for
from train.config import AugmentConfig
from train.dataset import DataError, Dataset
from train.order import Draw, Order
from train.preemption import obey_the_trainer_alone
from train.split import Split

_Item = tuple[npt.NDArray[np.uint8], int, float, str | None]  # image, label, weight, what was wrong

# Where workers put batches for the process that trains, and how many each of them has ready.
SHARED_MEMORY = Path("/dev/shm")
PREFETCHED = 2
# In which the kernel has told PyTorch that a worker is dead, on a slow machine too.
DEATH_SECONDS = 10.0

logger = logging.getLogger(__name__)


class LoaderError(SlipwayError):
    """A loader worker died: not of an image, which would be named."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """images: uint8 [n, 3, size, size]. labels: int64 [n]. weights: float32 [n], 0 or 1.

    bad: a sentence for each sample that could not be decoded. Its weight is 0, and image and label are another's.
    failure: why the batch could not be had, if it could not: what is here then only stands in for it, with weight 0.
    """

    images: torch.Tensor
    labels: torch.Tensor
    weights: torch.Tensor
    bad: tuple[str, ...] = ()
    failure: str = ""

    def to(self, device: torch.device, *, channels_last: bool = False) -> "Batch":
        layout = torch.channels_last if channels_last else torch.preserve_format
        return replace(
            self,
            images=self.images.to(device, non_blocking=True, memory_format=layout),
            labels=self.labels.to(device, non_blocking=True),
            weights=self.weights.to(device, non_blocking=True),
        )

    def pin_memory(self) -> "Batch":
        return replace(
            self,
            images=self.images.pin_memory(),
            labels=self.labels.pin_memory(),
            weights=self.weights.pin_memory(),
        )


class TrainingSamples(TorchDataset[_Item]):
    """Augmented training images, asked for by `Draw`.

    on_bad_sample: `error` raises DataError for one that cannot be decoded. `skip` puts the next sample that can be
    in its place, with weight 0: nothing is learned from it, and the batch statistics see a real image, not a black
    one. Which one is a function of the data set alone, so that order, cursor and resume stay exact.
    """

    def __init__(
        self,
        dataset: Dataset,
        rules: Preprocessing,
        config: AugmentConfig,
        seed: int,
        on_bad_sample: Literal["error", "skip"] = "error",
    ) -> None:
        self.dataset, self.samples = dataset, dataset.splits["train"]
        self.rules, self.config, self.seed = rules, config, seed
        self.on_bad_sample = on_bad_sample

    def __getitem__(self, draw: Draw) -> _Item:
        index, weight, problem = draw.index, draw.weight, None
        try:
            image = self._decode(index)
        except ImageError as error:
            problem = f"{self.dataset.where(self.samples[index])}: {error}"
            if self.on_bad_sample == "error":
                raise DataError(problem) from error
            index, image = self._next_good(index)
            weight = 0.0
        random = generator_for(self.seed, draw.epoch, draw.index)
        return augment(image, self.rules, self.config, random), self.samples[index].label, weight, problem

    def _next_good(self, index: int) -> tuple[int, Image.Image]:
        """The first sample behind `index` that can be decoded, in the order of the data set, as a ring."""
        for step in range(1, len(self.samples)):
            candidate = (index + step) % len(self.samples)
            try:
                return candidate, self._decode(candidate)
            except ImageError:
                continue
        raise DataError(f"none of the {len(self.samples)} training images can be decoded")

    def _decode(self, index: int) -> Image.Image:
        return decode(self.dataset.read(self.samples[index]), self.rules)


class PlainSamples(TorchDataset[_Item]):
    """Images exactly as the server will see them, for validation, evaluation and parity, asked for by `Draw`.

    One that cannot be decoded is always an error: a score over fewer images is another score.
    """

    def __init__(self, dataset: Dataset, split: Split, rules: Preprocessing) -> None:
        self.dataset, self.samples, self.rules = dataset, dataset.splits[split], rules

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, draw: Draw) -> _Item:
        sample = self.samples[draw.index]
        try:
            return preprocess(self.dataset.read(sample), self.rules), sample.label, draw.weight, None
        except ImageError as error:
            raise DataError(f"{self.dataset.where(sample)}: {error}") from error


def training_batches(
    samples: TrainingSamples,
    order: Order,
    *,
    cursor: int,
    accumulate: int,
    rank: int,
    world_size: int,
    workers: int,
) -> Iterator[Batch]:
    """Every micro-batch of this rank from `cursor` to the end of training, as one stream over all epochs.

    A sample that is skipped is named in the log, once. Raises DataError for one that must not be; where there are other
    ranks, it comes as `Batch.failure`, for all of them to end together.
    """
    draws = (
        micro_batch
        for window in order.windows(cursor)
        for micro_batch in order.micro_batches(window, accumulate, rank, world_size)
    )
    told: set[str] = set()
    batches = _load(samples, draws, workers)
    for batch in batches if world_size == 1 else _with_stand_ins(batches, samples.rules.image_size):
        for problem in batch.bad:
            if problem not in told:
                logger.warning("WARNING: skipped: %s", problem)
                told.add(problem)
        yield batch


def plain_batches(
    samples: PlainSamples, batch_size: int, *, rank: int, world_size: int, workers: int
) -> Iterator[Batch]:
    """Every sample once over all ranks, and as many batches on each of them.

    A rank that has no samples left takes the first one with weight 0: where the model is sharded, every forward is one
    of all ranks. Errors are those of `training_batches`.
    """
    mine = range(rank, len(samples), world_size)
    batches = math.ceil(math.ceil(len(samples) / world_size) / batch_size)
    draws = (
        [Draw(0, index) for index in mine[number * batch_size : (number + 1) * batch_size]]
        or [Draw(0, 0, weight=0.0)]
        for number in range(batches)
    )
    loaded = _load(samples, draws, workers)
    if world_size == 1:
        return loaded
    return islice(_with_stand_ins(loaded, samples.rules.image_size), batches)


def _with_stand_ins(batches: Iterator[Batch], image_size: int) -> Iterator[Batch]:
    """The same batches; where one cannot be had, others that say why, for as long as they are asked for.

    A rank that ended by itself would leave the rest waiting for it, in the middle of a step.
    """
    try:
        yield from batches
    except DataError as error:
        stand_in = Batch(
            images=torch.zeros(2, 3, image_size, image_size, dtype=torch.uint8),  # one image has no variance
            labels=torch.zeros(2, dtype=torch.int64),
            weights=torch.zeros(2),
            failure=str(error),
        )
        while True:
            yield stand_in


@contextmanager
def worker_deaths_in_words() -> Iterator[None]:
    """Raises LoaderError where PyTorch, wherever training is at that moment, says that a worker is gone."""
    try:
        with _deaths_awaited():
            yield
    except RuntimeError as error:
        if not str(error).startswith("DataLoader worker (pid"):
            raise
        free = f"; {SHARED_MEMORY} has {_free_mb()} MB free" if SHARED_MEMORY.is_dir() else ""
        raise LoaderError(
            f"a loader worker died ({error}){free}. If it was killed, memory was short: lower data.workers or "
            "training.batch_size, or give more (in Docker: --shm-size). Checkpoints are intact"
        ) from error


@contextmanager
def _deaths_awaited() -> Iterator[None]:
    """A worker that dies cuts off what it is handing over, and a moment later PyTorch raises that it is dead."""
    try:
        yield
    except (ConnectionError, EOFError):
        time.sleep(DEATH_SECONDS)  # ends by that
        raise


def warn_of_little_shared_memory(image_size: int, micro_batch: int, workers: int) -> None:
    """Say so before workers die of it (case B13). Docker gives a container 64 MB, Kubernetes does too.

    workers: of all ranks on this machine.
    """
    needed = 3 * image_size**2 * micro_batch * workers * PREFETCHED // 2**20
    if SHARED_MEMORY.is_dir() and needed > _free_mb():
        logger.warning(
            "WARNING: %s has %d MB free, and %d loader workers may need %d MB (in Docker: --shm-size=%dm); "
            "a worker that finds no room dies of a bus error",
            SHARED_MEMORY,
            _free_mb(),
            workers,
            needed,
            2 * needed,
        )


def _free_mb() -> int:
    return shutil.disk_usage(SHARED_MEMORY).free // 2**20


def _load(samples: TorchDataset[_Item], batches: Iterable[list[Any]], workers: int) -> Iterator[Batch]:
    # A plain DataLoader, not Fabric's wrapper: that one calls set_epoch with its own counter and would replay
    # epoch 0 after a restart.
    loader: DataLoader[_Item] = DataLoader(
        samples,
        batch_sampler=batches,
        num_workers=workers,
        prefetch_factor=PREFETCHED if workers else None,
        collate_fn=_collate,
        pin_memory=torch.cuda.is_available(),
        worker_init_fn=_start_worker,
        # Its own, because starting an iterator draws a seed, which would move the dropout of the first step.
        generator=torch.Generator(),
    )
    try:
        yield from loader
    except DataError as error:
        # From a worker process the sentence arrives at the end of that worker's traceback; a file name may have lines.
        name = f"{DataError.__module__}.{DataError.__qualname__}: "
        raise DataError(str(error).rpartition(name)[2].removesuffix("\n")) from None


def _start_worker(_worker: int) -> None:
    obey_the_trainer_alone()


def _collate(samples: list[_Item]) -> Batch:
    images, labels, weights, problems = zip(*samples, strict=True)
    return Batch(
        images=torch.from_numpy(np.stack(images)),
        labels=torch.tensor(labels),
        weights=torch.tensor(weights),
        bad=tuple(problem for problem in problems if problem is not None),
    )

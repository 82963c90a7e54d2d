"""The order of samples as a pure function of (seed, epoch, dataset fingerprint).

The position in the data is one integer, the cursor: how many samples all ranks together have consumed since the
start of training. Everything else follows from it: the epoch, the samples of the next optimiser step, and which of
them belong to which rank and micro-batch. So a run continues anywhere, on any number of ranks, with any number of
loader workers, and sees each sample once an epoch.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch

from slipway import hashing


@dataclass(frozen=True, slots=True)
class Draw:
    """One appearance of a sample. `weight` is 0 where it only fills up a micro-batch: nothing is learned from it."""

    epoch: int
    index: int
    weight: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Window:
    """The samples of one optimiser step. `end` is the cursor behind it."""

    epoch: int
    indices: tuple[int, ...]
    end: int


@dataclass(frozen=True, kw_only=True)
class Order:
    """`samples` per epoch, cut into windows of `batch_size`; the last window of an epoch may be smaller.

    avoided: the ends of windows that are passed over: no micro-batch holds their samples.
    """

    samples: int
    batch_size: int
    epochs: int
    seed: int
    fingerprint: str
    avoided: frozenset[int] = frozenset()

    @property
    def end(self) -> int:
        """The cursor when training is done."""
        return self.samples * self.epochs

    @property
    def steps(self) -> int:
        return -(-self.samples // self.batch_size) * self.epochs

    def windows(self, cursor: int) -> Iterator[Window]:
        """All windows from `cursor` to the end. A cursor always lies between two windows."""
        while cursor < self.end:
            epoch, start = divmod(cursor, self.samples)
            indices = permutation(self.samples, self.seed, epoch, self.fingerprint)[
                start : start + self.batch_size
            ]
            cursor += len(indices)
            yield Window(epoch=epoch, indices=indices, end=cursor)

    def micro_batches(self, window: Window, accumulate: int, rank: int, world_size: int) -> list[list[Draw]]:
        """What `rank` works off in one window: the same number of micro-batches on every rank.

        A smaller last window is dealt out evenly. A micro-batch that gets one sample of it, or none, is filled up to
        two: of one image, once layers have shrunk it to a pixel, batch normalisation can take no variance, and a rank
        that stood idle would be missed in every collective. What it is filled up with has weight 0: it takes part in
        the batch statistics, and counts neither in the loss nor as a sample. Micro-batches that are to hold one sample
        each (training.batch_size is no more than ranks times training.accumulate) stay as they are.
        """
        if window.end in self.avoided:
            return []
        total = len(window.indices)
        count = -(-total * accumulate // self.batch_size)
        parts = count * world_size
        least = min(2, self.batch_size // (accumulate * world_size))
        batches = []
        for part in range(rank, parts, world_size):
            mine = window.indices[-(-part * total // parts) : -(-(part + 1) * total // parts)]
            draws = [Draw(window.epoch, index) for index in mine]
            if (missing := least - len(mine)) > 0:
                draws += self._without_weight(window, mine)[:missing]
            batches.append(draws)
        return batches

    def _without_weight(self, window: Window, mine: tuple[int, ...]) -> list[Draw]:
        """Up to two draws of other samples than `mine`, which holds one or none: one image twice has no variance.

        They come from the window, and from elsewhere in its epoch where it has no others.
        """
        epoch = permutation(self.samples, self.seed, window.epoch, self.fingerprint)
        others = dict.fromkeys([*window.indices[:2], *epoch[:2]])
        return [Draw(window.epoch, index, weight=0.0) for index in others if index not in mine]


@lru_cache(maxsize=2)
def permutation(samples: int, seed: int, epoch: int, fingerprint: str) -> tuple[int, ...]:
    """The order of one epoch."""
    draw = hashing.of_bytes(f"{seed}:{epoch}:{fingerprint}".encode())
    generator = torch.Generator().manual_seed(int(draw[:15], 16))
    return tuple(torch.randperm(samples, generator=generator).tolist())

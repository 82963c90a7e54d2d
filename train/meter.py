"""How fast training runs, what it waits for, and how much memory it takes. Nothing here waits for the device."""

import logging
import time
from collections.abc import Iterator
from itertools import pairwise
from typing import TypeVar

import psutil
import torch

Item = TypeVar("Item")

# Memory that grows in each of so many epochs, by this share altogether, is taken for a leak.
LEAK_EPOCHS = 5
LEAK_SHARE = 0.05

MEGABYTE = 2**20

logger = logging.getLogger(__name__)


class Meter:
    """Counts from one reading to the next.

    memory_mb: at the last reading; of this process, or on CUDA what tensors took.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._by_epoch: list[float] = []
        self.memory_mb = memory(device)["memory_mb"]
        self._start()

    def timed(self, items: Iterator[Item]) -> Iterator[Item]:
        """The same items; how long each of them was waited for is counted."""
        while True:
            started = time.perf_counter()
            try:
                item = next(items)
            except StopIteration:
                return
            finally:
                self._waited += time.perf_counter() - started
            yield item

    def count(self, images: int) -> None:
        self._images += images

    @property
    def images_per_second(self) -> float:
        """Over all ranks, since the last reading."""
        return self._images / (time.perf_counter() - self._started)

    def read(self) -> dict[str, float]:
        """Speed, the share of the time in which this rank waited for data, and memory; then counting starts anew."""
        elapsed = time.perf_counter() - self._started
        figures = {"images_per_second": self._images / elapsed, "data_wait": self._waited / elapsed}
        figures |= memory(self._device)
        self.memory_mb = figures["memory_mb"]
        self._start()
        return figures

    def end_epoch(self) -> None:
        """Leave validation out of the speed, and warn when memory has grown in each of the last epochs."""
        self._start()
        self._by_epoch.append(memory(self._device)["memory_mb"])
        recent = self._by_epoch[-LEAK_EPOCHS - 1 :]
        grows = all(later > earlier for earlier, later in pairwise(recent))
        if len(recent) > LEAK_EPOCHS and grows and recent[-1] > (1 + LEAK_SHARE) * recent[0]:
            logger.warning(
                "WARNING: memory has grown in each of the last %d epochs, from %.0f to %.0f MB. Look for tensors that "
                "are kept together with their graph (a loss added up without .item()), and for caches in a dataset",
                LEAK_EPOCHS,
                recent[0],
                recent[-1],
            )
            self._by_epoch.clear()

    def _start(self) -> None:
        self._started, self._waited, self._images = time.perf_counter(), 0.0, 0


def memory(device: torch.device) -> dict[str, float]:
    """Megabytes of this process: on CUDA what tensors take and what the allocator holds, else what is resident."""
    if device.type == "cuda":
        return {
            "memory_mb": torch.cuda.memory_allocated(device) / MEGABYTE,
            "memory_reserved_mb": torch.cuda.memory_reserved(device) / MEGABYTE,
        }
    return {"memory_mb": psutil.Process().memory_info().rss / MEGABYTE}

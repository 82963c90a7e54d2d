"""Writing checkpoints one at a time: training waits for each of them, or goes on meanwhile."""

import logging
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.tensor import DTensor

from slipway.contract import Signature
from train import checkpoint
from train.checkpoint import Progress, Tensors
from train.config import Config
from train.hardware import Machine
from train.runs import Run

logger = logging.getLogger(__name__)


class Saver:
    """Writes checkpoints of one run.

    With `hardware.background_saving` a thread writes from a copy of the state in the CPU's memory. What goes wrong
    there is raised by the next call, in the same words on every rank.
    """

    def __init__(self, machine: Machine, run: Run, config: Config, signature: Signature) -> None:
        background = config.hardware.background_saving
        # The ranks' threads talk in a group of their own: in that of training, messages would get mixed up.
        talking = machine.apart() if background else machine
        self._write = partial(checkpoint.save, talking, run, config, signature)
        self._thread = ThreadPoolExecutor(1, "checkpoint") if background else None
        self._pending: Future[Path] | None = None
        self._copies: Tensors = {}

    def save(self, progress: Progress, tensors: Tensors) -> None:
        """Write one checkpoint, or begin to, when the one before is written.

        Raises SealError on every rank if this one, or in the background the one before, could not be written.
        """
        self.finish()
        if self._thread is None:
            self._write(progress, tensors)
        else:
            self._copy(tensors)
            self._pending = self._thread.submit(self._write, progress, self._copies)

    def _copy(self, tensors: Tensors) -> None:
        """Into the same memory each time: new memory takes longer to get than to fill."""
        if self._copies.keys() != tensors.keys():
            self._copies = BlockingAsyncStager().stage(tensors)
            return
        for name, tensor in tensors.items():
            _local(self._copies[name]).copy_(_local(tensor))

    def finish(self) -> None:
        """Wait until nothing is being written any more. Raises SealError on every rank if that failed."""
        pending, self._pending = self._pending, None
        if pending:
            pending.result()

    def close(self) -> None:
        """The same for the end of training, whatever its reason: what failed in the background is only said."""
        if self._pending and (error := self._pending.exception()):
            logger.warning("WARNING: the last checkpoint was not written: %s", error)
        if self._thread:
            self._thread.shutdown()


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor

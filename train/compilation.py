"""What the first steps would do otherwise than all others is done before them: compiling, and sorting gradients."""

import logging
import time
from collections.abc import Iterator

import torch
from lightning.fabric.strategies.ddp import DDPStrategy

from train.config import HardwareConfig
from train.hardware import Machine
from train.loader import Batch
from train.order import Window
from train.step import accumulate_gradients
from train.trainer import Trainer

logger = logging.getLogger(__name__)


def needs_warm_up(config: HardwareConfig, machine: Machine) -> bool:
    """Whether the network is compiled, or its gradients travel by DDP.

    DDP puts all gradients into one message in the first step of a process, and into several from the second on, in the
    order in which it saw them come. Where a number lies in a message decides in which order it is summed over three
    ranks or more: a run that was resumed would end in other bits than one that never was.
    """
    return config.compile != "none" or isinstance(machine.fabric.strategy, DDPStrategy)


def warm_up(trainer: Trainer) -> None:
    """Work off blank images in the shapes of an epoch, and forget what came of it. All ranks take part.

    An epoch has two shapes, that of its last window and that of all others. A batch size that comes as the second makes
    PyTorch compile once more, for any size. With mixup and cutmix together images come in two types, of which this
    meets one.
    """
    samples, batch_size = trainer.order.samples, trainer.config.training.batch_size
    started = time.monotonic()
    statistics = [buffer.clone() for buffer in trainer.module.buffers()]
    for length in dict.fromkeys([min(batch_size, samples), samples % batch_size or batch_size]):
        window = Window(epoch=0, indices=tuple(range(length)), end=0)
        accumulate_gradients(trainer, window, _blank_batches(trainer, window))
    trainer.optimizer.zero_grad()
    for buffer, before in zip(trainer.module.buffers(), statistics, strict=True):
        buffer.copy_(before)
    if trainer.config.hardware.compile != "none" and trainer.machine.is_first:
        logger.info("compiled in %.0f s", time.monotonic() - started)


def _blank_batches(trainer: Trainer, window: Window) -> Iterator[Batch]:
    config, machine = trainer.config, trainer.machine
    rank, world_size = machine.fabric.global_rank, machine.world_size
    for draws in trainer.order.micro_batches(window, config.training.accumulate, rank, world_size):
        count, size = len(draws), config.image.size
        yield Batch(
            images=torch.zeros(count, 3, size, size, dtype=torch.uint8),
            labels=torch.zeros(count, dtype=torch.int64),
            weights=torch.ones(count),
        )

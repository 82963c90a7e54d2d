"""Everything that one rank trains with."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from slipway.contract import Signature
from train.board import Board
from train.checkpoint import Progress
from train.config import Config
from train.dataset import Dataset
from train.display import Display
from train.ema import Average
from train.exposition import Exposition
from train.hardware import Machine
from train.layers import Pulse
from train.meter import Meter
from train.order import Order
from train.preemption import StopRequest
from train.runs import Run
from train.saver import Saver


@dataclass(kw_only=True)
class Trainer:
    """Everything one rank works with. `module` is the plain model, `model` the one wrapped for its strategy.

    pulse: where layers are to be watched (`training.log_layers_every`).
    """

    config: Config
    run: Run
    dataset: Dataset
    machine: Machine
    signature: Signature
    order: Order
    module: nn.Module
    model: Any
    optimizer: Any
    ema: Average | None
    progress: Progress
    saver: Saver
    stop: StopRequest
    meter: Meter
    pulse: Pulse | None

    @property
    def micro_batch(self) -> int:
        """Images that one rank takes at a time, also where it validates: more may not find room."""
        return self.config.training.micro_batch(self.machine.fabric.world_size)


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """Where progress is shown and logged. All but `show` are there on the first rank only."""

    show: Display
    board: Board | None
    exposition: Exposition | None = None
    profiler: torch.profiler.profile | None = None

"""Lightning Fabric, set up so that what was asked for is what runs."""

import logging
import os
from dataclasses import dataclass

import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision, Precision

from slipway.errors import SlipwayError
from train.config import HardwareConfig, TrainingConfig


class HardwareError(SlipwayError):
    """The machine or the launcher does not give what the configuration asks for."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The processes that train together, as one of them sees it."""

    fabric: Fabric
    precision: Precision

    @property
    def device(self) -> torch.device:
        return self.fabric.device

    def total(self, values: torch.Tensor) -> torch.Tensor:
        """Sum over all ranks, the same on each of them."""
        summed = self.fabric.all_reduce(values, reduce_op="sum")
        assert isinstance(summed, torch.Tensor)
        return summed


def launch(hardware: HardwareConfig, training: TrainingConfig) -> Machine:
    """Start the processes, or join those that torchrun started.

    Raises:
        HardwareError: no CUDA device where one is asked for, or a world size other than the launcher's.
    """
    if hardware.accelerator == "cuda" and not torch.cuda.is_available():
        raise HardwareError("hardware.accelerator is cuda, but torch finds no CUDA device here")
    device = "cuda" if hardware.accelerator != "cpu" and torch.cuda.is_available() else "cpu"
    # Under torchrun `devices="auto"` silently gives N independent trainings on CPU: count ourselves.
    world_size = int(os.environ.get("WORLD_SIZE", hardware.devices))
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", hardware.devices))
    _require_divisible(training, world_size)
    if hardware.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)  # noqa: FBT003 - its only parameter
    precision = _precision(training.precision, device)
    logging.getLogger("lightning.fabric").setLevel(logging.WARNING)
    fabric = Fabric(
        accelerator=device,
        devices=local_size,
        num_nodes=world_size // local_size,
        strategy="ddp" if world_size > 1 else "auto",
        plugins=[precision],
    )
    fabric.launch()
    if fabric.world_size != world_size:
        raise HardwareError(
            f"the launcher started {world_size} processes, but this one sees a world of {fabric.world_size}: "
            "they would train independently of each other"
        )
    return Machine(fabric=fabric, precision=precision)


def _precision(name: str, device: str) -> Precision:
    """The plugin itself, because by name Fabric turns 16-mixed on a CPU into bfloat16 without a scaler."""
    if name == "16-mixed":
        return MixedPrecision("16-mixed", device, scaler=torch.amp.GradScaler(device))
    return MixedPrecision("bf16-mixed", device) if name == "bf16-mixed" else Precision()


def _require_divisible(training: TrainingConfig, world_size: int) -> None:
    parts = training.accumulate * world_size
    if training.batch_size % parts:
        raise HardwareError(
            f"training.batch_size {training.batch_size} does not divide into {world_size} ranks x "
            f"{training.accumulate} micro-batches"
        )

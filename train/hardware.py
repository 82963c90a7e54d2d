"""Lightning Fabric, set up so that what was asked for is what runs."""

import logging
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision, Precision
from lightning.fabric.strategies.model_parallel import ModelParallelStrategy
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from slipway.errors import SlipwayError
from train.blocks import blocks_of
from train.config import HardwareConfig, TrainingConfig

Verdict = TypeVar("Verdict")


class HardwareError(SlipwayError):
    """The machine or the launcher does not give what the configuration asks for."""


class VerdictError(SlipwayError):
    """The first rank failed at what it decides for all, as it says itself in more words."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The processes that train together, as one of them sees it.

    ranks_here: how many of them share this machine. group: what they decide and write through; None is the default one.
    """

    fabric: Fabric
    precision: Precision
    ranks_here: int = 1
    group: ProcessGroup | None = None

    @property
    def device(self) -> torch.device:
        return self.fabric.device

    @property
    def world_size(self) -> int:
        return self.fabric.world_size

    @property
    def is_first(self) -> bool:
        """Whether this rank speaks, writes and decides for all."""
        return self.fabric.is_global_zero

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The loss scaler, in 16-mixed."""
        return getattr(self.precision, "scaler", None)

    def decide(self, verdict: Callable[[], Verdict]) -> Verdict:
        """The first rank's verdict, on every rank: what is read from disk may look different to each of them.

        Only the first one asks for it: a file that it writes is never read half written by another. What it raises
        ends the others with VerdictError; they would wait for it otherwise.
        """
        if self.world_size == 1:
            return verdict()
        found: list[Any] = [None, ""]
        failure = None
        if self.is_first:
            try:
                found[0] = verdict()
            except Exception as error:  # noqa: BLE001 - whatever it is, the others must not wait
                failure = error
                found[1] = str(error) if isinstance(error, SlipwayError | OSError) else repr(error)
        torch.distributed.broadcast_object_list(found, src=0, group=self.group)
        if failure:
            raise failure
        if found[1]:
            raise VerdictError(f"rank 0: {found[1]}")
        return found[0]

    def everyones(self, words: str) -> list[str]:
        """What each rank has to say, in their order, on every rank."""
        said = [words] * self.world_size
        if self.world_size > 1:
            torch.distributed.all_gather_object(said, words, group=self.group)
        return said

    def first_of(self, words: str) -> str:
        """What the first of the ranks that have something to say says, with its number, on every rank."""
        rank, first = next((rank, said) for rank, said in enumerate(self.everyones(words)) if said)
        return f"rank {rank}: {first}"

    def apart(self) -> "Machine":
        """The same processes with a group of their own, for what a thread says while training talks in the other."""
        if self.world_size == 1:
            return self
        group = torch.distributed.new_group(backend="gloo")
        assert isinstance(group, ProcessGroup)  # it is one of all ranks, so of this one
        return replace(self, group=group)

    def share_buffers(self, module: nn.Module) -> None:
        """Give every rank the first one's batch statistics. DDP does so before each step, FSDP2 never."""
        if self.world_size > 1:
            for buffer in module.buffers():
                torch.distributed.broadcast(buffer, src=0)

    def leave(self) -> None:
        """Wait for the others, then leave the group: a rank that vanishes while another still talks aborts it."""
        if self.world_size > 1:
            self.fabric.barrier()
            torch.distributed.destroy_process_group()

    def total(self, values: torch.Tensor) -> torch.Tensor:
        """Sum over all ranks, the same on each of them."""
        summed = self.fabric.all_reduce(values, reduce_op="sum")
        assert isinstance(summed, torch.Tensor)
        return summed

    def largest(self, value: float) -> float:
        """Over all ranks, the same on each of them."""
        if self.world_size == 1:
            return float(value)
        most = self.fabric.all_reduce(torch.tensor(float(value), device=self.device), reduce_op="max")
        assert isinstance(most, torch.Tensor)
        return float(most)


def launch(hardware: HardwareConfig, training: TrainingConfig) -> Machine:
    """Start the processes, or join those that torchrun started.

    Raises:
        HardwareError: no CUDA device where one is asked for, or a world size other than the launcher's.
    """
    if hardware.accelerator == "cuda" and not torch.cuda.is_available():
        raise HardwareError("hardware.accelerator is cuda, but torch finds no CUDA device here")
    device = "cuda" if hardware.accelerator != "cpu" and torch.cuda.is_available() else "cpu"
    world_size, local_size = _launched(hardware.devices)
    require_divisible(hardware, training, world_size)
    if hardware.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)  # noqa: FBT003 - its only parameter
    precision = precision_of(effective_precision(training.precision, device), device)
    logging.getLogger("lightning.fabric").setLevel(logging.WARNING)
    with warnings.catch_warnings():
        # Where a scheduler is installed Lightning advises to use it, whatever this training is for.
        warnings.filterwarnings("ignore", "The `srun` command is available")
        fabric = Fabric(
            accelerator=device,
            devices=local_size,
            num_nodes=world_size // local_size,
            strategy=_strategy(hardware, world_size),
            plugins=[precision],
        )
    fabric.launch()
    if fabric.world_size != world_size:
        raise HardwareError(
            f"the launcher started {world_size} processes, but this one sees a world of {fabric.world_size}: "
            "they would train independently of each other"
        )
    return Machine(fabric=fabric, precision=precision, ranks_here=local_size)


def _launched(devices: int) -> tuple[int, int]:
    """How many processes train together, and how many of them on this machine.

    Under torchrun Fabric's `devices="auto"` silently gives N independent trainings on CPU, and srun's tasks would be
    as many trainings if only `hardware.devices` counted: so the launcher is asked.
    """
    if (
        "LOCAL_WORLD_SIZE" in os.environ
    ):  # torchrun; WORLD_SIZE alone is what Fabric tells the processes that it starts
        return int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
    # srun, a task a process; a step of one task is also what a shell on a node is.
    if (tasks := int(os.environ.get("SLURM_STEP_NUM_TASKS", "0"))) > 1:
        nodes = int(os.environ["SLURM_STEP_NUM_NODES"])
        if tasks % nodes:
            raise HardwareError(f"srun started {tasks} tasks on {nodes} nodes; every node needs as many")
        return tasks, tasks // nodes
    return devices, devices


def _strategy(hardware: HardwareConfig, world_size: int) -> Any:
    if hardware.strategy == "fsdp2":
        # Fabric's name for "the model is sharded by this function"; its own FSDP is the first, CUDA only.
        sharded = partial(_sharded, replicas=hardware.replicas)
        return ModelParallelStrategy(sharded, data_parallel_size=world_size, tensor_parallel_size=1)
    return "ddp" if world_size > 1 else "auto"


def _sharded(module: nn.Module, mesh: DeviceMesh, *, replicas: int) -> nn.Module:
    data_parallel = mesh["data_parallel"]
    if replicas > 1:
        data_parallel = mesh_of(mesh.device_type, data_parallel.size(), replicas)
    return shard(module, data_parallel)


def mesh_of(device: str, ranks: int, replicas: int) -> DeviceMesh:
    """All ranks in one row; with more than one replica, a row for each of them."""
    if replicas == 1:
        return init_device_mesh(device, (ranks,))
    return init_device_mesh(device, (replicas, ranks // replicas), mesh_dim_names=("replicate", "shard"))


def shard(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Shard each block by itself, so that only one at a time is whole in memory, then what is left; in place."""
    for block in blocks_of(module):
        fully_shard(block, mesh=mesh)
    fully_shard(module, mesh=mesh)
    return module


def effective_precision(asked: str, device: str) -> str:
    """What `auto` means on this device; anything else is taken at its word."""
    if asked != "auto":
        return asked
    if device == "cuda":
        native = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        native = torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()  # noqa: SLF001
    return "bf16-mixed" if native else "32-true"


def precision_of(name: str, device: str) -> Precision:
    """The plugin itself, because by name Fabric turns 16-mixed on a CPU into bfloat16 without a scaler."""
    if name == "16-mixed":
        return MixedPrecision("16-mixed", device, scaler=torch.amp.GradScaler(device))
    return MixedPrecision("bf16-mixed", device) if name == "bf16-mixed" else Precision()


def require_divisible(hardware: HardwareConfig, training: TrainingConfig, world_size: int) -> None:
    if world_size % hardware.replicas:
        raise HardwareError(
            f"{world_size} processes do not divide into hardware.replicas {hardware.replicas}"
        )
    parts = training.accumulate * world_size
    if training.batch_size % parts:
        raise HardwareError(
            f"training.batch_size {training.batch_size} does not divide into {world_size} ranks x "
            f"{training.accumulate} micro-batches"
        )

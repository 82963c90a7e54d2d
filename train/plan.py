"""What a step of training takes, said before anybody pays for a GPU: memory of each rank, and what ranks send.

The figures are those of a rehearsal (train/rehearsal.py); here they become a table, and words about what to change. Of
the data set they depend on nothing but the number of classes.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from slipway.errors import UsageError
from train.config import Config
from train.hardware import effective_precision, require_divisible
from train.meter import MEGABYTE
from train.rehearsal import IN_PASSING, Phase, Rehearsal, rehearse

# How much of the whole each of n ranks sends, where they stand in a ring (arxiv.org/abs/1802.05799, section 3).
SENT: Mapping[str, Callable[[int], float]] = {
    "all-reduce": lambda n: 2 * (n - 1) / n,
    "all-gather": lambda n: (n - 1) / n,
    "reduce-scatter": lambda n: (n - 1) / n,
    "broadcast": lambda _: 1.0,
}
FOR_WEIGHTS = (
    "parameters",
    "gradients",
    "optimiser state",
    "moving average",
    "buckets of DDP",
    "gathered parameters",
    "buffers",
)
FOR_IMAGES = ("images and labels", "activations", IN_PASSING)
PHASES: Mapping[Phase, str] = {
    "forward": "the forward pass",
    "backward": "the backward pass",
    "optimiser": "the optimiser's step",
    "validation": "validation",
}
NAMES = {"weights": "the weights and what is kept for each of them"}
GIGABYTE = 1024 * MEGABYTE
NOT_COUNTED = (
    "not counted: what CUDA, cuDNN, NCCL and torch.compile take for themselves, and memory that lies in pieces too "
    "small to be used; leave room for them"
)


def plan(config: Config, classes: int) -> list[str]:
    """Lines about one of `hardware.devices` ranks, which are here those of all machines together.

    Raises HardwareError for a batch, or replicas, that do not divide, and UsageError for a model that cannot be built.
    """
    if classes < 1:
        raise UsageError(f"--classes is {classes}; must be at least 1")
    hardware, ranks = config.hardware, config.hardware.devices
    require_divisible(hardware, config.training, ranks)
    on_gpus = hardware.accelerator == "cuda" or (hardware.accelerator == "auto" and torch.cuda.is_available())
    device = "cuda" if on_gpus else "cpu"
    precision: Any = _precision(config.training.precision, device)
    config = replace(config, training=replace(config.training, precision=precision))
    found = rehearse(config, classes, ranks=ranks, foreach=on_gpus)
    head = f"{config.model.name}, {classes:,} classes, {config.image.size} pixels, {precision} on {device}"
    parts = [[head, _share(config)], _table(found), _sent(found), [_advice(config, found), NOT_COUNTED]]
    return [line for part in parts for line in ["", *part]][1:]


def _precision(asked: str, device: str) -> str:
    """What `auto` means there. Of GPUs that are not here it is assumed that they are no older than Ampere."""
    if asked == "auto" and device == "cuda" and not torch.cuda.is_available():
        return "bf16-mixed"
    return effective_precision(asked, device)


def _share(config: Config) -> str:
    training, ranks = config.training, config.hardware.devices
    strategy = "fsdp2" if config.hardware.strategy == "fsdp2" else "ddp"
    who = f"one of {ranks} ranks ({strategy})" if ranks > 1 else "one rank"
    return f"{who}, {training.accumulate} x {training.micro_batch(ranks)} images a step"


def _table(found: Rehearsal) -> Iterator[str]:
    yield _row("MB at the worst moment of", *found.held)
    for part in FOR_WEIGHTS + FOR_IMAGES:
        sizes = [held.get(part, 0) for held in found.held.values()]
        if any(sizes):
            yield _row(part, *map(_megabytes, sizes))
    yield _row("together", *(_megabytes(_total(held)) for held in found.held.values()))


def _sent(found: Rehearsal) -> Iterator[str]:
    if not found.messages:
        yield "nothing is sent"
        return
    yield _row("MB that travel in a step", "from a rank", "of")
    for (name, ranks), whole in found.messages.items():
        yield _row(f"{name} among {ranks}", _megabytes(SENT[name](ranks) * whole), _megabytes(whole))


def _advice(config: Config, found: Rehearsal) -> str:
    phase = max(found.held, key=lambda each: _total(found.held[each]))
    held = found.held[phase]
    shares = {part: held.get(part, 0) for part in FOR_IMAGES}
    shares["weights"] = _total(held) - sum(shares.values())
    most = max(shares, key=lambda each: shares[each])
    total, share = _total(held) / GIGABYTE, shares[most] / _total(held)
    return (
        f"most is taken in {PHASES[phase]}: {total:.2f} GB, {share:.0%} of it for {NAMES.get(most, most)}; "
        f"{_remedy(config, phase, most)}"
    )


def _remedy(config: Config, phase: Phase, most: str) -> str:
    hardware, training = config.hardware, config.training
    if most == "weights" or phase == "optimiser":
        if hardware.strategy == "fsdp2":
            return "the more ranks (hardware.devices), the smaller each one's share"
        return "with hardware.strategy fsdp2 and n ranks each of them holds an nth of that"
    if phase == "validation":
        return (
            "each rank validates as many images at a time as a micro-batch has, in float32, whatever it trains with; "
            f"training.accumulate {2 * training.accumulate} halves them"
        )
    ways = [f"training.accumulate {2 * training.accumulate} halves them"]
    if hardware.activation_checkpointing == "none":
        ways.append("hardware.activation_checkpointing block computes them again instead")
    if training.precision == "32-true":
        ways.append("training.precision bf16-mixed makes them smaller")
    return ", ".join(ways)


def _row(name: str, *values: str) -> str:
    return f"{name:25}" + "".join(f"{value:>12}" for value in values)


def _megabytes(size: float) -> str:
    return f"{size / MEGABYTE:,.1f}"


def _total(held: Mapping[str, int]) -> int:
    return sum(held.values())

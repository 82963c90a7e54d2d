"""Optimiser and learning-rate schedule."""

import math

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from train.config import OptimizerConfig
from train.parameters import learning_groups


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """An optimiser whose moments are there already, and 0.

    Raises UsageError for a pattern in `lr_scales` that matches no parameter.
    """
    groups = learning_groups(model, config)
    optimizer: torch.optim.Optimizer
    if config.name == "adamw":
        optimizer = torch.optim.AdamW(groups, lr=config.lr)
    else:
        optimizer = torch.optim.SGD(groups, lr=config.lr, momentum=0.9, nesterov=True)
    _start_from_zero(model, optimizer)
    return optimizer


def _start_from_zero(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Give an optimiser the state that its first step would.

    Whoever asks for it before that makes PyTorch take a step of rate 0, which counts, and has weights decay into SGD's
    momentum: a run that is saved before its first step would differ from one that is not.
    """
    get_optimizer_state_dict(model, optimizer)
    for moments in optimizer.state.values():
        for value in moments.values():
            value.zero_()


def learning_rate(step: int, steps: int, config: OptimizerConfig) -> float:
    """The rate of optimiser step `step` (0-based) of `steps`: linear warm-up, then a cosine to zero.

    A pure function of the step: there is no schedule state to save, and none to lose.
    """
    warmup = round(config.warmup * steps)
    if step < warmup:
        return config.lr * (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return config.lr * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate * group["lr_scale"]

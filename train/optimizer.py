"""Optimiser and learning-rate schedule."""

import math

import torch
from torch import nn

from train.config import OptimizerConfig
from train.parameters import learning_groups


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """Raises UsageError for a pattern in `lr_scales` that matches no parameter."""
    groups = learning_groups(model, config)
    if config.name == "adamw":
        return torch.optim.AdamW(groups, lr=config.lr)
    return torch.optim.SGD(groups, lr=config.lr, momentum=0.9, nesterov=True)


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

"""A moving average of the weights, which often generalises better than the last step (arxiv.org/abs/1803.05407)."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


class Average:
    """value = decay * value + (1 - decay) * weight, after every step the optimiser took.

    values: by the module's own names; batch statistics included, counters copied.
    """

    def __init__(self, module: nn.Module, decay: float) -> None:
        self.decay = decay
        self.values = {name: value.detach().clone() for name, value in module.state_dict().items()}

    @torch.no_grad()
    def update(self, module: nn.Module) -> None:
        for name, weight in module.state_dict().items():
            if weight.is_floating_point():
                self.values[name].lerp_(weight, 1 - self.decay)
            else:
                self.values[name].copy_(weight)

    @contextmanager
    def applied_to(self, module: nn.Module) -> Iterator[None]:
        """Inside, the module has the averaged weights; afterwards its own again."""
        own = {name: value.detach().clone() for name, value in module.state_dict().items()}
        _fill(module, self.values)
        try:
            yield
        finally:
            _fill(module, own)


@torch.no_grad()
def _fill(module: nn.Module, values: dict[str, torch.Tensor]) -> None:
    for name, weight in module.state_dict().items():
        weight.copy_(values[name])

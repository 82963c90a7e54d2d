"""Which layers look ill: those that no gradient reaches, and those whose gradient is far larger than the others'.

A layer is a module with parameters of its own. Activations are not looked at: where a ReLU lets nothing through, no
gradient reaches the layer in front of it either.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from statistics import median

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from train.hardware import Machine

# A layer's gradient this much larger than the median layer's is worth a look.
EXPLODING = 1000.0
# As many names as a sentence can bear.
MOST_NAMES = 5


class Pulse:
    """Whether a gradient has reached each layer that is to learn, in `window` steps or more of this process.

    Where a step reaches only some layers, as with stochastic depth, one look would take the others for dead.
    """

    def __init__(self, module: nn.Module, window: int, device: torch.device) -> None:
        self._module, self._window = module, window
        learning = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
        self._layers = {name: index for index, name in enumerate(dict.fromkeys(map(_layer_of, learning)))}
        self._sums = torch.zeros(len(self._layers), device=device)
        self._steps = 0
        self._named: set[str] = set()

    def observe(self) -> None:
        """Add up what the gradients of a step amount to; it stays on the device."""
        self._steps += 1
        for name, parameter in self._module.named_parameters():
            if parameter.grad is not None:
                gradient = parameter.grad
                here = gradient.to_local() if isinstance(gradient, DTensor) else gradient
                self._sums[self._layers[_layer_of(name)]] += torch.linalg.vector_norm(here)

    def take_dead(self, machine: Machine) -> str:
        """A sentence about the layers that no gradient has reached, each of them once; empty where there is none.

        Reads the device, and all ranks take part.
        """
        if self._steps < self._window:
            return ""
        sums = machine.total(self._sums).tolist()
        dead = [name for name, index in self._layers.items() if sums[index] == 0 and name not in self._named]
        steps, self._steps = self._steps, 0
        self._sums.zero_()
        self._named.update(dead)
        return f"in {steps} steps no gradient has reached {_listed(dead)}" if dead else ""


def pulse_of(module: nn.Module, window: int | None, device: torch.device) -> Pulse | None:
    """None where layers are not to be watched."""
    return None if window is None else Pulse(module, window, device)


def layer_norms(module: nn.Module) -> dict[str, float]:
    """Norm of the gradient of every layer that learns, by the layer's name. Reads the device: not for every step."""
    squares: dict[str, float] = defaultdict(float)
    for name, parameter in module.named_parameters():
        if parameter.grad is not None:
            norm = torch.linalg.vector_norm(parameter.grad.detach().float())
            value = norm.full_tensor() if isinstance(norm, DTensor) else norm
            squares[_layer_of(name)] += float(value) ** 2
    return {name: math.sqrt(square) for name, square in squares.items()}


def exploding(norms: dict[str, float]) -> str:
    """A sentence about the layers whose gradient is far larger than the others'; empty where there is none."""
    usual = median(norms.values()) if norms else 0.0
    found = [f"{name} ({norm:.3g})" for name, norm in norms.items() if norm > EXPLODING * usual > 0]
    return f"far above the gradient of most layers ({usual:.3g}) is that of {_listed(found)}" if found else ""


def _layer_of(parameter: str) -> str:
    return parameter.rpartition(".")[0]


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return ", ".join(names[:MOST_NAMES]) + more

import math

import pytest
import torch
from torch import nn

from train.config import HardwareConfig, TrainingConfig
from train.hardware import Machine, launch
from train.layers import Pulse, exploding, layer_norms

CPU = torch.device("cpu")


@pytest.fixture
def alone() -> Machine:
    return launch(HardwareConfig(accelerator="cpu"), TrainingConfig())


class Branches(nn.Module):
    """Two layers side by side; a forward goes through those that are asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(3, 4), nn.Linear(3, 4)
        self.head = nn.Sequential(nn.ReLU(), nn.Linear(4, 1))

    def forward(self, *names: str) -> torch.Tensor:
        total = torch.stack([self.get_submodule(name)(torch.ones(2, 3)) for name in names]).sum(dim=0)
        output: torch.Tensor = self.head(total)
        return output


def take_a_step(model: Branches, pulse: Pulse, *names: str) -> None:
    model.zero_grad()
    model(*names).sum().backward()
    pulse.observe()


def test_layer_without_gradient_for_a_whole_window_is_named_once(alone: Machine) -> None:
    model = Branches()
    pulse = Pulse(model, 2, CPU)
    for expected in ("in 2 steps no gradient has reached right", ""):
        for _ in range(2):
            take_a_step(model, pulse, "left")
        assert pulse.take_dead(alone) == expected


def test_layer_that_only_some_steps_reach_is_alive(alone: Machine) -> None:
    """Also where the window began in the middle, as after a restart: it is judged when it is whole."""
    model = Branches()
    pulse = Pulse(model, 2, CPU)
    take_a_step(model, pulse, "left")
    assert pulse.take_dead(alone) == ""
    take_a_step(model, pulse, "left", "right")
    assert pulse.take_dead(alone) == ""


def test_dead_activation_is_found_by_the_layer_in_front_of_it(alone: Machine) -> None:
    model = Branches()
    with torch.no_grad():
        for side in (model.left, model.right):
            side.bias.fill_(-1e6)  # nothing passes the ReLU any more
    pulse = Pulse(model, 1, CPU)
    take_a_step(model, pulse, "left", "right")
    assert pulse.take_dead(alone) == "in 1 steps no gradient has reached left, right"


def test_frozen_layers_are_not_dead(alone: Machine) -> None:
    model = Branches()
    model.right.requires_grad_(requires_grad=False)
    pulse = Pulse(model, 1, CPU)
    take_a_step(model, pulse, "left", "right")
    assert pulse.take_dead(alone) == ""


def test_only_so_many_layers_are_listed(alone: Machine) -> None:
    pulse = Pulse(nn.Sequential(*(nn.Linear(1, 1) for _ in range(9))), 1, CPU)
    pulse.observe()
    assert pulse.take_dead(alone).endswith("reached 0, 1, 2, 3, 4 and 4 more")


def test_far_too_large_gradient_is_said() -> None:
    module = nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    module.get_parameter("2.weight").grad = torch.full((2, 2), 1e5)
    norms = layer_norms(module)
    assert norms["0"] == pytest.approx(math.sqrt(6))
    assert exploding(norms) == "far above the gradient of most layers (2.45) is that of 2 (2e+05)"
    assert exploding({}) == ""

"""Everything is compiled before the first step, and nothing is learnt from that."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.train.conftest import MakeConfig
from tests.train.stepping import SILENT, data_for, trainer_for
from train.compilation import warm_up
from train.step import step

SAMPLES, BATCH = 21, 8  # the last window of an epoch has five


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.norm, self.linear = nn.BatchNorm2d(3), nn.Linear(3, 3)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.linear(self.norm(image.float()).mean(dim=(2, 3)))
        return logits


@pytest.mark.parametrize("accumulate", [1, 2])
def test_no_step_of_an_epoch_compiles_anything(
    make_config: MakeConfig, tmp_path: Path, accumulate: int
) -> None:
    torch.compiler.reset()  # it would know from the test before that sizes differ
    sizes: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., object]:
        sizes.append(len(inputs))
        return graph.forward

    config = make_config(
        tmp_path, training__batch_size=str(BATCH), training__accumulate=str(accumulate), image__size="8"
    )
    module = Small()
    module.compile(backend=backend)
    trainer = trainer_for(config, tmp_path, module, SAMPLES, "32-true")
    before = {name: value.clone() for name, value in module.state_dict().items()}
    warm_up(trainer)
    compiled = len(sizes)
    assert compiled >= 2
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert all(parameter.grad is None for parameter in module.parameters())
    images = torch.randint(0, 256, (SAMPLES, 3, 8, 8), dtype=torch.uint8)
    batches = iter(data_for(trainer.order, accumulate, images, torch.zeros(SAMPLES, dtype=torch.int64)))
    for window in trainer.order.windows(0):
        if window.epoch == 1:
            break
        step(trainer, window, batches, SILENT)
    assert len(sizes) == compiled

import pytest
import torch
from torch import nn

from slipway.errors import UsageError
from train.config import ModelConfig, OptimizerConfig
from train.model import build_model
from train.optimizer import build_optimizer, set_learning_rate
from train.parameters import freeze, learning_groups


@pytest.fixture
def model() -> nn.Module:
    return build_model(ModelConfig(name="resnet18"), 3, 32, (0.5,) * 3, (0.5,) * 3)


def test_frozen_parameters_stay_out_of_the_optimiser(model: nn.Module) -> None:
    freeze(model, ("backbone.conv1.*", "backbone.layer1.*"))
    learning = {id(p) for group in learning_groups(model, OptimizerConfig()) for p in group["params"]}  # type: ignore[attr-defined]
    for name, parameter in model.named_parameters():
        frozen = name.startswith(("backbone.conv1.", "backbone.layer1."))
        assert (id(parameter) in learning) is not frozen


def test_batch_statistics_of_frozen_parts_rest(model: nn.Module) -> None:
    freeze(model, ("backbone.layer1.*",))
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model(torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8))
    moved = {name for name, buffer in model.named_buffers() if not torch.equal(buffer, before[name])}
    assert not any(name.startswith("backbone.layer1.") for name in moved)
    assert "backbone.layer2.0.bn1.running_mean" in moved


def test_misspelt_pattern_stops_training(model: nn.Module) -> None:
    with pytest.raises(UsageError, match=r"backbone\.layer9\.\* matches no parameter that learns; there is"):
        freeze(model, ("backbone.layer9.*",))
    with pytest.raises(UsageError, match=r"optimizer\.lr_scales: head\.\* matches no parameter"):
        learning_groups(model, OptimizerConfig(lr_scales=("head.*=10",)))


def test_nothing_left_to_learn_is_refused(model: nn.Module) -> None:
    with pytest.raises(UsageError, match="leaves nothing to learn"):
        freeze(model, ("*",))


def test_rates_are_scaled_by_the_last_pattern_that_matches(model: nn.Module) -> None:
    config = OptimizerConfig(lr_scales=("backbone.*=0.1", "backbone.fc.*=10"))
    optimizer = build_optimizer(model, config)
    set_learning_rate(optimizer, 0.01)
    rates = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    assert rates[id(model.get_parameter("backbone.fc.bias"))] == pytest.approx(0.1)
    assert rates[id(model.get_parameter("backbone.layer4.1.conv2.weight"))] == pytest.approx(0.001)

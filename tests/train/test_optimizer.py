import pytest
import torch

from train.config import ModelConfig, OptimizerConfig
from train.model import build_model
from train.optimizer import build_optimizer, learning_rate, set_learning_rate


def test_rate_rises_falls_and_ends_near_zero() -> None:
    config = OptimizerConfig(lr=1.0, warmup=0.1)
    rates = [learning_rate(step, 100, config) for step in range(100)]
    assert rates[:10] == [pytest.approx((step + 1) / 10) for step in range(10)]
    assert max(rates) == 1.0
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert 0 < rates[-1] < 0.001


def test_rate_never_rises_again_behind_the_end() -> None:
    """Case B19: a cosine without a clamp climbs back."""
    config = OptimizerConfig(lr=1.0)
    assert learning_rate(150, 100, config) == pytest.approx(0.0)


def test_without_warm_up_the_first_step_has_the_full_rate() -> None:
    assert learning_rate(0, 10, OptimizerConfig(lr=0.5, warmup=0.0)) == 0.5


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_norms_and_biases_do_not_decay(name: str) -> None:
    model = build_model(ModelConfig(name="resnet18"), 3, 32, (0.5,) * 3, (0.5,) * 3)
    optimizer = build_optimizer(model, OptimizerConfig(name=name, weight_decay=0.3))  # type: ignore[arg-type]
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert len(decay) == len(list(model.parameters()))
    for parameter in model.parameters():
        assert decay[id(parameter)] == (0.3 if parameter.ndim > 1 else 0.0)


def test_set_rate_reaches_every_group() -> None:
    groups = [{"params": [torch.zeros(1)], "lr_scale": 1.0}, {"params": [torch.zeros(2)], "lr_scale": 0.5}]
    optimizer = torch.optim.SGD(groups, lr=1.0)
    set_learning_rate(optimizer, 0.25)
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.125]

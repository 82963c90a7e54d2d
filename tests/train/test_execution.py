from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn

from slipway.config import ConfigError
from tests.train.conftest import MakeConfig, MakeFolder
from train.config import HardwareConfig, ModelConfig
from train.execution import eager, prepare
from train.fit import fit
from train.folder import read_folder
from train.model import ImageClassifier, build_model
from train.runs import Run, read_metrics

IMAGES = torch.randint(0, 256, (4, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def model_for(config: HardwareConfig, name: str = "resnet18") -> ImageClassifier:
    torch.manual_seed(0)
    model = build_model(ModelConfig(name=name), 3, 32, (0.5,) * 3, (0.5,) * 3)
    prepare(model, config)
    return model


def trained_a_step(config: HardwareConfig, name: str = "resnet18") -> tuple[ImageClassifier, int]:
    """A model with gradients, and the bytes that autograd kept for them."""
    model = model_for(config, name)
    torch.manual_seed(1)  # for dropout
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with hooks if config.activation_checkpointing != "selective" else nullcontext():
        loss = model(IMAGES).square().mean()
    loss.backward()
    return model, sum(kept.values())


@pytest.mark.parametrize("network", ["resnet18", "efficientnet_b0"])
@pytest.mark.parametrize("which", ["block", "selective"])
def test_recomputed_activations_change_neither_gradients_nor_batch_statistics(
    which: str, network: str
) -> None:
    """Naive checkpointing runs the forward twice, and moves the running statistics twice.

    An EfficientNet applies activations in place to the very results of convolutions.
    """
    plain, _ = trained_a_step(HardwareConfig(), network)
    model, _ = trained_a_step(HardwareConfig(activation_checkpointing=which), network)  # type: ignore[arg-type]
    assert list(model.state_dict()) == list(plain.state_dict())
    for name, value in plain.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name
    for name, parameter in plain.named_parameters():
        assert torch.equal(model.get_parameter(name).grad, parameter.grad), name  # type: ignore[arg-type]


def test_recomputing_blocks_keeps_less() -> None:
    _, everything = trained_a_step(HardwareConfig())
    _, blocks = trained_a_step(HardwareConfig(activation_checkpointing="block"))
    assert blocks < 0.7 * everything


@pytest.mark.parametrize("which", ["block", "whole"])
def test_compiling_leaves_names_alone(which: str) -> None:  # B07
    model = model_for(HardwareConfig(compile=which))  # type: ignore[arg-type]
    assert list(model.state_dict()) == list(model_for(HardwareConfig()).state_dict())


def test_compiled_model_runs_eagerly_where_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[int] = []

    def backend(graph: torch.fx.GraphModule, _inputs: list[torch.Tensor]) -> Callable[..., object]:
        compiled.append(1)
        return graph.forward

    model = nn.Linear(2, 2)
    model.compile(backend=backend)
    with eager(), torch.no_grad():
        model(torch.zeros(1, 2))
    assert not compiled
    model(torch.zeros(1, 2))
    assert compiled


def test_compiling_and_checkpointing_at_once_are_refused(make_config: MakeConfig, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"hardware\.activation_checkpointing does not go together"):
        make_config(tmp_path, hardware__compile="block", hardware__activation_checkpointing="block")


# With SGD: Adam divides by the square root of small numbers, and turns another order of summation into much more.
@pytest.mark.parametrize(
    ("tolerance", "options"),
    [
        (0.0, {"hardware__activation_checkpointing": "selective"}),
        (2e-3, {"hardware__channels_last": "true"}),
        (0.05, {"hardware__channels_last": "true", "training__precision": "bf16-mixed"}),
    ],
)
def test_training_gives_the_losses_of_plain_training(
    make_folder: MakeFolder, make_config: MakeConfig, tolerance: float, options: dict[str, str]
) -> None:
    root = make_folder()
    gentle = {"optimizer__name": "sgd", "optimizer__lr": "0.01"}
    runs = [
        fit(
            make_config(root, run__directory=str(root.parent / name), **gentle, **chosen),
            read_folder(make_config(root).data),
        )
        for name, chosen in (("plain", {}), ("other", options))
    ]
    plain, other = ([line["loss"] for line in read_metrics(Run(directory=run, inputs=""))] for run in runs)
    assert other == pytest.approx(plain, rel=tolerance, abs=0)

"""What is right in training and wrong in a server is refused before anything is exported. Case C02."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from train.model import ImageClassifier, TrainingModeError
from train.servable import ExportError, exporting, lowered, require_exportable


class Network(nn.Module):
    """Five logits a row, from the mean of each third of an image."""

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return functional.pad(image.mean(dim=(2, 3)), (0, 2), value=1.0)


class LiveDropout(Network):
    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return functional.dropout(super().forward(image), 0.5, training=True)


class StaysInTraining(Network):
    def train(self, mode: bool = True) -> "StaysInTraining":  # noqa: FBT002
        return super().train(mode=True)


class NormalisedByTheBatch(Network):
    def forward(self, image: torch.Tensor) -> torch.Tensor:
        features = super().forward(image)
        return (features - features.mean(dim=0)) * 100


class OneRow(Network):
    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return super().forward(image).mean(dim=0, keepdim=True)


class FrozenBatch(Network):
    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return super().forward(image).reshape(2, 5)


def classifier(network: nn.Module) -> ImageClassifier:
    return ImageClassifier(network, (0.5,) * 3, (0.25,) * 3)


def test_sound_model_may_be_exported() -> None:
    require_exportable(classifier(Network()).eval(), 16)


@pytest.mark.parametrize(
    ("network", "error", "words"),
    [
        (LiveDropout(), ExportError, "differently when asked twice: dropout"),
        (StaysInTraining(), TrainingModeError, "backbone is in training mode"),
        (NormalisedByTheBatch(), ExportError, "depends on the other images of its batch"),
        (OneRow(), ExportError, r"logits of shape \[1, 5\] for a batch of 3 images"),
        (FrozenBatch(), ExportError, "fails on a batch of 3: shape '.2, 5.' is invalid"),
        (
            nn.Sequential(nn.BatchNorm2d(3, track_running_stats=False), Network()),
            ExportError,
            r"backbone\.0 has no running statistics",
        ),
    ],
)
def test_model_that_would_answer_wrongly_is_refused(
    network: nn.Module, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words), exporting(classifier(network), 16):
        pytest.fail("the model was let through")


def test_lowered_copy_computes_in_its_precision_and_answers_in_float32() -> None:
    torch.manual_seed(0)
    model = classifier(nn.Sequential(nn.Conv2d(3, 4, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten())).eval()
    low = lowered(model, torch.bfloat16)
    image = torch.randint(0, 256, (2, 3, 8, 8), dtype=torch.uint8)
    assert {parameter.dtype for parameter in low.parameters()} == {torch.bfloat16}
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert low(image).dtype == torch.float32
    assert torch.allclose(low(image), model(image), atol=0.05)
    assert not torch.equal(low(image), model(image))


def test_weight_beyond_the_range_of_a_precision_is_named() -> None:
    """Case C06."""
    model = classifier(nn.Sequential(nn.Conv2d(3, 4, 1), nn.Flatten())).eval()
    with torch.no_grad():
        model.backbone.get_parameter("0.weight")[0, 0] = -70000
    with pytest.raises(
        ExportError, match=r"backbone\.0\.weight holds 70000, and float16 ends at 65504: leave"
    ):
        lowered(model, torch.float16)
    lowered(model, torch.bfloat16)


def test_exporting_forces_inference_and_restores_every_modules_mode() -> None:
    model = classifier(nn.Sequential(nn.BatchNorm2d(3), nn.Dropout(), Network())).train()
    model.backbone.get_submodule("0").eval()
    before = [module.training for module in model.modules()]
    with exporting(model, 16):
        assert not any(module.training for module in model.modules())
        assert torch.is_inference_mode_enabled()
    assert [module.training for module in model.modules()] == before
    assert not torch.is_inference_mode_enabled()

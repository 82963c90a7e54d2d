import pytest
import torch
from torch import nn

from slipway.errors import SlipwayError, UsageError
from train.config import ModelConfig
from train.model import (
    ImageClassifier,
    TrainingModeError,
    build_model,
    inference,
    keep_resolution,
    require_eval,
)

MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.25, 0.3)


def build(name: str = "mobilenet_v3_small", stem: str = "small", size: int = 16) -> ImageClassifier:
    torch.manual_seed(0)
    return build_model(ModelConfig(name=name, stem=stem), 5, size, MEAN, STD)  # type: ignore[arg-type]


def test_normalisation_is_that_of_the_contract() -> None:
    image = torch.randint(0, 256, (2, 3, 8, 8), dtype=torch.uint8)
    expected = (image.double() / 255 - torch.tensor(MEAN).double().view(1, 3, 1, 1)) / torch.tensor(
        STD
    ).double().view(1, 3, 1, 1)
    assert torch.allclose(ImageClassifier(nn.Identity(), MEAN, STD)(image).double(), expected, atol=1e-6)


def test_normalisation_is_not_a_weight() -> None:
    assert not [name for name in build().state_dict() if "scale" in name.split(".")[:1] or name == "shift"]


def test_unknown_model_names_the_nearest() -> None:
    with pytest.raises(UsageError, match="did you mean resnet18"):
        build("resnet-18")


@pytest.mark.parametrize(
    "name", ["resnet18", "mobilenet_v3_small", "shufflenet_v2_x0_5", "squeezenet1_1", "regnet_y_400mf"]
)
def test_small_stem_keeps_the_resolution(name: str) -> None:
    model = build(name).eval()
    first = next(module for module in model.modules() if isinstance(module, nn.Conv2d))
    sizes: list[torch.Size] = []
    first.register_forward_hook(lambda _module, _inputs, output: sizes.append(output.shape[-2:]))
    with inference(model):
        logits = model(torch.zeros(2, 3, 16, 16, dtype=torch.uint8))
    assert sizes == [torch.Size((16, 16))]
    assert logits.shape == (2, 5)


@pytest.mark.parametrize(("name", "size"), [("googlenet", 32), ("inception_v3", 80), ("vit_b_32", 32)])
def test_families_with_peculiarities_train(name: str, size: int) -> None:
    logits = build(name, "standard", size).train()(torch.zeros(2, 3, size, size, dtype=torch.uint8))
    assert logits.shape == (2, 5)


@pytest.mark.parametrize(("name", "patch"), [("vit_b_32", 32), ("maxvit_t", 224)])
def test_size_that_a_model_cannot_take_is_refused_in_words(name: str, patch: int) -> None:
    with pytest.raises(UsageError, match=rf"image\.size is 48, but {name} takes only multiples of {patch}"):
        build(name, "standard", 48)


def test_small_stem_of_a_model_without_convolutions_is_refused() -> None:
    with pytest.raises(SlipwayError, match=r"use model\.stem standard"):
        keep_resolution(nn.Linear(2, 2), "linear")
    with pytest.raises(UsageError, match=r"vit_b_32 cuts images into patches; use model\.stem standard"):
        build("vit_b_32", "small", 32)


def test_inference_restores_every_submodules_own_mode() -> None:
    model = build().train()
    frozen = next(module for module in model.modules() if isinstance(module, nn.BatchNorm2d))
    frozen.eval()
    before = [module.training for module in model.modules()]
    with inference(model):
        assert not any(module.training for module in model.modules())
        assert torch.is_inference_mode_enabled()
    assert [module.training for module in model.modules()] == before
    assert not torch.is_inference_mode_enabled()


def test_model_in_training_mode_is_refused_by_name() -> None:
    """Case C02."""
    model = build().eval()
    require_eval(model)
    dropout = next(module for module in model.modules() if isinstance(module, nn.Dropout))
    dropout.train()
    with pytest.raises(TrainingModeError, match=r"backbone\.classifier\.\d+ is in training mode"):
        require_eval(model)


def test_one_image_alone_and_in_a_batch_give_the_same_answer() -> None:
    model = build()
    images = torch.randint(0, 256, (5, 3, 16, 16), dtype=torch.uint8)
    with inference(model):
        assert torch.allclose(model(images)[:1], model(images[:1]), atol=1e-5)

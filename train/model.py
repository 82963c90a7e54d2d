"""The model: a torchvision network that takes uint8 pixels and scales and normalises them itself."""

import difflib
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torchvision
from torch import nn
from torch.distributed.tensor import DTensor

from slipway.errors import SlipwayError, UsageError
from train.config import ModelConfig

# Torchvision's networks with auxiliary heads. Those make a tuple of what they return in training, so they are left out.
WITH_AUXILIARY_HEADS = ("googlenet", "inception_v3")


class ImageClassifier(nn.Module):
    """uint8 [batch, 3, size, size], RGB, 0..255 -> logits float32 [batch, classes].

    Normalisation is part of the model, so it cannot be forgotten, applied twice or in another order, neither in
    training nor by whoever serves the exported graph.
    """

    scale: torch.Tensor
    shift: torch.Tensor

    def __init__(self, backbone: nn.Module, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
        super().__init__()
        self.backbone = backbone
        deviation = torch.tensor(std, dtype=torch.float64).reshape(1, 3, 1, 1)
        average = torch.tensor(mean, dtype=torch.float64).reshape(1, 3, 1, 1)
        # (x / 255 - mean) / std as one multiplication and one addition. Not persistent: they are configuration.
        self.register_buffer("scale", (1 / (255 * deviation)).float(), persistent=False)
        self.register_buffer("shift", (-average / deviation).float(), persistent=False)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.backbone(image.float() * self.scale + self.shift)
        return logits.float()


def build_model(
    config: ModelConfig, classes: int, size: int, mean: tuple[float, ...], std: tuple[float, ...]
) -> ImageClassifier:
    """A freshly initialised classifier of images of size x size. Draws from torch's global generator: seed it first.

    Raises UsageError for a name that is not a torchvision classification model, or a size that it cannot take.
    """
    names = torchvision.models.list_models(module=torchvision.models)
    if config.name not in names:
        near = difflib.get_close_matches(config.name, names, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UsageError(f"model.name is {config.name!r}, which torchvision does not have{hint}")
    settings = {"num_classes": classes, **_peculiarities(config.name, size)}
    backbone = torchvision.models.get_model(config.name, weights=None, **settings)
    if config.dropout is not None:
        for module in backbone.modules():
            if isinstance(module, nn.Dropout):
                module.p = config.dropout
    if config.stem == "small":
        keep_resolution(backbone, config.name)
    return ImageClassifier(backbone, mean, std)


def _peculiarities(name: str, size: int) -> dict[str, int | bool | tuple[int, int]]:
    """What some of torchvision's families have to be told. Raises UsageError for a size that one cannot take."""
    if name in WITH_AUXILIARY_HEADS:
        # Nor draw from SciPy's generator, slowly.
        return {"aux_logits": False, "init_weights": False}
    if name.startswith("vit_"):
        patch = int(name.rsplit("_", 1)[1])
        if size % patch:
            raise UsageError(f"image.size is {size}, but {name} takes only multiples of {patch}")
        return {"image_size": size}
    if name.startswith("maxvit_"):
        if size % 224:
            raise UsageError(f"image.size is {size}, but {name} takes only multiples of 224")
        return {"input_size": (size, size)}
    return {}


def keep_resolution(backbone: nn.Module, name: str) -> None:
    """Give a network made for 224 pixels a stem for small images, in place.

    Its first convolution becomes 3x3 with stride 1, and the pooling behind it goes, as in the ResNet paper's
    CIFAR models (arxiv.org/abs/1512.03385, section 4.2).
    """
    if isinstance(backbone, torchvision.models.VisionTransformer):
        raise UsageError(f"model.stem small: {name} cuts images into patches; use model.stem standard")
    for path, module in backbone.named_modules():
        if isinstance(module, nn.Conv2d):
            stem = nn.Conv2d(3, module.out_channels, 3, stride=1, padding=1, bias=module.bias is not None)
            backbone.set_submodule(path, stem)
            break
    else:
        raise SlipwayError(f"model.stem small: {name} has no convolution to replace; use model.stem standard")
    if isinstance(getattr(backbone, "maxpool", None), nn.MaxPool2d):
        backbone.set_submodule("maxpool", nn.Identity())


class TrainingModeError(SlipwayError):
    """A model in training mode was about to be exported or served."""


@contextmanager
def inference(model: nn.Module) -> Iterator[None]:
    """eval() and inference_mode() inside, and every submodule's own mode restored afterwards."""
    modes = {module: module.training for module in model.modules()}
    # FSDP2 makes its buffers in the first forward, whichever that is; those made in inference mode could not
    # be trained with.
    sharded = any(isinstance(parameter, DTensor) for parameter in model.parameters())
    model.eval()
    try:
        with torch.no_grad() if sharded else torch.inference_mode():
            yield
    finally:
        for module, training in modes.items():
            module.training = training


def require_eval(model: nn.Module) -> None:
    """Raises TrainingModeError naming the first submodule that is in training mode."""
    for path, module in model.named_modules():
        if module.training:
            raise TrainingModeError(
                f"{path or type(model).__name__} is in training mode: dropout would be live and batch "
                "statistics used; call eval() on the whole model first"
            )

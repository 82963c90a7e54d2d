"""Start training from weights that exist already, instead of random ones."""

import logging
import os
from pathlib import Path

import torch
import torchvision
from safetensors.torch import load_file
from torch import nn

from slipway import bundle, sealed
from slipway.errors import SlipwayError, UsageError
from train import checkpoint
from train.checkpoint import Choice, Tensors
from train.config import ModelConfig
from train.model import WITH_AUXILIARY_HEADS

logger = logging.getLogger(__name__)


class WarmStartError(SlipwayError):
    """The weights to start from are not there, or do not fit the model."""


def start(module: nn.Module, config: ModelConfig) -> None:
    """Fill a new classifier with the weights that `config` names, if it names any, in place.

    They must fit, name by name and shape by shape, but for the last layer: with another class list that one is
    new, and stays as it was drawn.

    Raises:
        WarmStartError: there are no such weights, they cannot be had or loaded, or they do not fit.
        SealError: the checkpoint or bundle is damaged.
    """
    if config.start_from is not None:
        _fill(module, _sealed_weights(config.start_from), str(config.start_from))
    elif config.pretrained is not None:
        _fill(
            module, _torchvision_weights(config.name, config.pretrained), f"torchvision {config.pretrained}"
        )


def _sealed_weights(directory: Path) -> Tensors:
    kind = sealed.read_manifest(directory).kind
    if kind == checkpoint.KIND:
        return checkpoint.read_weights(Choice(directory=directory, weights="raw"))
    if kind == bundle.KIND and bundle.WEIGHTS in sealed.verify(directory, kind).files:
        return load_file(directory / bundle.WEIGHTS)
    raise WarmStartError(
        f"model.start_from {directory}: is a sealed {kind} without weights to start from; name a checkpoint "
        "(runs/<name>/checkpoints/step-…) or a bundle (bundles/<name>/<version>) exported by this version"
    )


def _torchvision_weights(model: str, name: str) -> Tensors:
    known = torchvision.models.get_model_weights(model)
    if name not in known.__members__:
        raise UsageError(f"model.pretrained is {name!r}; for {model} there is {', '.join(known.__members__)}")
    if model in WITH_AUXILIARY_HEADS:
        raise WarmStartError(
            f"model.pretrained {name}: torchvision's weights of {model} have auxiliary heads and expect pixels that it "
            "normalises otherwise, and Slipway trains it without either; leave model.pretrained out, or choose another "
            "model.name, such as resnet50"
        )
    weights = known[name]
    try:
        state = weights.get_state_dict(progress=False, check_hash=True, weights_only=True)
    except Exception as error:  # whatever a network, a download cut short, or a broken file leads to
        cache = Path(torch.hub.get_dir()) / "checkpoints" / os.path.basename(weights.url)  # noqa: PTH119 - a URL
        raise WarmStartError(f"model.pretrained {name}: {_what_to_do(cache, error)}") from error
    return {f"backbone.{key}": value for key, value in state.items()}


def _what_to_do(cache: Path, error: Exception) -> str:
    """cache: where the file is, if it was downloaded as a whole: now, or earlier."""
    if cache.exists():
        # By its kind, because PyTorch's words are a page, and advise to trust whatever is in there.
        return f"{cache} cannot be loaded ({type(error).__name__}); delete it, and it is downloaded again"
    return (
        f"could not be downloaded ({error}). Put the file at {cache}, or set model.start_from to a checkpoint or a "
        "bundle"
    )


def _fill(module: nn.Module, weights: Tensors, source: str) -> None:
    own = module.state_dict()
    fitting = {name: value for name, value in weights.items() if _fits(value, own.get(name))}
    head = list(own)[-1].rpartition(".")[0]
    new = [name for name in own if name not in fitting]
    unknown = [name for name in weights if name not in own]
    if odd := [name for name in [*unknown, *new] if name.rpartition(".")[0] != head]:
        problem = "is not in the model" if odd[0] in unknown else "is missing there, or has another shape"
        raise WarmStartError(
            f"{source}: do not fit this model: {odd[0]} {problem} ({len(odd)} such). Were they trained with another "
            "model.name or model.stem?"
        )
    module.load_state_dict({**own, **fitting})
    logger.info("starting from %s%s", source, f"; new: {', '.join(new)}" if new else "")


def _fits(value: torch.Tensor, own: torch.Tensor | None) -> bool:
    return own is not None and own.shape == value.shape

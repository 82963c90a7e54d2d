"""What is exported: a classifier with named answers, once all that would make it answer wrongly is ruled out."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.export import Dim, ExportedProgram

from slipway.contract import INPUT, LOGITS, PROBABILITIES
from slipway.errors import SlipwayError
from train.model import ImageClassifier, inference, require_eval

Pixels = npt.NDArray[np.uint8]

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)

# A runtime that works row by row differs by rounding only; a model that mixes rows differs in the first digits.
_SAME_ROW = 1e-3


class ExportError(SlipwayError):
    """The model cannot be exported as declared, or an exporter made something other than what was asked for."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """What every format is made from.

    classifier: in eval mode. onnx: the primary artefact, already written; some formats are converted from it.
    calibration: training images for quantisation, uint8 [n, 3, image_size, image_size]; empty where none asks.
    """

    classifier: ImageClassifier
    image_size: int
    max_batch: int
    onnx: Path
    calibration: Pixels


class Servable(nn.Module):
    """uint8 [batch, 3, size, size] -> logits and probabilities, float32 [batch, classes], by name."""

    def __init__(self, classifier: nn.Module) -> None:
        super().__init__()
        self.classifier = classifier

    def forward(self, image: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.classifier(image)
        return {LOGITS: logits, PROBABILITIES: logits.softmax(dim=1)}


def lowered(classifier: ImageClassifier, dtype: torch.dtype) -> ImageClassifier:
    """A copy whose network computes in `dtype`; normalisation before it, and logits behind it, stay in float32.

    Raises ExportError for a weight that is beyond the range of `dtype`: it would become an infinity.
    """
    for name, value in classifier.backbone.state_dict().items():
        if value.is_floating_point() and (largest := value.abs().amax()) > torch.finfo(dtype).max:
            raise ExportError(
                f"backbone.{name} holds {largest:g}, and {str(dtype).removeprefix('torch.')} ends at "
                f"{torch.finfo(dtype).max:g}: leave formats of this precision out of export.formats"
            )
    copied = copy.deepcopy(classifier)
    copied.backbone = _Lowered(copied.backbone, dtype)
    return copied


class _Lowered(nn.Module):
    def __init__(self, network: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.network, self.dtype = network.to(dtype), dtype

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        answer: torch.Tensor = self.network(image.to(self.dtype))
        return answer


@contextmanager
def exporting(classifier: ImageClassifier, image_size: int) -> Iterator[None]:
    """eval() and inference_mode() inside, every module's own mode afterwards, and only for a model fit to be exported.

    Raises TrainingModeError, ExportError: see `require_exportable`.
    """
    with inference(classifier):
        require_exportable(classifier, image_size)
        yield


def require_exportable(classifier: ImageClassifier, image_size: int) -> None:
    """Refuse what is right in training and wrong in a server, by looking at the modules and by asking the model.

    Raises:
        TrainingModeError: a module is, or stays, in training mode.
        ExportError: normalisation by the statistics of the batch, dropout or other randomness that eval() does not
            switch off, an answer that depends on the other images of the batch, or a batch size that is built in.
    """
    require_eval(classifier)
    for path, module in classifier.named_modules():
        if isinstance(module, _BATCH_NORMS) and module.running_mean is None:
            raise ExportError(
                f"{path} has no running statistics: it would normalise each image by whatever else is in its batch; "
                "build it with track_running_stats=True and train again"
            )
    noise = np.random.default_rng(0).integers(0, 256, (3, 3, image_size, image_size), dtype=np.uint8)
    images = torch.from_numpy(noise)
    with inference(classifier):
        together, again = _ask(classifier, images), _ask(classifier, images)
        alone = torch.cat([_ask(classifier, row) for row in images[:, None]])
    scale = 1 + together.abs().max()
    if not torch.allclose(together, again, rtol=0, atol=float(_SAME_ROW * scale)):
        raise ExportError(
            "the model answers the same images differently when asked twice: dropout, or other randomness, is live "
            "after eval(); use nn.Dropout, or pass training=self.training"
        )
    if not torch.allclose(together, alone, rtol=0, atol=float(_SAME_ROW * scale)):
        raise ExportError(
            "the answer for an image depends on the other images of its batch: something normalises or mixes over "
            "the batch after eval()"
        )


def _ask(classifier: ImageClassifier, images: torch.Tensor) -> torch.Tensor:
    try:
        logits = classifier(images)
    except (RuntimeError, ValueError, IndexError) as error:
        raise ExportError(f"the model fails on a batch of {len(images)}: {first_line(error)}") from error
    if logits.ndim != 2 or len(logits) != len(images):
        raise ExportError(
            f"the model gives logits of shape {list(logits.shape)} for a batch of {len(images)} images; it must be "
            "[images, classes]: it mixes the images of a batch or takes its size for a constant"
        )
    return logits


def capture(model: nn.Module, image_size: int, max_batch: int) -> ExportedProgram:
    """Trace a Servable into a program with a symbolic batch from 1 to max_batch, without a trace of this machine.

    Raises ExportError where the model branches on values or takes the batch size for a constant.
    """
    # A batch of 1 would be taken for a constant.
    example = torch.zeros(2, 3, image_size, image_size, dtype=torch.uint8)
    try:
        program = torch.export.export(
            model, (example,), dynamic_shapes={INPUT: {0: Dim("batch", min=1, max=max_batch)}}
        )
    except Exception as error:
        raise capture_error(error) from error
    for node in program.graph.nodes:
        for noted in ("stack_trace", "nn_module_stack", "source_fn_stack", "torch_fn", "from_node"):
            node.meta.pop(noted, None)
    return program


def capture_error(error: Exception) -> ExportError:
    """What the PyTorch exporter's message, often a page long, means for the model."""
    text = str(error)
    if "data-dependent" in text:
        meaning = "its code branches on the values of the image, and an exported graph cannot"
    elif "Constraints violated" in text or "specialized" in text:
        meaning = "its code takes the batch size for a constant"
    else:
        meaning = "the exporter cannot follow its code"
    return ExportError(
        f"the model cannot be exported: {meaning} ({type(error).__name__}: {first_line(error)})"
    )


def first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [repr(error)])[0]

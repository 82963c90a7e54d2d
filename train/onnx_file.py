"""Model -> one ONNX file: symbolic batch, uint8 in, named outputs, opset and IR as the serving target reads them."""

from pathlib import Path

import onnx
import torch
from torch import nn

from slipway.compatibility import Compatibility
from slipway.contract import INPUT, LOGITS, PROBABILITIES
from slipway.errors import SlipwayError
from train.model import ImageClassifier, require_eval


class ExportError(SlipwayError):
    """The exporter produced something other than what was asked for."""


class Servable(nn.Module):
    """What is exported: uint8 [batch, 3, size, size] -> logits and probabilities, float32 [batch, classes]."""

    def __init__(self, classifier: ImageClassifier) -> None:
        super().__init__()
        self.classifier = classifier

    def forward(self, image: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.classifier(image)
        return logits, logits.softmax(dim=1)


def write_onnx(
    classifier: ImageClassifier, path: Path, *, image_size: int, max_batch: int, pins: Compatibility
) -> None:
    """Export a classifier that is in eval mode to `path`, a single file.

    Raises:
        TrainingModeError: the model, or a part of it, is in training mode.
        ExportError: the file has another opset, IR version, or input shape than declared.
    """
    require_eval(classifier)
    # A batch of 1 would be taken for a constant.
    example = torch.zeros(2, 3, image_size, image_size, dtype=torch.uint8)
    with torch.no_grad():
        program = torch.onnx.export(
            Servable(classifier).eval(),
            (example,),
            input_names=[INPUT],
            output_names=[LOGITS, PROBABILITIES],
            dynamic_shapes={"image": {0: torch.export.Dim("batch", min=1, max=max_batch)}},
            opset_version=pins.export.opset,
            dynamo=True,
            verbose=False,
        )
    assert program is not None
    model = program.model_proto
    _strip(model)
    _check(model, pins)
    path.write_bytes(model.SerializeToString(deterministic=True))


def _strip(model: onnx.ModelProto) -> None:
    """Remove what the exporter notes about the machine it ran on: source paths and stack traces."""
    parts = [model, model.graph, *model.graph.node, *model.graph.input, *model.graph.output]
    parts += [*model.graph.value_info, *model.graph.initializer, *model.functions]
    for part in parts:
        part.ClearField("metadata_props")
        part.ClearField("doc_string")


def _check(model: onnx.ModelProto, pins: Compatibility) -> None:
    """The exporter is known to give another opset than asked for, and to say so in a log line only."""
    onnx.checker.check_model(model, full_check=True)
    opset = {entry.domain: entry.version for entry in model.opset_import}[""]
    if (opset, model.ir_version) != (pins.export.opset, pins.export.ir_version):
        raise ExportError(
            f"the exporter wrote opset {opset} and IR {model.ir_version}; compatibility.toml pins opset "
            f"{pins.export.opset} and IR {pins.export.ir_version}"
        )
    for value in [*model.graph.input, *model.graph.output]:
        batch = value.type.tensor_type.shape.dim[0]
        if batch.dim_param != "batch":
            raise ExportError(
                f"{value.name} has {batch.dim_param or batch.dim_value} rows instead of one for each image: the "
                "model mixes the images of a batch or takes its size for a constant"
            )

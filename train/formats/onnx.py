"""Model -> one ONNX file: symbolic batch, uint8 in, named outputs, opset and IR as the serving target reads them."""

from pathlib import Path

import onnx
import torch

from slipway import compatibility
from slipway.compatibility import Compatibility
from slipway.contract import INPUT, LOGITS, PROBABILITIES
from train.model import require_eval
from train.servable import ExportError, Servable, Source, capture_error, lowered


def write(source: Source, path: Path, precision: str) -> None:
    """Export a classifier that is in eval mode to `path`, a single file.

    Raises:
        TrainingModeError: the model, or a part of it, is in training mode.
        ExportError: the file has another opset, IR version, or input shape than declared, or a weight does not fit
            into the precision.
    """
    require_eval(source.classifier)
    classifier = source.classifier
    if precision == "float16":
        classifier = lowered(classifier, torch.float16)
    # A batch of 1 would be taken for a constant.
    example = torch.zeros(2, 3, source.image_size, source.image_size, dtype=torch.uint8)
    try:
        with torch.no_grad():
            program = torch.onnx.export(
                Servable(classifier).eval(),
                (example,),
                input_names=[INPUT],
                output_names=[LOGITS, PROBABILITIES],
                dynamic_shapes={INPUT: {0: torch.export.Dim("batch", min=1, max=source.max_batch)}},
                opset_version=compatibility.load().export.opset,
                dynamo=True,
                verbose=False,
            )
    except Exception as error:
        raise capture_error(error) from error
    assert program is not None
    model = program.model_proto
    save(model, path)


def save(model: onnx.ModelProto, path: Path) -> None:
    """Strip, check, and write as one file. Raises ExportError."""
    _strip(model)
    _check(model, compatibility.load())
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

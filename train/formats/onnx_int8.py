"""ONNX -> ONNX with int8 arithmetic, calibrated on training images, for ONNX Runtime on CPUs with int8 instructions."""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx
from onnxruntime.quantization import QuantFormat, QuantType, quantize_static
from onnxruntime.quantization.shape_inference import quant_pre_process

from slipway.contract import INPUT
from train.formats.onnx import save
from train.servable import Pixels, Source

# The arithmetic that costs the time. Normalisation and softmax stay in float32.
_QUANTISED = ["Conv", "Gemm", "MatMul", "Add", "MaxPool", "GlobalAveragePool"]


class _Images:
    """One training image at a time."""

    def __init__(self, images: Pixels) -> None:
        self._rows: Iterator[Pixels] = iter(images[:, None])

    def get_next(self) -> dict[str, Any] | None:
        row = next(self._rows, None)
        return None if row is None else {INPUT: row}


def write(source: Source, path: Path, _precision: str) -> None:
    """Quantise the ONNX file of `source` to `path`. Raises ExportError as the ONNX exporter does.

    Activations are unsigned: with signed ones x86 CPUs gain nothing.
    """
    with tempfile.TemporaryDirectory() as folder:
        prepared, quantised = Path(folder) / "prepared.onnx", Path(folder) / "quantised.onnx"
        quant_pre_process(source.onnx, prepared, skip_symbolic_shape=True)
        quantize_static(
            prepared,
            quantised,
            _Images(source.calibration),
            quant_format=QuantFormat.QDQ,
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
            op_types_to_quantize=_QUANTISED,
            nodes_to_exclude=_normalisation(onnx.load(prepared)),
            per_channel=True,
        )
        save(onnx.load(quantised), path)


def _normalisation(model: onnx.ModelProto) -> list[str]:
    """The additions and multiplications before the first convolution: of pixels, which must not be rounded again."""
    names = []
    for node in model.graph.node:
        if node.op_type == "Conv":
            break
        names.append(node.name)
    return names

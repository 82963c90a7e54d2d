"""The formats a bundle can hold, each written by one small module here and answered by `runtime_worker.py`."""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slipway.artefact import Artefact
from train.servable import Source


@dataclass(frozen=True, kw_only=True)
class Format:
    """How one artefact is made.

    module: has `write(source, path, precision)`, and may have `requires(source)`: what a machine needs to load it.
    files: names in the bundle; `write` is given the path of the first and writes all.
    """

    module: str
    runtime: str
    files: tuple[str, ...]
    precision: str = "float32"
    settings: Mapping[str, str] = field(default_factory=dict)

    def write(self, name: str, source: Source, directory: Path) -> Artefact:
        """Write the files into `directory`; returns what is to be known of them.

        Raises ExportError, and OSError where they cannot be written, whatever its library raises.
        """
        # Not imported above: some of these libraries take seconds to load, and most exports need none of them.
        module: Any = importlib.import_module(self.module)
        module.write(source, directory / self.files[0], self.precision)
        return Artefact(
            name=name,
            runtime=self.runtime,
            precision=self.precision,
            files=self.files,
            settings=self.settings,
            requires=module.requires(source) if hasattr(module, "requires") else {},
        )


def _openvino(precision: str, hint: str, stem: str) -> Format:
    # Left to itself, OpenVINO computes in bfloat16 wherever the CPU can.
    return Format(
        module="train.formats.openvino",
        runtime="openvino",
        files=(f"{stem}.xml", f"{stem}.bin"),
        precision=precision,
        settings={"INFERENCE_PRECISION_HINT": hint},
    )


FORMATS = {
    "onnx": Format(module="train.formats.onnx", runtime="onnxruntime", files=("model.onnx",)),
    "onnx-fp16": Format(
        module="train.formats.onnx",
        runtime="onnxruntime",
        files=("model.fp16.onnx",),
        precision="float16",
    ),
    "onnx-int8": Format(
        module="train.formats.onnx_int8",
        runtime="onnxruntime",
        files=("model.int8.onnx",),
        precision="int8",
    ),
    "pt2": Format(module="train.formats.pt2", runtime="torch.export", files=("model.pt2",)),
    "torchscript": Format(
        module="train.formats.torchscript", runtime="torchscript", files=("model.torchscript.pt",)
    ),
    "openvino": _openvino("float32", "f32", "model.openvino"),
    "openvino-bf16": _openvino("bfloat16", "bf16", "model.bf16.openvino"),
    "openvino-int8": _openvino("int8", "f32", "model.int8.openvino"),
    "aoti": Format(module="train.formats.aoti", runtime="aoti", files=("model.aoti.pt2",)),
    "aoti-bf16": Format(
        module="train.formats.aoti", runtime="aoti", files=("model.bf16.aoti.pt2",), precision="bfloat16"
    ),
}

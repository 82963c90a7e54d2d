"""ONNX -> OpenVINO's intermediate representation, in float32, or quantised to int8 on training images."""

import os
from pathlib import Path

import openvino

from train.servable import Source


def write(source: Source, path: Path, precision: str) -> None:
    """Write `path` (.xml) and the weights beside it (.bin).

    bfloat16 is the same file as float32: OpenVINO rounds when it loads, as the artefact's settings tell it to.
    """
    model = openvino.convert_model(str(source.onnx))
    if precision == "int8":
        model = _quantised(model, source)
    openvino.save_model(model, str(path), compress_to_fp16=False)


def _quantised(model: openvino.Model, source: Source) -> openvino.Model:
    # It would report each use to its makers over the network.
    os.environ["NNCF_CI"] = "1"
    import nncf  # noqa: PLC0415 - takes seconds, and only this precision needs it

    images = nncf.Dataset(list(source.calibration[:, None]))
    return nncf.quantize(model, images, subset_size=len(source.calibration))

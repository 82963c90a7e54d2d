"""ONNX -> OpenVINO's intermediate representation, in float32, or quantised to int8 on training images."""

import contextlib
import os
import sys
from pathlib import Path

import openvino

from train.servable import Source, first_line


def write(source: Source, path: Path, precision: str) -> None:
    """Write `path` (.xml) and the weights beside it (.bin).

    bfloat16 is the same file as float32: OpenVINO rounds when it loads, as the artefact's settings tell it to. Raises
    OSError.
    """
    # Not openvino.convert_model, which does the same and reports its use to its makers over the network.
    model = openvino.Core().read_model(source.onnx)
    if precision == "int8":
        model = _quantised(model, source)
    try:
        openvino.save_model(model, path, compress_to_fp16=False)
    except RuntimeError as error:  # what it raises where a file cannot be written
        raise OSError(f"{path.name}: {first_line(error)}") from error


def _quantised(model: openvino.Model, source: Source) -> openvino.Model:
    # It reports each use, too, unless it is told that this is a test.
    os.environ["NNCF_CI"] = "1"
    # It shows its progress, and binds its log, to stdout, which is for the path of the bundle.
    with contextlib.redirect_stdout(sys.stderr):
        import nncf  # noqa: PLC0415 - takes seconds, and only this precision needs it

        images = nncf.Dataset(list(source.calibration[:, None]))
        return nncf.quantize(model, images, subset_size=len(source.calibration))

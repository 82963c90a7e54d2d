"""IR version and opset are read without the onnx package."""

from pathlib import Path

import pytest

from serve import onnx_header
from serve.onnx_header import OnnxHeader
from slipway.bundle import Bundle
from slipway.errors import SlipwayError

# Written by hand as onnx.proto defines it: ir_version = 1, opset_import = 8 {domain = 1, version = 2}.
IR_99 = b"\x08\x63"
OPSET_20 = b"\x42\x02\x10\x14"
MICROSOFT_OPSET_50 = b"\x42\x11\x0a\x0dcom.microsoft\x10\x32"


def test_of_a_real_model(bundle: Bundle) -> None:
    assert onnx_header.read(bundle.directory / "model.onnx") == OnnxHeader(ir_version=10, opset=20)


def test_operator_sets_of_others_do_not_count(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(IR_99 + MICROSOFT_OPSET_50 + OPSET_20)
    assert onnx_header.read(tmp_path / "model.onnx") == OnnxHeader(ir_version=99, opset=20)


def test_what_is_no_model_is_said_to_be_none(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(b"<html>404</html>")
    with pytest.raises(SlipwayError, match=r"model\.onnx: is not an ONNX model"):
        onnx_header.read(tmp_path / "model.onnx")

"""float16 is judged where no GPU is, rounded behind every operator as one would round: so it overflows as there."""

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn

from slipway.artefact import Artefact
from train.float16 import write_roundings_out
from train.formats import FORMATS
from train.model import ImageClassifier
from train.parity import ParityError, Rows, reference_logits, require_passed, run_gate
from train.runtime import RuntimeFailure, running
from train.servable import Source

PIXELS = np.random.default_rng(0).integers(0, 256, (3, 3, 8, 8), dtype=np.uint8)


class Overflowing(nn.Module):
    """Two layers, of which the second takes back the factor of the first."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Conv2d(3, 4, 1, bias=False), nn.Conv2d(4, 5, 1, bias=False)
        with torch.no_grad():
            self.up.weight.mul_(factor)
            self.down.weight.div_(factor)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(image)).mean(dim=(2, 3))


def exported(factor: float, directory: Path) -> tuple[ImageClassifier, Artefact]:
    classifier = ImageClassifier(Overflowing(factor), (0.5,) * 3, (0.25,) * 3).eval()
    source = Source(
        classifier=classifier,
        image_size=8,
        max_batch=4,
        onnx=directory / "model.onnx",
        calibration=np.zeros((0, 3, 8, 8), np.uint8),
    )
    return classifier, FORMATS["onnx-fp16"].write("onnx-fp16", source, directory)


def test_weights_are_float16_and_everything_else_is_as_in_float32(tmp_path: Path) -> None:
    _, artefact = exported(1.0, tmp_path)
    graph = onnx.load(tmp_path / artefact.file).graph
    types = {tensor.name: tensor.data_type for tensor in graph.initializer}
    for name in ("up", "down"):
        assert types[f"classifier.backbone.network.{name}.weight"] == onnx.TensorProto.FLOAT16
    assert types["classifier.scale"] == types["classifier.shift"] == onnx.TensorProto.FLOAT
    assert [each.type.tensor_type.elem_type for each in graph.output] == [onnx.TensorProto.FLOAT] * 2
    assert graph.input[0].type.tensor_type.elem_type == onnx.TensorProto.UINT8


def test_model_that_overflows_is_refused_at_the_gate(tmp_path: Path) -> None:
    """Case C06."""
    classifier, artefact = exported(5e4, tmp_path)
    expected = reference_logits(classifier, PIXELS)
    assert np.abs(expected).max() < 10
    rows = Rows(kind="golden", names=["0.png", "1.png", "2.png"], pixels=PIXELS, expected=expected)
    report = run_gate(classifier, tmp_path, [artefact], [rows], max_batch=4, threads=1)
    with pytest.raises(
        ParityError, match=r"batch 1: model\.fp16\.onnx is not finite \(NaN or infinity\) for 0"
    ):
        require_passed(report)


def test_cpu_provider_alone_would_let_it_pass(tmp_path: Path) -> None:
    """Case C06: why the roundings are written out. If this fails, ONNX Runtime has learnt it, and they need not be."""
    classifier, artefact = exported(5e4, tmp_path)
    session = onnxruntime.InferenceSession(tmp_path / artefact.file, providers=["CPUExecutionProvider"])
    (answer,) = session.run(["logits"], {"image": PIXELS})
    assert np.allclose(answer, reference_logits(classifier, PIXELS), rtol=0.01, atol=0.01)


def test_answers_are_numbers_that_float16_has(tmp_path: Path) -> None:
    classifier, artefact = exported(1.0, tmp_path)
    with running(tmp_path, artefact, threads=1) as runtime:
        logits = runtime.answer(PIXELS)["logits"]
    assert np.array_equal(logits, logits.astype(np.float16))
    assert np.allclose(logits, reference_logits(classifier, PIXELS), rtol=0.01, atol=0.01)


def test_only_what_was_float16_is_rounded(tmp_path: Path) -> None:
    _, artefact = exported(1.0, tmp_path)
    path = tmp_path / artefact.file
    write_roundings_out(path)
    model = onnx.load(path)
    onnx.checker.check_model(model, full_check=True)
    assert {tensor.data_type for tensor in model.graph.initializer} <= {
        onnx.TensorProto.FLOAT,
        onnx.TensorProto.INT64,
    }
    before = [node.op_type for node in model.graph.node]
    assert before[:3] == ["Cast", "Mul", "Add"], "normalisation stays in float32"


def test_file_that_is_no_onnx_is_told(tmp_path: Path) -> None:
    _, artefact = exported(1.0, tmp_path)
    (tmp_path / artefact.file).write_bytes(b"no ONNX")
    with (
        pytest.raises(RuntimeFailure, match=r"model\.fp16\.onnx: is no sound ONNX file: "),
        running(tmp_path, artefact, threads=1),
    ):
        pass

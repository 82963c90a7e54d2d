import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn

from slipway import compatibility
from train.config import ModelConfig
from train.formats import onnx as onnx_format
from train.model import ImageClassifier, TrainingModeError, build_model
from train.parity import eager_logits
from train.servable import ExportError, Source

PINS = compatibility.load()


def classifier() -> ImageClassifier:
    torch.manual_seed(0)
    return build_model(
        ModelConfig(name="mobilenet_v3_small", stem="small"), 5, 16, (0.5,) * 3, (0.25,) * 3
    ).eval()


def write(model: ImageClassifier, path: Path) -> None:
    nothing = np.zeros((0, 3, 16, 16), np.uint8)
    source = Source(classifier=model, image_size=16, max_batch=8, onnx=path, calibration=nothing)
    onnx_format.write(source, path, "float32")


def open_session(path: Path) -> onnxruntime.InferenceSession:
    return onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[ImageClassifier, Path]:
    model = classifier()
    path = tmp_path_factory.mktemp("export") / "model.onnx"
    write(model, path)
    return model, path


def images(count: int) -> Any:
    return np.random.default_rng(0).integers(0, 256, (count, 3, 16, 16), dtype=np.uint8)


@pytest.mark.parametrize("batch", [1, 2, 3, 8])
def test_batch_is_symbolic(exported: tuple[ImageClassifier, Path], batch: int) -> None:
    """Case C01: run, not only inspected."""
    model, path = exported
    (answer,) = open_session(path).run(["logits"], {"image": images(batch)})
    assert answer.shape == (batch, 5)
    assert np.allclose(answer, eager_logits(model, images(batch)), atol=1e-4)


def test_input_is_uint8_and_outputs_say_what_they_are(exported: tuple[ImageClassifier, Path]) -> None:
    session = open_session(exported[1])
    assert [(i.name, i.type, i.shape) for i in session.get_inputs()] == [
        ("image", "tensor(uint8)", ["batch", 3, 16, 16])
    ]
    assert [output.name for output in session.get_outputs()] == ["logits", "probabilities"]


def test_artefact_is_one_file_that_runs_anywhere(
    exported: tuple[ImageClassifier, Path], tmp_path: Path
) -> None:
    """Case C03: copied elsewhere, loaded in a fresh process at the root directory."""
    copy = tmp_path / "alone.onnx"
    copy.write_bytes(exported[1].read_bytes())
    assert [path.name for path in exported[1].parent.iterdir()] == ["model.onnx"]
    code = "import onnxruntime, sys; onnxruntime.InferenceSession(sys.argv[1])"
    subprocess.run([sys.executable, "-c", code, str(copy)], cwd="/", check=True)


def test_opset_and_ir_are_the_pinned_ones(exported: tuple[ImageClassifier, Path]) -> None:
    """Case C04."""
    model = onnx.load(exported[1])
    assert (model.opset_import[0].version, model.ir_version) == (PINS.export.opset, PINS.export.ir_version)


def test_unsupported_opset_is_refused_at_export_with_both_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case C04: the exporter gives opset 18 when asked for 17, and only logs it."""
    pins: Any = SimpleNamespace(export=SimpleNamespace(opset=17, ir_version=PINS.export.ir_version))
    monkeypatch.setattr(compatibility, "load", lambda: pins)
    with pytest.raises(ExportError, match=r"wrote opset 18 and IR \d+; compatibility.toml pins opset 17"):
        write(classifier(), tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())


def test_file_tells_nothing_about_the_machine_it_was_made_on(exported: tuple[ImageClassifier, Path]) -> None:
    content = exported[1].read_bytes()
    assert b".py" not in content
    assert str(Path.cwd()).encode() not in content


def test_model_in_training_mode_is_refused(tmp_path: Path) -> None:
    """Case C02."""
    model = classifier()
    model.backbone.train()
    with pytest.raises(TrainingModeError, match="backbone is in training mode"):
        write(model, tmp_path / "model.onnx")


def test_exporting_changes_neither_weights_nor_statistics(tmp_path: Path) -> None:
    """Case C02."""
    model = classifier()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    write(model, tmp_path / "model.onnx")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not model.training


class FrozenBatch(nn.Module):
    """Reshapes by a batch size that it takes for a constant."""

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return image.reshape(2, -1)[:, :5]


def test_model_that_depends_on_the_batch_size_is_refused(tmp_path: Path) -> None:
    """Case C01."""
    model = ImageClassifier(FrozenBatch(), (0.5,) * 3, (0.25,) * 3).eval()
    with pytest.raises(ExportError, match="batch"):
        write(model, tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())

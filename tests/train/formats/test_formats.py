"""Every format, on its real runtime, against the gate; and models that each exporter must refuse."""

import io
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from slipway.artefact import Artefact, ArtefactError
from slipway.paths import PROJECT_ROOT
from tests.train.conftest import full_disk
from train.config import FormatName, ModelConfig
from train.formats import FORMATS, aoti, pt2, torchscript
from train.formats import onnx as onnx_format
from train.model import ImageClassifier, TrainingModeError, build_model
from train.parity import Rows, reference_logits, require_passed, run_gate
from train.runtime import running
from train.servable import ExportError, Source

SIZE, MAX_BATCH = 16, 8
Write = Callable[[Source, Path, str], None]


def images(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, 3, SIZE, SIZE), dtype=np.uint8)


def source_of(classifier: ImageClassifier, directory: Path) -> Source:
    return Source(
        classifier=classifier,
        image_size=SIZE,
        max_batch=MAX_BATCH,
        onnx=directory / "model.onnx",
        calibration=images(16),
    )


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    torch.manual_seed(0)
    classifier = build_model(
        ModelConfig(name="squeezenet1_1", stem="small"), 5, SIZE, (0.5,) * 3, (0.25,) * 3
    ).eval()
    made = source_of(classifier, tmp_path_factory.mktemp("formats"))
    onnx_format.write(made, made.onnx, "float32")
    return made


def test_options_name_every_format_there_is() -> None:
    assert set(typing.get_args(FormatName)) == set(FORMATS)


def check_at_the_gate(source: Source, name: str) -> Artefact:
    directory = source.onnx.parent
    artefact = FORMATS[name].write(name, source, directory)
    pixels = images(5, seed=1)
    expected = reference_logits(source.classifier, pixels)
    names = [f"image {number}" for number in range(5)]
    golden = Rows(kind="golden", names=names, pixels=pixels, expected=expected)
    report = run_gate(source.classifier, directory, [artefact], [golden], max_batch=MAX_BATCH, threads=1)
    require_passed(report)
    return artefact


@pytest.mark.parametrize(
    "name", ["onnx-fp16", "onnx-int8", "pt2", "torchscript", "openvino", "openvino-bf16", "openvino-int8"]
)
def test_format_answers_as_the_model_does(
    source: Source, name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Cases C01 and C03: run at batches 1, 2, 3, 7 and max, from a copy, in a process that has no source code."""
    artefact = check_at_the_gate(source, name)
    assert artefact.requires == {}
    for file in artefact.files:
        assert str(PROJECT_ROOT).encode() not in (source.onnx.parent / file).read_bytes()
    assert capfd.readouterr().out == "", "stdout is for the path of the bundle"


def test_torchscript_says_that_it_is_deprecated(
    source: Source, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "train")
    torchscript.write(source, tmp_path / "model.pt", "float32")
    assert "TorchScript is deprecated by PyTorch" in caplog.text


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_compiled_package_answers_here_and_is_refused_elsewhere_before_it_is_loaded(source: Source) -> None:
    """Case C10."""
    artefact = check_at_the_gate(source, "aoti-bf16")
    assert artefact.requires.keys() == {"machine", "torch", "instructions"}
    elsewhere = Artefact(
        **{**vars(artefact), "requires": {**artefact.requires, "instructions": ["sse4_2", "from_the_future"]}}
    )
    with (
        pytest.raises(
            ArtefactError, match=r"was built for from_the_future, and this machine has no from_the_"
        ),
        running(source.onnx.parent / "nowhere", elsewhere, threads=1),
    ):
        pass


def test_missing_compiler_is_told_in_words(
    source: Source, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(ExportError, match=r"model\.aoti\.pt2 is compiled C\+\+, and there is no g\+\+ here"):
        aoti.write(source, tmp_path / "model.aoti.pt2", "float32")


@pytest.mark.parametrize("name", ["pt2", "torchscript", "openvino", "aoti"])
def test_full_disk_is_an_os_error_whatever_a_library_makes_of_it(
    source: Source, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case B03: the stage, which knows where its bundle was to go, says it in words."""

    def compiled(program: Any, package_path: io.BytesIO, inductor_configs: Any) -> None:
        package_path.write(bytes(100))

    monkeypatch.setattr(aoti, "aoti_compile_and_package", compiled)  # it takes a minute, and a compiler
    monkeypatch.setenv("CXX", "true")
    with full_disk(), pytest.raises(OSError, match=r"File too large|model\.openvino"):
        FORMATS[name].write(name, source, tmp_path)


class Branch(nn.Module):
    """Answers dark images in another way."""

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        features = image.flatten(1)[:, :5]
        return features * 2 if image.mean() > 0 else features


class FrozenBatch(nn.Module):
    """Takes the batch size for a constant where it is 2."""

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        features = image.flatten(1)[:, :5]
        return features.reshape(2, 5) if image.shape[0] == 2 else features


WRITERS = pytest.mark.parametrize("write", [onnx_format.write, pt2.write, torchscript.write, aoti.write])


def refuse(write: Write, network: nn.Module, directory: Path, error: type[Exception], words: str) -> None:
    classifier = ImageClassifier(network, (0.5,) * 3, (0.25,) * 3).eval()
    with pytest.raises(error, match=words):
        write(source_of(classifier, directory), directory / "artefact", "float32")
    assert not list(directory.iterdir())


@WRITERS
def test_branch_on_values_is_refused(write: Write, tmp_path: Path) -> None:
    """Case C02's kin: tracing would freeze the branch that the example took."""
    words = "branches on the values|takes a value of the example for a constant"
    refuse(write, Branch(), tmp_path, ExportError, words)


@WRITERS
def test_specialised_batch_is_refused(write: Write, tmp_path: Path) -> None:
    """Case C01."""
    refuse(write, FrozenBatch(), tmp_path, ExportError, "batch|takes a value of the example for a constant")


@WRITERS
def test_training_mode_is_refused(write: Write, tmp_path: Path) -> None:
    """Case C02."""
    classifier: Any = ImageClassifier(nn.Sequential(nn.Flatten(), nn.Dropout()), (0.5,) * 3, (0.25,) * 3)
    classifier.eval()
    classifier.backbone[1].train()
    with pytest.raises(TrainingModeError, match=r"backbone\.1 is in training mode"):
        write(source_of(classifier, tmp_path), tmp_path / "artefact", "float32")

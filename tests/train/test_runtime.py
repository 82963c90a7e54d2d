"""An artefact runs in a process of its own, which holds its runtime, nothing of ours, and ends when asked to."""

import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import pytest
from onnx import TensorProto, helper

from slipway.artefact import Artefact
from train import runtime_worker
from train.runtime import RuntimeFailure, running

ARTEFACT = Artefact(name="onnx", runtime="onnxruntime", precision="float32", files=("model.onnx",))
PIXELS = np.arange(12, dtype=np.uint8).reshape(2, 6)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """`model.onnx`, which answers with its input as float32, and takes rows of six."""
    rows = helper.make_tensor_value_info("image", TensorProto.UINT8, ["batch", 6])
    floats = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", 6])
    cast = helper.make_node("Cast", ["image"], ["logits"], to=TensorProto.FLOAT)
    graph = helper.make_graph([cast], "cast", [rows], [floats])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    onnx.save(model, tmp_path / "model.onnx")
    return tmp_path


def test_answers_and_times_come_from_the_process(directory: Path) -> None:
    with running(directory, ARTEFACT, threads=1) as runtime:
        (directory / "model.onnx").unlink()  # it has a copy
        answers = runtime.answer(PIXELS)
        assert answers.keys() == {"logits"}
        assert np.array_equal(answers["logits"], PIXELS.astype(np.float32))
        assert len(runtime.milliseconds(PIXELS, 4)) == 4
        process = runtime._process
        assert process.poll() is None
    assert process.poll() is not None


def test_failed_question_is_told_and_the_next_one_answered(directory: Path) -> None:
    with running(directory, ARTEFACT, threads=1) as runtime:
        with pytest.raises(RuntimeFailure, match=r"model\.onnx: onnxruntime cannot answer a batch of 3: "):
            runtime.answer(np.zeros((3, 5), np.uint8))
        assert runtime.answer(PIXELS)["logits"].shape == (2, 6)


def test_dead_process_is_told_with_its_exit_code(directory: Path) -> None:
    with running(directory, ARTEFACT, threads=1) as runtime:
        runtime._process.kill()
        runtime._process.wait()
        for _ in range(2):
            with pytest.raises(
                RuntimeFailure, match="onnxruntime ended with exit code -9 in a process of its"
            ):
                runtime.answer(PIXELS)


@pytest.mark.parametrize("name", ["train.model", "torchvision"])
def test_code_of_the_model_cannot_be_imported(name: str) -> None:
    code = f"from train import runtime_worker; runtime_worker.forbid_source_code(); import {name}"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "ModuleNotFoundError" in result.stderr


def test_stream_carries_arrays_of_any_shape_and_ends_anywhere() -> None:
    stream = io.BytesIO()
    arrays: dict[str, npt.NDArray[Any]] = {
        "a": PIXELS,
        "empty": np.zeros((0, 3), np.float32),
        "one": np.array(7.5),
    }
    runtime_worker.write(stream, {"repeat": 2}, arrays)
    content = stream.getvalue()
    received = runtime_worker.read(io.BytesIO(content))
    assert received is not None
    assert received[0] == {"repeat": 2}
    for name, array in arrays.items():
        assert np.array_equal(received[1][name], array)
        assert received[1][name].dtype == array.dtype
    for end in range(len(content)):
        assert runtime_worker.read(io.BytesIO(content[:end])) is None

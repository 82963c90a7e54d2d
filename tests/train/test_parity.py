from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper

from slipway import compatibility
from train.config import ModelConfig
from train.model import ImageClassifier, build_model
from train.onnx_file import write_onnx
from train.parity import ParityError, compare, in_batches, require_passed, run_gate

Break = Callable[[onnx.ModelProto], None]


@pytest.fixture(scope="module")
def model() -> ImageClassifier:
    torch.manual_seed(0)
    return build_model(ModelConfig(name="squeezenet1_1", stem="small"), 4, (0.5,) * 3, (0.25,) * 3).eval()


@pytest.fixture(scope="module")
def artefact(model: ImageClassifier, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("parity") / "model.onnx"
    write_onnx(model, path, image_size=16, max_batch=8, pins=compatibility.load())
    return path


@pytest.fixture(scope="module")
def golden() -> np.ndarray:
    return np.random.default_rng(1).integers(0, 256, (5, 3, 16, 16), dtype=np.uint8)


def test_faithful_artefact_passes_at_every_batch_size(
    model: ImageClassifier, artefact: Path, golden: np.ndarray
) -> None:
    report = run_gate(model, artefact, golden, max_batch=8)
    require_passed(report)
    assert report["verdict"] == "passed"
    batches = {
        (check["inputs"], check["batch"]) for check in report["checks"] if check["reference"] == "eager"
    }
    assert batches == {(name, batch) for name in ("golden", "random") for batch in (1, 2, 7, 8)}
    assert "the same row alone" in {check["reference"] for check in report["checks"]}


def scale_a_weight(proto: onnx.ModelProto) -> None:
    weight = max(proto.graph.initializer, key=lambda tensor: len(tensor.raw_data))
    weight.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(weight) * 1.01, weight.name))


def weight_of_first_convolution(proto: onnx.ModelProto) -> onnx.TensorProto:
    name = next(node for node in proto.graph.node if node.op_type == "Conv").input[1]
    return next(tensor for tensor in proto.graph.initializer if tensor.name == name)


def swap_channels(proto: onnx.ModelProto) -> None:
    weight = weight_of_first_convolution(proto)
    weight.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(weight)[:, ::-1].copy(), weight.name))


def put_in_a_nan(proto: onnx.ModelProto) -> None:
    weight = weight_of_first_convolution(proto)
    values = numpy_helper.to_array(weight).copy()
    values.flat[0] = np.nan
    weight.CopyFrom(numpy_helper.from_array(values, weight.name))


@pytest.mark.parametrize("break_it", [scale_a_weight, swap_channels, put_in_a_nan])
def test_broken_artefact_is_caught(
    model: ImageClassifier, artefact: Path, golden: np.ndarray, tmp_path: Path, break_it: Break
) -> None:
    proto = onnx.load(artefact)
    break_it(proto)
    onnx.save(proto, tmp_path / "broken.onnx")
    report = run_gate(model, tmp_path / "broken.onnx", golden, max_batch=8)
    assert report["verdict"] == "failed"
    with pytest.raises(ParityError, match=r"broken\.onnx against eager on golden inputs, batch 1"):
        require_passed(report)


def test_nan_fails_by_name() -> None:
    """Case C06: every comparison with NaN is false, so a naive check lets it pass."""
    good = np.zeros((3, 4), dtype=np.float32)
    bad = good.copy()
    bad[1, 2] = np.nan
    check = compare(good, bad, "a", "b", "c", 1)
    assert not check.passed
    assert check.max_abs is None
    with pytest.raises(ParityError, match="logits not finite"):
        require_passed({"checks": [vars(check)]})


@pytest.mark.parametrize(("dtype", "off", "passes"), [("float32", 5e-3, False), ("float16", 5e-3, True)])
def test_tolerance_is_that_of_the_dtype(dtype: str, off: float, passes: bool) -> None:
    """Case C06."""
    good = np.eye(4, dtype=np.float32)
    assert compare(good, (good + np.float32(off)).astype(dtype), "a", "b", "c", 1).passed is passes


def test_another_top_1_fails_even_within_tolerance() -> None:
    good = np.array([[0.0, 1e-6]], dtype=np.float32)
    check = compare(good, good[:, ::-1].copy(), "a", "b", "c", 1)
    assert check.max_abs is not None
    assert check.max_abs < check.tolerance
    assert not check.passed


def test_missing_rows_fail() -> None:
    good = np.zeros((3, 4), dtype=np.float32)
    assert not compare(good, good[:2], "a", "b", "c", 1).passed


def test_rows_are_run_in_batches_of_exactly_the_size() -> None:
    seen = []

    def run(part: np.ndarray) -> np.ndarray:
        seen.append(len(part))
        return part.reshape(len(part), -1).astype(np.float32)

    pixels = np.arange(5, dtype=np.uint8).reshape(5, 1, 1, 1)
    assert in_batches(run, pixels, 4)[:, 0].tolist() == [0, 1, 2, 3, 4]
    assert seen == [4, 4]

"""The parity gate, held against artefacts that are broken in one known way each."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import helper, numpy_helper

from slipway.artefact import Artefact
from train.config import ModelConfig
from train.formats import onnx as onnx_format
from train.model import ImageClassifier, build_model
from train.parity import (
    TOLERANCES,
    ParityError,
    Rows,
    Subject,
    compare,
    in_batches,
    logits_of,
    reference_logits,
    require_passed,
    run_gate,
)
from train.servable import Source

Break = Callable[[onnx.ModelProto], None]


@pytest.fixture(scope="module")
def model() -> ImageClassifier:
    torch.manual_seed(0)
    return build_model(ModelConfig(name="squeezenet1_1", stem="small"), 4, 16, (0.5,) * 3, (0.25,) * 3).eval()


@pytest.fixture(scope="module")
def artefact(model: ImageClassifier, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("parity") / "model.onnx"
    nothing = np.zeros((0, 3, 16, 16), np.uint8)
    source = Source(classifier=model, image_size=16, max_batch=8, onnx=path, calibration=nothing)
    onnx_format.write(source, path, "float32")
    return path


PIXELS = np.random.default_rng(1).integers(0, 256, (5, 3, 16, 16), dtype=np.uint8)


@pytest.fixture(scope="module")
def golden(model: ImageClassifier) -> Rows:
    names = [f"{number:03d}.png" for number in range(5)]
    return Rows(kind="golden", names=names, pixels=PIXELS, expected=reference_logits(model, PIXELS))


def gate(model: ImageClassifier, path: Path, *inputs: Rows, max_batch: int = 8) -> dict[str, Any]:
    artefact = Artefact(name="onnx", runtime="onnxruntime", precision="float32", files=(path.name,))
    return run_gate(model, path.parent, [artefact], inputs, max_batch=max_batch, threads=1)


def test_faithful_artefact_passes_at_every_batch_size(
    model: ImageClassifier, artefact: Path, golden: Rows
) -> None:
    report = gate(model, artefact, golden)
    require_passed(report)
    assert report["verdict"] == "passed"
    compared = [
        (check["artefact"], check["reference"], check["inputs"], check["batch"]) for check in report["checks"]
    ]
    assert compared == [
        ("eager", "float64", "golden", 5),
        *(("model.onnx", "float64", "golden", batch) for batch in (1, 2, 3, 7, 8)),
        ("model.onnx", "the same row alone", "golden", 8),
    ]
    assert all(check["confidence_drift"] < 1e-5 for check in report["checks"])


def test_small_largest_batch_is_not_exceeded(model: ImageClassifier, artefact: Path, golden: Rows) -> None:
    report = gate(model, artefact, golden, max_batch=2)
    assert {check["batch"] for check in report["checks"][1:]} == {1, 2}


def initializer(proto: onnx.ModelProto, name: str) -> onnx.TensorProto:
    return next(tensor for tensor in proto.graph.initializer if tensor.name == name)


def change(tensor: onnx.TensorProto, how: Callable[[np.ndarray], np.ndarray]) -> None:
    values = how(numpy_helper.to_array(tensor).copy())
    tensor.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(values), tensor.name))


def weight_of_first(proto: onnx.ModelProto, operator: str) -> onnx.TensorProto:
    name = next(node for node in proto.graph.node if node.op_type == operator).input[1]
    return initializer(proto, name)


def scale_a_weight(proto: onnx.ModelProto) -> None:
    """By one per cent, in one layer."""
    change(weight_of_first(proto, "Conv"), lambda values: values * np.float32(1.01))


def swap_channels(proto: onnx.ModelProto) -> None:
    change(weight_of_first(proto, "Conv"), lambda values: values[:, ::-1])


def double_the_softmax(proto: onnx.ModelProto) -> None:
    softmax = next(node for node in proto.graph.node if node.op_type == "Softmax")
    again = copy.deepcopy(softmax)
    softmax.output[0], again.input[0], again.name = "once", "once", "twice"
    proto.graph.node.append(again)


def forget_normalisation(proto: onnx.ModelProto) -> None:
    change(weight_of_first(proto, "Mul"), np.ones_like)
    change(weight_of_first(proto, "Add"), np.zeros_like)


def put_in_a_nan(proto: onnx.ModelProto) -> None:
    def spoil(values: np.ndarray) -> np.ndarray:
        values.flat[0] = np.nan
        return values

    change(weight_of_first(proto, "Conv"), spoil)


BRIGHTNESS = PIXELS.mean(axis=(1, 2, 3), dtype=np.float64)


def spoil_the_brightest_row(proto: onnx.ModelProto) -> None:
    """Adds nothing, but for one row: 0 x the root of a number that is negative there."""
    second, first = np.sort(BRIGHTNESS)[-2:]
    constants = {
        "pixels": np.array([1, 2, 3]),
        "classes": np.array([1]),
        "limit": np.float32((first + second) / 2),
        "zero": np.float32(0),
    }
    proto.graph.initializer.extend(
        numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()
    )
    nodes = list(proto.graph.node)
    last = next(index for index, node in enumerate(nodes) if "logits" in node.output)
    nodes[last].output[0] = "sound"
    added = [
        helper.make_node("Cast", ["image"], ["float"], to=onnx.TensorProto.FLOAT),
        helper.make_node("ReduceMean", ["float", "pixels"], ["brightness"], keepdims=0),
        helper.make_node("Sub", ["limit", "brightness"], ["below"]),
        helper.make_node("Sqrt", ["below"], ["root"]),
        helper.make_node("Mul", ["root", "zero"], ["nothing"]),
        helper.make_node("Unsqueeze", ["nothing", "classes"], ["column"]),
        helper.make_node("Add", ["sound", "column"], ["logits"]),
    ]
    del proto.graph.node[:]
    proto.graph.node.extend([*nodes[: last + 1], *added, *nodes[last + 1 :]])


def freeze_the_batch(proto: onnx.ModelProto) -> None:
    proto.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 1


@pytest.mark.parametrize(
    ("break_it", "complaint"),
    [
        (scale_a_weight, r"on golden inputs, batch 1: logits off by .* most of all for 00\d\.png"),
        (swap_channels, r"on golden inputs, batch 1: logits off by"),
        (double_the_softmax, "batch 1: the output `probabilities` is not the softmax of the output `logits`"),
        (forget_normalisation, r"on golden inputs, batch 1: logits off by"),
        (put_in_a_nan, r"batch 1: broken\.onnx is not finite \(NaN or infinity\) for 000\.png"),
        (
            spoil_the_brightest_row,
            rf"batch 1: broken\.onnx is not finite \(NaN or infinity\) for 00{BRIGHTNESS.argmax()}\.png",
        ),
        (freeze_the_batch, r"batch 2: broken\.onnx: onnxruntime cannot answer a batch of 2: "),
    ],
)
def test_broken_artefact_is_refused_by_name(
    model: ImageClassifier, artefact: Path, golden: Rows, tmp_path: Path, break_it: Break, complaint: str
) -> None:
    """Case C01 (the frozen batch), case C06 (the NaN, everywhere and in one row)."""
    proto = onnx.load(artefact)
    break_it(proto)
    onnx.save(proto, tmp_path / "broken.onnx")
    report = gate(model, tmp_path / "broken.onnx", golden)
    assert report["verdict"] == "failed"
    with pytest.raises(
        ParityError, match=rf"^broken\.onnx against float64 .*{complaint}.*Nothing was published$"
    ):
        require_passed(report)


def test_row_that_depends_on_its_batch_is_refused(
    model: ImageClassifier, artefact: Path, golden: Rows, tmp_path: Path
) -> None:
    """Case C02: right alone, wrong in a batch, as after an export in training mode."""
    proto = onnx.load(artefact)
    logits = next(node for node in proto.graph.node if "logits" in node.output)
    logits.output[0] = "apart"
    proto.graph.node.extend(
        [
            helper.make_node("ReduceMean", ["apart", "rows"], ["batch_mean"], keepdims=1),
            helper.make_node("Sub", ["apart", "batch_mean"], ["centred"]),
            helper.make_node("Add", ["centred", "batch_mean"], ["same"]),
            helper.make_node("Add", ["same", "centred"], ["logits"]),
        ]
    )
    proto.graph.initializer.append(numpy_helper.from_array(np.array([0]), "rows"))
    # The softmax reads `logits`; keep the order that ONNX asks for.
    softmax = next(node for node in proto.graph.node if node.op_type == "Softmax")
    proto.graph.node.remove(softmax)
    proto.graph.node.append(softmax)
    onnx.save(proto, tmp_path / "broken.onnx")
    report = gate(model, tmp_path / "broken.onnx", golden)
    failed = [(check["reference"], check["batch"]) for check in report["checks"] if not check["passed"]]
    assert ("float64", 1) not in failed
    assert ("the same row alone", 8) in failed


def test_artefact_that_does_not_load_is_refused_with_what_its_runtime_says(
    model: ImageClassifier, golden: Rows, tmp_path: Path
) -> None:
    (tmp_path / "broken.onnx").write_bytes(b"no ONNX")
    with pytest.raises(
        ParityError, match=r"onnxruntime ended with exit code 1 in a process of its own: .*rotobuf"
    ):
        require_passed(gate(model, tmp_path / "broken.onnx", golden))


def rows(expected: np.ndarray, kind: str = "golden") -> Rows:
    names = [f"row {number}" for number in range(len(expected))]
    return Rows(kind=kind, names=names, pixels=np.zeros(0, np.uint8), expected=expected)


def test_nan_fails_by_name() -> None:
    """Case C06: every comparison with NaN is false, so a naive check lets it pass."""
    good = np.zeros((3, 4), dtype=np.float32)
    bad = good.copy()
    bad[1, 2] = np.nan
    for precision in TOLERANCES:
        check = compare(rows(good, "random"), bad, Subject("a", precision, "random", 1))
        assert not check.passed
        assert check.problem == "a is not finite (NaN or infinity) for row 1"


@pytest.mark.parametrize(
    ("dtype", "off", "passes"),
    [
        ("float32", 5e-6, True),
        ("float32", 5e-3, False),
        ("float16", 5e-3, True),
        ("float16", 0.05, False),
        ("bfloat16", 0.05, True),
        ("bfloat16", 0.1, False),
    ],
)
def test_tolerance_is_that_of_the_dtype(dtype: str, off: float, passes: bool) -> None:
    """Case C06."""
    good = np.eye(4, dtype=np.float32)
    check = compare(rows(good), good + np.float32(off), Subject("a", dtype, "golden", 1))
    assert check.passed is passes


def test_reduced_precision_is_not_judged_by_distance_on_inputs_it_was_not_calibrated_for() -> None:
    good = np.eye(4, dtype=np.float32)
    check = compare(rows(good, "nasty"), good + 1, Subject("a", "int8", "nasty", 1))
    assert check.passed
    assert check.tolerance is None
    assert check.max_abs == 1


def test_another_top_1_fails_even_within_tolerance() -> None:
    good = np.array([[0.0, 1e-6]], dtype=np.float32)
    check = compare(rows(good), good[:, ::-1].copy(), Subject("a", "float32", "golden", 1))
    assert check.max_abs is not None
    assert check.tolerance is not None
    assert check.max_abs < check.tolerance
    assert not check.passed


def test_missing_rows_fail() -> None:
    good = np.zeros((3, 4), dtype=np.float32)
    check = compare(rows(good), good[:2], Subject("a", "float32", "golden", 1))
    assert check.problem == "logits of shape [2, 4] instead of [3, 4]"


def test_outputs_must_have_the_names_and_the_type_of_the_contract() -> None:
    half = np.zeros((1, 2), np.float16)
    with pytest.raises(ParityError, match="'logits': 'float16'"):
        logits_of({"logits": half, "probabilities": half})


def test_rows_are_run_in_batches_of_exactly_the_size() -> None:
    seen = []

    def run(part: np.ndarray) -> np.ndarray:
        seen.append(len(part))
        return part.reshape(len(part), -1).astype(np.float32)

    pixels = np.arange(5, dtype=np.uint8).reshape(5, 1, 1, 1)
    assert in_batches(run, pixels, 4)[:, 0].tolist() == [0, 1, 2, 3, 4]
    assert seen == [4, 4]

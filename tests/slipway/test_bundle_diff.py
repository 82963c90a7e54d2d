"""What changed from one bundle to another, told in words."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slipway import bundle, sealed
from slipway.artefact import Artefact, write_artefacts
from slipway.bundle_diff import differences
from slipway.sealed import SealError
from tests.slipway.test_bundle import SIGNATURE, make_bundle

ONNX = Artefact(name="onnx", runtime="onnxruntime", precision="float32", files=("model.onnx",))
INT8 = Artefact(name="openvino-int8", runtime="openvino", precision="int8", files=("model.int8.xml",))


def make(directory: Path, change: Callable[[Path], None] = lambda staging: None, **provenance: Any) -> Path:
    def fill(staging: Path) -> None:
        content = {"run": "a", "metrics": {"accuracy": 0.9}, "environment": {"git": {"dirty": False}}}
        sealed.write_json(staging / bundle.PROVENANCE, {**content, **provenance})
        write_artefacts(staging, [ONNX])
        change(staging)

    return make_bundle(directory, fill)


def test_equal_bundles_do_not_differ(tmp_path: Path) -> None:
    assert differences(make(tmp_path / "1"), make(tmp_path / "2")) == []


def test_metrics_and_provenance_are_told_value_by_value(tmp_path: Path) -> None:
    after = make(
        tmp_path / "2", run="b", metrics={"accuracy": 0.95, "loss": 0.1}, environment={"git": {"dirty": True}}
    )
    assert differences(make(tmp_path / "1"), after) == [
        "metrics: accuracy was 0.9, is 0.95",
        "metrics: loss is new: 0.1",
        "provenance: environment.git.dirty was false, is true",
        'provenance: run was "a", is "b"',
    ]


def test_contract_and_labels_are_told_before_all_else(tmp_path: Path) -> None:
    def change(staging: Path) -> None:
        signature = replace(SIGNATURE, classes=("0", "10", "1", "3"), max_batch=16)
        signature.save(staging / bundle.SIGNATURE)
        (staging / bundle.LABELS).write_bytes(bundle.labels(signature))

    assert differences(make(tmp_path / "1"), make(tmp_path / "2", change)) == [
        "contract: they cannot replace each other without the clients noticing",
        "contract: max_batch was 8, is 16",
        "labels: '3' is new",
        "labels: '2' is gone",
        "labels: the order of the classes changed, and with it the meaning of every output",
    ]


def test_artefacts_are_told_by_name(tmp_path: Path) -> None:
    def change(staging: Path) -> None:
        (staging / bundle.MODEL).write_bytes(b"another model")
        (staging / INT8.file).write_bytes(b"a small model")
        write_artefacts(staging, [replace(ONNX, settings={"threads": "2"}), INT8])

    before, after = make(tmp_path / "1"), make(tmp_path / "2", change)
    assert differences(before, after) == [
        "artefacts: onnx has other content",
        'artefacts: onnx: settings.threads is new: "2"',
        "artefacts: openvino-int8 is new",
    ]
    assert "artefacts: openvino-int8 is gone" in differences(after, before)


def test_another_artefact_to_be_served_is_told(tmp_path: Path) -> None:
    def change(staging: Path) -> None:
        (staging / INT8.file).touch()
        write_artefacts(staging, [ONNX, INT8], INT8.name)

    assert differences(make(tmp_path / "1"), make(tmp_path / "2", change)) == [
        "artefacts: openvino-int8 is served, and was onnx",
        "artefacts: openvino-int8 is new",
    ]


def test_golden_answers_are_counted(tmp_path: Path) -> None:
    def change(staging: Path) -> None:
        path = staging / bundle.GOLDEN_ANSWERS
        answers = json.loads(path.read_text())
        answers[0]["label"] = "10"
        path.write_text(json.dumps(answers))

    after = make(tmp_path / "2", change)
    assert differences(make(tmp_path / "1"), after) == ["golden: 1 of 2 common inputs have another answer"]


def test_damaged_bundle_is_not_compared(tmp_path: Path) -> None:
    before, after = make(tmp_path / "1"), make(tmp_path / "2")
    (after / bundle.LABELS).chmod(0o644)
    (after / bundle.LABELS).write_bytes(b"x")
    with pytest.raises(SealError, match=r"2/labels\.txt: differs"):
        differences(before, after)

"""Artefacts are measured side by side, and the fastest is recommended for the machine it was measured on."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from train.accuracy import Judgement
from train.formats import FORMATS
from train.model import ImageClassifier
from train.recommend import FOR_GPUS, Measured, lines, measure, recommend
from train.servable import Source


def judgement(artefact: str, accuracy: float) -> Judgement:
    return Judgement(
        artefact=artefact,
        dtype="int8",
        samples=100,
        accuracy=accuracy,
        checkpoint_accuracy=0.99,
        drop=0.0,
        limit=0.5,
        calibration_error=0.0,
        checkpoint_calibration_error=0.0,
        changed=(),
        problem=None,
        passed=True,
    )


def test_fastest_is_recommended_and_says_for_which_machine(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "train")
    measured = [
        Measured(
            artefact="onnx", runtime="onnxruntime", ms={1: 16.0, 8: 120.0}, start_ms=900.0, bytes=46_800_000
        ),
        Measured(
            artefact="openvino-int8",
            runtime="openvino",
            ms={1: 2.5, 8: 18.0},
            start_ms=700.0,
            bytes=12_000_000,
        ),
        Measured(
            artefact="aoti-bf16", runtime="aoti", ms={1: 2.0, 8: 30.0}, start_ms=300.0, bytes=24_000_000
        ),
    ]
    accuracies = {"onnx": 0.99, "openvino-int8": 0.988, "aoti-bf16": 0.99, "onnx-fp16": 0.99}
    judged = {name: judgement(name, accuracy) for name, accuracy in accuracies.items()}
    content: dict[str, Any] = recommend(measured, judged, ["onnx-fp16"], threads=2)
    assert content["recommended"] == "aoti-bf16"
    assert content["served"] == "openvino-int8"
    assert content["hardware"]["threads"] == 2
    assert content["hardware"].keys() == {"machine", "cpu", "instructions", "threads"}
    assert content["measured"][1]["accuracy"] == 0.988
    assert content["not_measured"].keys() == {"onnx-fp16"}
    assert caplog.messages == [
        *lines(content["measured"]),
        "recommended on this machine: aoti-bf16, the fastest at batch 1",
        "served will be openvino-int8, the fastest that servers can run",
        f"not measured, for GPUs only: onnx-fp16: {FOR_GPUS}",
    ]
    assert caplog.messages[0].split() == (
        ["artefact", "accuracy", "batch", "1,", "ms", "batch", "8,", "ms", "MB", "start,", "s"]
    )
    assert caplog.messages[2].split() == ["openvino-int8", "0.9880", "2.50", "18.00", "12.0", "0.7"]


def test_every_artefact_is_measured_at_batches_that_it_takes(tmp_path: Path) -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(12, 4))
    source = Source(
        classifier=ImageClassifier(network, (0.5,) * 3, (0.25,) * 3).eval(),
        image_size=8,
        max_batch=3,
        onnx=tmp_path / "model.onnx",
        calibration=np.zeros((0, 3, 8, 8), np.uint8),
    )
    artefacts = [FORMATS[name].write(name, source, tmp_path) for name in ("onnx", "torchscript")]
    pixels = np.zeros((2, 3, 8, 8), np.uint8)
    measured = measure(tmp_path, artefacts, pixels, max_batch=3, threads=1)
    assert [each.artefact for each in measured] == ["onnx", "torchscript"]
    for each in measured:
        assert each.ms.keys() == {1, 3}
        assert min(each.ms.values()) > 0
        assert each.start_ms > 0
    assert measured[0].bytes == (tmp_path / "model.onnx").stat().st_size

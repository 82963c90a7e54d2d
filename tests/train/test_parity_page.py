"""The page of the parity gate: the verdict first, then everything that it rests on."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.train.test_charts import Tags
from train.parity import TOLERANCES, Rows, Subject, compare
from train.parity_page import MOST_FAILURES, write_parity_page

LOGITS = 10 * np.eye(3, dtype=np.float32)
ROWS = Rows(
    kind="golden", names=["a<b>.png", "1.png", "2.png"], pixels=np.zeros(0, np.uint8), expected=LOGITS
)
JUDGED: dict[str, Any] = {
    "artefact": "model.int8.onnx",
    "dtype": "int8",
    "samples": 200,
    "accuracy": 0.985,
    "checkpoint_accuracy": 0.99,
    "drop": 0.5,
    "limit": 0.5,
    "calibration_error": 0.021,
    "checkpoint_calibration_error": 0.012,
    "changed": [{"from": "cat", "to": "dog", "images": 3}, {"from": "dog", "to": "ant", "images": 1}],
    "problem": None,
    "passed": True,
}


@pytest.fixture
def report() -> dict[str, Any]:
    """Of a gate that was passed, by a file in float32 and one in int8."""
    checks = [
        compare(ROWS, LOGITS + off, Subject(artefact, dtype, "golden", batch))
        for artefact, dtype, off, batch in (
            ("eager", "float32", np.float32(1e-5), 3),
            ("model.onnx", "float32", np.float32(1e-5), 1),
            ("model.onnx", "float32", np.float32(2**-12), 7),
            ("model.int8.onnx", "int8", np.float32(0.251), 1),
        )
    ]
    return {
        "verdict": "passed",
        "inputs": {ROWS.kind: list(ROWS.names)},
        "tolerances": {name: asdict(tolerance) for name, tolerance in TOLERANCES.items()},
        "checks": [asdict(check) for check in checks],
        "accuracy": [JUDGED],
    }


def words(path: Path, report: dict[str, Any], recommended: dict[str, Any] | None = None) -> str:
    """All of its text, with single spaces."""
    html = write_parity_page(path / "parity.html", "pets", report, recommended).read_text(encoding="utf-8")
    assert "http" not in html.replace("http-equiv", ""), "nothing is loaded from elsewhere"
    return " ".join(Tags(html[html.index("<body>") :].replace("<", " <")).text.split())


def test_verdict_comes_first_and_then_every_artefact(report: dict[str, Any], tmp_path: Path) -> None:
    page = words(tmp_path, report)
    assert "Verdict Passed 4 comparisons, 2 artefacts" in page
    assert "Tolerance used, at most 47.9 % model.onnx on golden inputs, batch 7" in page
    assert "Accuracy lost at most 0.50 points model.int8.onnx; 0.50 are allowed" in page
    assert "Answers changed 4 of 1 × 200 to the validation split" in page
    assert "eager float32 1" in page
    assert "model.onnx float32 2" in page
    assert "model.int8.onnx int8 1 0.251 10.0 % 98.5 % 0.50 4 passed" in page
    assert "golden 3 a<b>.png, 1.png, 2.png" in page
    assert "float16 0.01 0.02 golden inputs" in page
    assert "model.int8.onnx cat dog 3 model.int8.onnx dog ant 1" in page
    assert "failed" not in page


def test_failures_are_told_in_the_words_of_the_error(report: dict[str, Any], tmp_path: Path) -> None:
    """Case C06."""
    nan = Subject("model.onnx", "float32", "golden", 2).failed(
        "model.onnx is not finite (NaN or infinity) for 1.png"
    )
    report |= {"verdict": "failed", "accuracy": [], "checks": [*report["checks"], asdict(nan)]}
    page = words(tmp_path, report)
    assert "Verdict Failed model.onnx; nothing was published" in page
    assert "golden inputs, batch 2: model.onnx is not finite (NaN or infinity) for 1.png" in page
    assert "not judged: the comparisons failed" in page
    report["checks"] += [asdict(nan)] * MOST_FAILURES
    assert "The first 20 of 21 failures." in words(tmp_path, report)


def test_lost_accuracy_is_told_with_what_is_confused(report: dict[str, Any], tmp_path: Path) -> None:
    report |= {"verdict": "failed", "accuracy": [{**JUDGED, "drop": 2.0, "passed": False}]}
    page = words(tmp_path, report)
    assert "Verdict Failed model.int8.onnx; nothing was published" in page
    assert "2.00 percentage points below the checkpoint's 0.9900" in page
    assert "most often cat became dog (3 images)" in page


def test_float32_alone_is_said_not_to_be_judged(report: dict[str, Any], tmp_path: Path) -> None:
    assert "not judged: all artefacts compute in float32" in words(tmp_path, {**report, "accuracy": []})


def test_recommendation_is_shown_with_what_was_not_measured(report: dict[str, Any], tmp_path: Path) -> None:
    recommended = {
        "recommended": "aoti",
        "served": "onnx",
        "by": "median latency",
        "hardware": {"cpu": "Example 9000", "threads": 2},
        "measured": [
            {
                "artefact": "onnx",
                "ms": {"1": 16.2, "8": 119.0},
                "start_ms": 900,
                "bytes": 46800000,
                "accuracy": 0.99,
            }
        ],
        "not_measured": {"onnx-fp16": "it is for GPUs"},
    }
    page = words(tmp_path, report, recommended)
    assert "Recommended on Example 9000 with 2 threads: aoti, by median latency. Served: onnx." in page
    assert "onnx 99.0 % 16.20 119.00 46.80 0.90" in page
    assert "onnx-fp16 was not measured: it is for GPUs." in page
    assert "Speed" not in words(tmp_path, report)


def test_equal_reports_give_equal_pages(report: dict[str, Any], tmp_path: Path) -> None:
    again = json.loads(json.dumps(report))
    first = write_parity_page(tmp_path / "a.html", "pets", report).read_bytes()
    assert write_parity_page(tmp_path / "b.html", "pets", again).read_bytes() == first

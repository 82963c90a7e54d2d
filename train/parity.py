"""The parity gate: nothing is published whose answers differ from the model that was trained.

Each check runs the artefact on its real runtime and compares with eager PyTorch. Tolerances are absolute, on
logits, per dtype. A NaN or an infinity fails by name: comparisons with NaN are false, so it would pass otherwise.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime
import torch

from slipway.contract import INPUT, LOGITS, PROBABILITIES
from slipway.errors import SlipwayError
from train.model import ImageClassifier, inference

# float32: ten times what ONNX Runtime and eager differ by on a ResNet (5e-6); cf. NVIDIA/TensorRT issue 2709 on
# judging reduced precision by the tolerance of another.
TOLERANCES = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 6e-2}

Pixels = npt.NDArray[np.uint8]
Logits = npt.NDArray[np.float32]


class ParityError(SlipwayError):
    """An artefact answers differently from the trained model."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """One comparison. max_abs and max_relative are over all logits; null where a value was not finite."""

    artefact: str
    reference: str
    inputs: str
    batch: int
    dtype: str
    max_abs: float | None
    max_relative: float | None
    top1_agreement: float
    tolerance: float
    passed: bool


def run_gate(classifier: ImageClassifier, artefact: Path, golden: Pixels, max_batch: int) -> dict[str, Any]:
    """Compare an ONNX file with eager on golden and random inputs at batches 1, 2, 7 and max, and row by row.

    golden: uint8 [n, 3, size, size]. Returns the report that goes into the bundle as `parity.json`; its `verdict`
    is `passed` or `failed`. Use `require_passed` on it.
    """
    session = open_session(artefact)
    noise = np.random.default_rng(0).integers(0, 256, (max_batch, *golden.shape[1:]), dtype=np.uint8)
    checks = []
    for name, pixels in (("golden", golden), ("random", noise)):
        expected = eager_logits(classifier, pixels)
        for batch in sorted({1, 2, min(7, max_batch), max_batch}):
            actual = in_batches(lambda part: onnx_logits(session, part), pixels, batch)
            checks.append(compare(expected, actual, artefact.name, "eager", name, batch))
    alone = in_batches(lambda part: onnx_logits(session, part), golden, 1)
    together = in_batches(lambda part: onnx_logits(session, part), golden, max_batch)
    checks.append(compare(alone, together, artefact.name, "the same row alone", "golden", max_batch))
    return {
        "verdict": "passed" if all(check.passed for check in checks) else "failed",
        "tolerances": TOLERANCES,
        "checks": [asdict(check) for check in checks],
    }


def require_passed(report: dict[str, Any]) -> None:
    """Raises ParityError naming the first failed check: which artefact, which input, how far."""
    for check in report["checks"]:
        if not check["passed"]:
            distance = "not finite" if check["max_abs"] is None else f"off by {check['max_abs']:.3g}"
            raise ParityError(
                f"{check['artefact']} against {check['reference']} on {check['inputs']} inputs, batch "
                f"{check['batch']}: logits {distance} (tolerance {check['tolerance']:g}), top-1 agreement "
                f"{check['top1_agreement']:.3f}. Nothing was published"
            )


def compare(
    expected: Logits, actual: Logits, artefact: str, reference: str, inputs: str, batch: int
) -> Check:
    """Compare float32 [n, classes] logits."""
    dtype = str(actual.dtype)
    finite = bool(np.isfinite(actual).all() and np.isfinite(expected).all())
    same_shape = expected.shape == actual.shape
    difference = np.abs(expected - actual) if finite and same_shape else None
    max_abs = None if difference is None else float(difference.max())
    agreement = float((expected.argmax(1) == actual.argmax(1)).mean()) if same_shape else 0.0
    return Check(
        artefact=artefact,
        reference=reference,
        inputs=inputs,
        batch=batch,
        dtype=dtype,
        max_abs=max_abs,
        max_relative=None if difference is None else float((difference / (np.abs(expected) + 1e-6)).max()),
        top1_agreement=agreement,
        tolerance=TOLERANCES[dtype],
        passed=max_abs is not None and max_abs <= TOLERANCES[dtype] and agreement == 1.0,
    )


def open_session(artefact: Path) -> onnxruntime.InferenceSession:
    return onnxruntime.InferenceSession(str(artefact), providers=["CPUExecutionProvider"])


def eager_logits(classifier: ImageClassifier, pixels: Pixels) -> Logits:
    with inference(classifier):
        return classifier(torch.from_numpy(pixels)).numpy()


def onnx_logits(session: onnxruntime.InferenceSession, pixels: Pixels) -> Logits:
    """Logits of one batch. Raises ParityError where the probabilities are not the softmax of the logits."""
    logits, probabilities = session.run([LOGITS, PROBABILITIES], {INPUT: pixels})
    softmax = torch.from_numpy(logits).softmax(dim=1).numpy()
    if np.isfinite(logits).all() and not np.allclose(softmax, probabilities, atol=1e-5):
        raise ParityError("the output `probabilities` is not the softmax of the output `logits`")
    return logits


def in_batches(run: Callable[[Pixels], Logits], pixels: Pixels, batch: int) -> Logits:
    """Run all rows in batches of exactly `batch`, the last one filled up with repeated rows."""
    starts = range(0, len(pixels), batch)
    parts = [np.take(pixels, range(start, start + batch), axis=0, mode="wrap") for start in starts]
    return np.concatenate([run(part) for part in parts])[: len(pixels)]

"""The parity gate: nothing is published whose answers differ from the model that was trained.

Each artefact runs on its real runtime, in a process of its own, and is compared with the model computed in float64.
A NaN or an infinity fails by name: comparisons with NaN are false, so it would pass otherwise. Reduced precision is
judged once more, by its accuracy: `accuracy.py`.
"""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from slipway.artefact import Artefact, ArtefactError
from slipway.contract import LOGITS, PROBABILITIES
from slipway.errors import SlipwayError
from train.model import ImageClassifier, inference
from train.runtime import Runtime, RuntimeFailure, running

GOLDEN = "golden"
REFERENCE = "float64"
EAGER = "eager"

Pixels = npt.NDArray[np.uint8]
Logits = npt.NDArray[np.float32]


class ParityError(SlipwayError):
    """An artefact answers differently from the trained model."""


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """How far logits may be off: `absolute` + `relative` x the largest logit expected in the same check.

    every_input: whether this holds on nasty and random inputs too, and every row must keep its best class. If not,
    these inputs are only held to be finite: int8 clips, by design, what no training image comes near.
    """

    absolute: float
    relative: float
    every_input: bool


# float32: fifty times what runtimes and PyTorch differed by on a ResNet-18 (1.1e-6 of the largest logit), because
# deeper networks round more often; 1 % on the weights of one layer is far outside. The others
# catch what is wired wrongly; whether they are good enough, their accuracy tells. Cf. NVIDIA/TensorRT issue 2709 on
# judging reduced precision by the tolerance of another.
TOLERANCES = {
    "float32": Tolerance(absolute=1e-5, relative=5e-5, every_input=True),
    "float16": Tolerance(absolute=1e-2, relative=0.02, every_input=False),
    "bfloat16": Tolerance(absolute=1e-2, relative=0.05, every_input=False),
    "int8": Tolerance(absolute=1e-2, relative=0.25, every_input=False),
}


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Inputs of one kind: a name a row, pixels uint8 [n, 3, size, size], and the logits expected, [n, classes].

    reference: whose these logits are.
    """

    kind: str
    names: Sequence[str]
    pixels: Pixels
    expected: Logits
    reference: str = REFERENCE


@dataclass(frozen=True, kw_only=True)
class Check:
    """One comparison. Figures are over all rows, and null where they could not be computed.

    max_relative: of the largest logit expected. confidence_drift: largest change of a probability. furthest: the row
    that is furthest off. tolerance: null where the distance is told, not judged. problem: what failed, if it is not
    the distance.
    """

    artefact: str
    reference: str
    inputs: str
    batch: int
    dtype: str
    max_abs: float | None = None
    max_relative: float | None = None
    top1_agreement: float | None = None
    confidence_drift: float | None = None
    furthest: str | None = None
    tolerance: float | None = None
    problem: str | None = None
    passed: bool


def run_gate(
    classifier: ImageClassifier,
    directory: Path,
    artefacts: Iterable[Artefact],
    inputs: Iterable[Rows],
    *,
    max_batch: int,
    threads: int,
) -> dict[str, Any]:
    """Compare every artefact, and eager PyTorch, with the reference at batches 1, 2, 3, 7 and max, and row by row.

    Returns the report that goes into the bundle as `parity.json`; its `verdict` is `passed` or `failed`. Use
    `require_passed` on it.
    """
    inputs = list(inputs)
    checks = [
        compare(
            rows,
            eager_logits(classifier, rows.pixels),
            Subject(EAGER, "float32", rows.kind, len(rows.names)),
        )
        for rows in inputs
    ]
    for artefact in artefacts:
        checks += check_artefact(directory, artefact, inputs, max_batch, threads)
    return {
        "verdict": "passed" if all(check.passed for check in checks) else "failed",
        "inputs": {rows.kind: list(rows.names) for rows in inputs},
        "tolerances": {name: asdict(tolerance) for name, tolerance in TOLERANCES.items()},
        "checks": [asdict(check) for check in checks],
    }


def require_passed(report: dict[str, Any]) -> None:
    """Raises ParityError naming the first failed check: which artefact, which input, how far."""
    for check in report["checks"]:
        if not check["passed"]:
            raise ParityError(f"{describe(Check(**check))}. Nothing was published")


def describe(check: Check) -> str:
    """A failed check in words: which artefact, which input, how far."""
    subject = f"{check.artefact} against {check.reference} on {check.inputs} inputs, batch {check.batch}"
    if check.problem is not None:
        return f"{subject}: {check.problem}"
    return (
        f"{subject}: logits off by {check.max_abs:.3g} (tolerance {check.tolerance:.3g}), most of all for "
        f"{check.furthest}; top-1 agreement {check.top1_agreement:.3f}"
    )


@dataclass(frozen=True)
class Subject:
    """What is compared: on which inputs, at which batch size, against what."""

    artefact: str
    dtype: str
    inputs: str
    batch: int
    reference: str = REFERENCE

    def failed(self, problem: str) -> Check:
        return Check(**vars(self), problem=problem, passed=False)

    @property
    def judged(self) -> bool:
        """Whether the distance counts, or is only told."""
        told = self.inputs != GOLDEN and self.reference == REFERENCE
        return TOLERANCES[self.dtype].every_input or not told


def check_artefact(
    directory: Path, artefact: Artefact, inputs: Sequence[Rows], max_batch: int, threads: int
) -> list[Check]:
    """Every comparison of one artefact, in one process. One that does not load is one failed check."""
    try:
        with running(directory, artefact, threads) as runtime:
            return [check for rows in inputs for check in _check_rows(runtime, rows, max_batch)]
    except (RuntimeFailure, ArtefactError) as error:
        return [Subject(artefact.file, artefact.precision, "no", 0).failed(str(error))]


def _check_rows(runtime: Runtime, rows: Rows, max_batch: int) -> list[Check]:
    file, dtype = runtime.artefact.file, runtime.artefact.precision
    checks, answers = [], {}
    for batch in sorted({1, 2, min(3, max_batch), min(7, max_batch), max_batch}):
        subject = Subject(file, dtype, rows.kind, batch, rows.reference)
        try:
            answers[batch] = in_batches(lambda part: logits_of(runtime.answer(part)), rows.pixels, batch)
            checks.append(compare(rows, answers[batch], subject))
        except (RuntimeFailure, ParityError) as error:
            checks.append(subject.failed(str(error)))
    if {1, max_batch} <= answers.keys():
        alone = Rows(kind=rows.kind, names=rows.names, pixels=rows.pixels, expected=answers[1])
        subject = Subject(file, dtype, rows.kind, max_batch, reference="the same row alone")
        checks.append(compare(alone, answers[max_batch], subject))
    return checks


def compare(rows: Rows, actual: Logits, subject: Subject) -> Check:
    """Compare float32 [n, classes] logits with those expected."""
    expected, tolerance = rows.expected, TOLERANCES[subject.dtype]
    if actual.shape != expected.shape:
        return subject.failed(f"logits of shape {list(actual.shape)} instead of {list(expected.shape)}")
    for whose, logits in ((subject.artefact, actual), (subject.reference, expected)):
        if not (finite := np.isfinite(logits).all(axis=1)).all():
            return subject.failed(
                f"{whose} is not finite (NaN or infinity) for {rows.names[int(finite.argmin())]}"
            )
    difference = np.abs(expected - actual)
    largest, max_abs = float(np.abs(expected).max()), float(difference.max())
    allowed = tolerance.absolute + tolerance.relative * largest
    agreement = float((expected.argmax(1) == actual.argmax(1)).mean())
    return Check(
        **vars(subject),
        max_abs=max_abs,
        max_relative=max_abs / (largest + 1e-6),
        top1_agreement=agreement,
        confidence_drift=float(np.abs(softmax(expected) - softmax(actual)).max()),
        furthest=rows.names[int(difference.max(axis=1).argmax())],
        tolerance=allowed if subject.judged else None,
        passed=not subject.judged or (max_abs <= allowed and (agreement == 1.0 or not tolerance.every_input)),
    )


def reference_logits(classifier: ImageClassifier, pixels: Pixels) -> Logits:
    """What the model answers when computed in float64, rounded at the very end. It is slow."""
    double = copy.deepcopy(classifier).double()
    with inference(double):
        parts = [double(part) for part in torch.split(torch.from_numpy(pixels), 8)]
    return torch.cat(parts).numpy()


def eager_logits(classifier: ImageClassifier, pixels: Pixels) -> Logits:
    with inference(classifier):
        return classifier(torch.from_numpy(pixels)).numpy()


def logits_of(answers: Mapping[str, npt.NDArray[Any]]) -> Logits:
    """Raises ParityError where the answers are not float32 logits and the softmax of them, by these names."""
    described = {name: str(array.dtype) for name, array in answers.items()}
    if described != {LOGITS: "float32", PROBABILITIES: "float32"}:
        raise ParityError(f"the outputs are {described} instead of float32 {LOGITS} and {PROBABILITIES}")
    logits = answers[LOGITS]
    if np.isfinite(logits).all() and not np.allclose(softmax(logits), answers[PROBABILITIES], atol=1e-5):
        raise ParityError("the output `probabilities` is not the softmax of the output `logits`")
    return logits


def softmax(logits: Logits) -> Logits:
    return torch.from_numpy(logits).softmax(dim=1).numpy()


def in_batches(run: Callable[[Pixels], Logits], pixels: Pixels, batch: int) -> Logits:
    """Run all rows in batches of exactly `batch`, the last one filled up with repeated rows."""
    starts = range(0, len(pixels), batch)
    parts = [np.take(pixels, range(start, start + batch), axis=0, mode="wrap") for start in starts]
    return np.concatenate([run(part) for part in parts])[: len(pixels)]

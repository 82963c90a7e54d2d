"""Is an artefact of reduced precision as good as its checkpoint? Judged on the whole validation split."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torchmetrics.functional.classification import multiclass_calibration_error

from slipway.contract import LOGITS
from train.loader import Batch
from train.model import ImageClassifier
from train.parity import Logits, ParityError, eager_logits, softmax
from train.runtime import Runtime, RuntimeFailure

Labels = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """An artefact beside the float32 checkpoint, on the same images.

    accuracy, checkpoint_accuracy: share of images whose best class is right. drop: of accuracy, in percentage points.
    calibration_error: expected, over 15 bins of confidence, as a share. changed: how often the best class of the
    checkpoint (`from`) became another one (`to`), most frequent first.
    """

    artefact: str
    dtype: str
    samples: int
    accuracy: float
    checkpoint_accuracy: float
    drop: float
    limit: float
    calibration_error: float
    checkpoint_calibration_error: float
    changed: Sequence[dict[str, Any]]
    problem: str | None
    passed: bool


def judge(
    runtimes: Sequence[Runtime],
    classifier: ImageClassifier,
    batches: Iterable[Batch],
    classes: Sequence[str],
    limit: float,
) -> list[Judgement]:
    """Ask every artefact and the checkpoint about the same batches. limit: largest drop, in percentage points."""
    labels, expected = [], []
    answers: list[list[Logits]] = [[] for _ in runtimes]
    failures: dict[int, str] = {}
    for batch in batches:
        pixels = batch.images.numpy()
        labels.append(batch.labels.numpy())
        expected.append(eager_logits(classifier, pixels))
        for index, runtime in enumerate(runtimes):
            try:
                answers[index].append(runtime.answer(pixels)[LOGITS])
            except RuntimeFailure as error:
                failures[index] = str(error)
                answers[index].append(np.full_like(expected[-1], np.nan))
    truth, reference = np.concatenate(labels), np.concatenate(expected)
    return [
        _judgement(runtime, np.concatenate(given), reference, truth, classes, limit, failures.get(index))
        for index, (runtime, given) in enumerate(zip(runtimes, answers, strict=True))
    ]


def require_good(report: dict[str, Any]) -> None:
    """Raises ParityError naming the first artefact that lost too much."""
    for judged in report["accuracy"]:
        if not judged["passed"]:
            raise ParityError(f"{describe(judged)}. Nothing was published")


def describe(judged: Mapping[str, Any]) -> str:
    """A failed judgement in words: which artefact, how much it lost, and what it confuses."""
    most = "".join(
        f"; most often {change['from']} became {change['to']} ({change['images']} images)"
        for change in judged["changed"][:1]
    )
    why = judged["problem"] or (
        f"accuracy {judged['accuracy']:.4f} on {judged['samples']} validation images is {judged['drop']:.2f} "
        f"percentage points below the checkpoint's {judged['checkpoint_accuracy']:.4f}; "
        f"export.max_accuracy_drop allows {judged['limit']:g}{most}"
    )
    return f"{judged['artefact']}: {why}"


def _judgement(
    runtime: Runtime,
    actual: Logits,
    reference: Logits,
    truth: Labels,
    classes: Sequence[str],
    limit: float,
    failure: str | None,
) -> Judgement:
    before, after = reference.argmax(1), actual.argmax(1)
    accuracy, checkpoint = float((after == truth).mean()), float((before == truth).mean())
    drop = 100 * (checkpoint - accuracy)
    lost = int((~np.isfinite(actual).all(axis=1)).sum())
    problem = f"its logits are not finite (NaN or infinity) for {lost} validation images" if lost else None
    pairs = Counter(zip(before[before != after].tolist(), after[before != after].tolist(), strict=True))
    return Judgement(
        artefact=runtime.artefact.file,
        dtype=runtime.artefact.precision,
        samples=len(truth),
        accuracy=accuracy,
        checkpoint_accuracy=checkpoint,
        drop=drop,
        limit=limit,
        calibration_error=0.0 if lost else _calibration_error(actual, truth),
        checkpoint_calibration_error=_calibration_error(reference, truth),
        changed=[
            {"from": classes[was], "to": classes[became], "images": count}
            for (was, became), count in pairs.most_common()
        ],
        problem=failure or problem,
        passed=not lost and drop <= limit + 1e-9,  # 0.5 points of accuracy are not exactly 0.5 in binary
    )


def _calibration_error(logits: Logits, truth: Labels) -> float:
    probabilities = torch.from_numpy(softmax(logits))
    return float(multiclass_calibration_error(probabilities, torch.from_numpy(truth), probabilities.shape[1]))


def as_report(judgements: Iterable[Judgement]) -> list[dict[str, Any]]:
    return [asdict(judgement) for judgement in judgements]

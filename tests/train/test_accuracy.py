"""Reduced precision is judged by what it costs in accuracy, on every validation image."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from slipway.contract import LOGITS
from train.accuracy import as_report, judge, require_good
from train.loader import Batch
from train.model import ImageClassifier
from train.parity import ParityError
from train.runtime import RuntimeFailure

CLASSES = ("ant", "bee", "cat")
SAMPLES = 200


class Colour(nn.Module):
    """The class is the brightest channel."""

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return 4 * image.mean(dim=(2, 3))


class Answering:
    """In the place of a runtime: the right answers, but for the first `wrong` images, which become ants."""

    artefact = SimpleNamespace(file="model.int8.onnx", precision="int8")

    def __init__(self, wrong: int, value: float = 9.0) -> None:
        self.left, self.value = wrong, value

    def answer(self, pixels: np.ndarray) -> dict[str, np.ndarray]:
        logits = pixels.mean(axis=(2, 3), dtype=np.float32) / 32
        spoiled = min(self.left, len(logits))
        self.left -= spoiled
        logits[:spoiled, 0] = self.value
        return {LOGITS: logits}


def batches() -> list[Batch]:
    """All bees, in batches of 64, the last one smaller."""
    images = torch.zeros(SAMPLES, 3, 4, 4, dtype=torch.uint8)
    images[:, 1] = 255
    labels = torch.ones(SAMPLES, dtype=torch.int64)
    return [
        Batch(images=part, labels=label, weights=torch.ones(len(part)))
        for part, label in zip(torch.split(images, 64), torch.split(labels, 64), strict=True)
    ]


def report(*runtimes: Answering, limit: float = 0.5) -> dict[str, Any]:
    classifier = ImageClassifier(Colour(), (0.5,) * 3, (0.25,) * 3).eval()
    anything: Any = runtimes
    return {"accuracy": as_report(judge(anything, classifier, batches(), CLASSES, limit))}


def test_every_image_counts_once() -> None:
    (judged,) = report(Answering(0))["accuracy"]
    assert (judged["samples"], judged["accuracy"], judged["checkpoint_accuracy"]) == (SAMPLES, 1.0, 1.0)
    assert judged["changed"] == []
    assert judged["passed"]


@pytest.mark.parametrize(("wrong", "passes"), [(1, True), (2, False)])
def test_limit_is_in_percentage_points(wrong: int, passes: bool) -> None:
    """Case C06: one of 200 is exactly the half point that is allowed."""
    (judged,) = report(Answering(wrong))["accuracy"]
    assert judged["passed"] is passes
    assert judged["drop"] == pytest.approx(wrong / 2)
    assert judged["changed"] == [{"from": "bee", "to": "ant", "images": wrong}]


def test_artefact_that_lost_too_much_is_named_with_what_it_confuses() -> None:
    with pytest.raises(
        ParityError,
        match=r"^model\.int8\.onnx: accuracy 0\.8500 on 200 validation images is 15\.00 percentage points below "
        r"the checkpoint's 1\.0000; export\.max_accuracy_drop allows 0\.5; most often bee became ant \(30 images\)",
    ):
        require_good(report(Answering(0), Answering(30)))


class Dying(Answering):
    """Cannot answer the last batch, which is smaller."""

    def answer(self, pixels: np.ndarray) -> dict[str, np.ndarray]:
        if len(pixels) < 64:
            raise RuntimeFailure("it died")
        return super().answer(pixels)


def test_artefact_that_fails_on_the_way_is_judged_with_what_it_says() -> None:
    good, bad = report(Answering(0), Dying(0), limit=100)["accuracy"]
    assert good["passed"]
    assert not bad["passed"]
    assert bad["problem"] == "it died"


def test_nan_fails_by_name_although_it_drops_no_point() -> None:
    """Case C06."""
    judged = report(Answering(3, float("nan")), limit=100)
    with pytest.raises(
        ParityError, match=r"logits are not finite \(NaN or infinity\) for 3 validation images"
    ):
        require_good(judged)

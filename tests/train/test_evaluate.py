import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from slipway import sealed
from tests.train.conftest import MakeConfig, MakeFolder
from train.config import HardwareConfig, TrainingConfig
from train.evaluate import KIND, evaluate, predict, score, summarise, warn_of_one_answer
from train.fit import fit
from train.folder import read_folder
from train.hardware import launch
from train.loader import Batch
from train.runs import read_metrics, run_for


class Oracle(nn.Module):
    """Answers with the class written into the first pixel; wrong where that pixel is 9."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.5)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.dropout(nn.functional.one_hot(image[:, 0, 0, 0].long() % 4, 4).float() * 5)


def batches(values: list[int], labels: list[int], size: int) -> list[Batch]:
    images = torch.zeros(len(values), 3, 2, 2, dtype=torch.uint8)
    images[:, 0, 0, 0] = torch.tensor(values)
    parts = [slice(start, start + size) for start in range(0, len(values), size)]
    return [
        Batch(images=images[p], labels=torch.tensor(labels)[p], weights=torch.ones(len(labels[p])))
        for p in parts
    ]


@pytest.mark.parametrize("size", [1, 4, 7, 21])
def test_score_does_not_depend_on_the_batch_size(size: int) -> None:
    """Case B06: a mean of batch means gives the last small batch more weight."""
    values = [9, *[n % 4 for n in range(20)]]
    labels = [0, *[n % 4 for n in range(20)]]
    machine = launch(HardwareConfig(accelerator="cpu"), TrainingConfig())
    result = score(Oracle(), batches(values, labels, size), machine)
    assert result.samples == 21
    assert result.accuracy == 20 / 21
    reference = score(Oracle(), batches(values, labels, 21), machine)
    assert result.loss == reference.loss


def test_evaluation_restores_the_mode_it_found() -> None:
    for training in (True, False):
        model = Oracle().train(training)
        predict(model, batches([1, 2], [1, 2], 2), torch.device("cpu"))
        assert model.training is training
        assert model.dropout.training is training


def test_summary_counts_every_sample_and_survives_an_absent_class() -> None:
    logits = np.eye(4, dtype=np.float32)[[0, 1, 1, 2]]
    summary = summarise(logits, np.array([0, 1, 2, 2]), ("a", "b", "c", "d"))
    assert summary["accuracy"] == 0.75
    assert np.sum(summary["confusion"]) == 4
    assert summary["confusion"][2] == [0, 1, 1, 0]
    assert summary["per_class"][3] == {"class": "d", "precision": 0.0, "recall": 0.0, "f1": 0.0, "support": 0}


def test_model_that_gives_every_image_one_answer_is_called_out(
    make_folder: MakeFolder,
    make_config: MakeConfig,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """MobileNetV3 does it after few steps, on most machines. Said again of an evaluation that is there already."""
    config = make_config(make_folder(test=2), training__epochs="1")
    folder = read_folder(config.data)
    fit(config, folder)
    run = run_for(config, folder)
    monkeypatch.setattr("train.evaluate.predict", lambda *_: np.eye(3, dtype=np.float32)[[1] * 6])
    for _ in range(2):
        caplog.clear()
        sealed.verify(evaluate(config, run, folder), KIND)
        (warning,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
        assert "all 6 images of test were taken for bee: the model has not learned to tell classes" in warning


@pytest.mark.parametrize(
    ("predicted", "labels"),
    [([0, 1, 1], [0, 1, 2]), ([1, 1, 1], [1, 1, 1]), ([1, 1, 1], [2, 2, 2])],
    ids=["two answers", "one class, right", "one class, wrong"],
)
def test_no_warning_where_there_is_more_than_one_answer_or_only_one_class(
    predicted: list[int], labels: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    logits = np.eye(3, dtype=np.float32)[predicted]
    warn_of_one_answer({"split": "test", **summarise(logits, np.array(labels), ("a", "b", "c"))})
    assert not caplog.records


def test_offline_evaluation_equals_the_one_in_training(
    make_folder: MakeFolder, make_config: MakeConfig
) -> None:
    """Case B21, on one process: the checkpoint holds all that evaluation depends on."""
    config = make_config(make_folder(train=12, val=9))
    folder = read_folder(config.data)
    run = run_for(config, folder)
    fit(config, folder)
    made = evaluate(config, run, folder, "val")
    metrics = json.loads((made / "metrics.json").read_text())
    step = int(metrics["checkpoint"].removeprefix("step-"))
    logged = next(line for line in read_metrics(run) if line["kind"] == "evaluation" and line["step"] == step)
    assert metrics["accuracy"] == logged["accuracy"]
    assert metrics["loss"] == logged["loss"]
    check_predictions(made, config.data.root)
    assert evaluate(config, run, folder, "val") == made
    check_damaged_one_is_made_again(made, lambda: evaluate(config, run, folder, "val"))


def check_damaged_one_is_made_again(made: Path, evaluate_again: Callable[[], Path]) -> None:
    seal = sealed.read_manifest(made).seal
    (made / "metrics.json").chmod(0o644)
    (made / "metrics.json").write_text("{}")
    assert evaluate_again() == made
    assert sealed.verify(made, KIND).seal == seal
    (aside,) = made.parent.glob(f".damaged-{made.name}-*")
    assert (aside / "metrics.json").read_text() == "{}"


def check_predictions(made: Path, root: Path) -> None:
    sealed.verify(made, KIND)
    lines = [json.loads(line) for line in (made / "predictions.jsonl").read_text().splitlines()]
    assert len(lines) == 27
    for line in lines:
        assert (root / line["file"]).parent.name == line["label"]
        assert sum(line["probabilities"]) == pytest.approx(1, abs=1e-6)
        assert ("ant", "bee", "cat")[int(np.argmax(line["probabilities"]))] == line["predicted"]

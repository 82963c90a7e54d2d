"""Evaluation: every sample once, exact counts, in full precision."""

import json
import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from sklearn.metrics import confusion_matrix, precision_recall_fscore_support
from torch import nn
from torch.nn.functional import cross_entropy

from slipway import hashing, sealed
from slipway.contract import Signature
from slipway.source import code_hash
from train import checkpoint
from train.checkpoint import Choice
from train.config import Config
from train.dataset import DataError, Dataset
from train.hardware import Machine
from train.loader import Batch, PlainSamples, plain_batches
from train.model import ImageClassifier, build_model, inference
from train.runs import Run
from train.split import Split

KIND = "evaluation"
METRICS = "metrics.json"
PREDICTIONS = "predictions.jsonl"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Score:
    """loss: mean cross entropy. accuracy: share of samples whose top-1 is right. Both over `samples`."""

    samples: int
    loss: float
    accuracy: float


def score(model: nn.Module, batches: Iterable[Batch], machine: Machine) -> Score:
    """Score a model over the batches of all ranks together. Restores the mode it found.

    Runs in float32 whatever training runs in: the exported model is float32, and the two must agree.
    Raises DataError on every rank where one of them has an image that cannot be decoded.
    """
    failure, losses = "", list[torch.Tensor]()
    totals = torch.zeros(4, dtype=torch.float64, device=machine.device)
    with inference(model):
        for on_host in batches:
            batch = on_host.to(machine.device)
            logits = model(batch.images)
            losses.append(losses_of(logits, batch.labels) * batch.weights)
            right = logits.argmax(dim=1) == batch.labels
            totals[1] += (right * batch.weights).sum()
            totals[2] += batch.weights.sum()
            failure = failure or batch.failure
    totals[0] = exact_sum(torch.cat(losses))
    totals[3] = failure != ""
    loss_sum, right_sum, samples, failures = machine.total(totals).tolist()
    if failures:
        raise DataError(machine.first_of(failure))
    return Score(samples=int(samples), loss=loss_sum / samples, accuracy=right_sum / samples)


def losses_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross entropy of each sample, float64 [samples]."""
    return cross_entropy(logits.double(), labels, reduction="none")


def exact_sum(losses: torch.Tensor) -> float:
    """Rounded once, so that on one rank it does not depend on how samples were dealt out to batches."""
    return math.fsum(losses.tolist())


def predict(model: nn.Module, batches: Iterable[Batch], device: torch.device) -> npt.NDArray[np.float32]:
    """Logits, float32 [samples, classes], in the order of the batches. Restores the mode it found."""
    with inference(model):
        return np.concatenate([model(batch.to(device).images).cpu().numpy() for batch in batches])


def evaluate(config: Config, run: Run, dataset: Dataset, split: Split = "test") -> Path:
    """Evaluate the best checkpoint of `run` on one split; returns a sealed directory.

    It holds `metrics.json` (accuracy, loss, confusion, per class) and `predictions.jsonl` (a line a file, with all
    probabilities), which serving is held against. An evaluation that exists already is returned as it is; a damaged one
    is set aside under a hidden name, and made again.
    """
    choice = checkpoint.best(run)
    seal = sealed.read_manifest(choice.directory).seal
    inputs = hashing.of_data([split, seal, choice.weights, dataset.fingerprint, code_hash("train.evaluate")])
    with sealed.only_one(run.evaluations, "this run's evaluation"):
        if made := sealed.made_from(run.evaluations, KIND, inputs):
            logger.info("evaluated already: %s", made)
        else:
            made = _evaluate(config, run, dataset, split, choice, inputs)
    warn_of_one_answer(json.loads((made / METRICS).read_text(encoding="utf-8")))
    return made


def load_classifier(config: Config, choice: Choice) -> tuple[ImageClassifier, Signature]:
    """The chosen weights in a plain model, and its contract. Raises SealError, CheckpointError."""
    signature = checkpoint.load_signature(choice.directory)
    classifier = build_model(
        config.model, len(signature.classes), config.image.size, signature.mean, signature.std
    )
    checkpoint.load_weights(choice, classifier)
    return classifier, signature


def _evaluate(config: Config, run: Run, dataset: Dataset, split: Split, choice: Choice, inputs: str) -> Path:
    model, signature = load_classifier(config, choice)
    name = choice.directory.name
    samples = PlainSamples(dataset, split, signature.preprocessing)
    batches = plain_batches(
        samples,
        config.training.micro_batch(ranks=1),
        rank=0,
        world_size=1,
        workers=config.data.workers,
    )
    logits = predict(model, batches, torch.device("cpu"))
    labels = np.array([sample.label for sample in samples.samples])
    metrics = {
        "checkpoint": name,
        "weights": choice.weights,
        "split": split,
        **summarise(logits, labels, signature.classes),
    }
    destination = run.evaluations / f"{name}-{split}-{inputs[:8]}"
    with sealed.stage(destination, kind=KIND, inputs=inputs) as staging:
        checkpoint.set_aside(destination)
        sealed.write_json(staging / METRICS, metrics)
        (staging / PREDICTIONS).write_text(predictions(samples, logits, signature.classes), encoding="utf-8")
    logger.info("%s accuracy %.4f on %d images (%s)", split, metrics["accuracy"], len(labels), name)
    return destination


def summarise(
    logits: npt.NDArray[np.float32], labels: npt.NDArray[np.int64], classes: tuple[str, ...]
) -> dict[str, Any]:
    """Metrics of [samples, classes] logits against [samples] labels. Rows of `confusion` are true classes."""
    everything = np.arange(len(classes))
    predicted = logits.argmax(axis=1)
    precision, recall, f1, support = precision_recall_fscore_support(
        labels, predicted, labels=everything, zero_division=0.0
    )
    return {
        "samples": len(labels),
        "accuracy": float((predicted == labels).mean()),
        "loss": exact_sum(losses_of(torch.from_numpy(logits), torch.from_numpy(labels))) / len(labels),
        "classes": list(classes),
        "confusion": confusion_matrix(labels, predicted, labels=everything).tolist(),
        "per_class": [
            {
                "class": name,
                "precision": float(precision[i]),
                "recall": float(recall[i]),
                "f1": float(f1[i]),
                "support": int(support[i]),
            }
            for i, name in enumerate(classes)
        ],
    }


def warn_of_one_answer(metrics: dict[str, Any]) -> None:
    """Say so where images of several classes all got the same answer: every gate behind this would let it pass."""
    confusion = np.array(metrics["confusion"])
    (answers,) = confusion.sum(axis=0).nonzero()
    if len(answers) == 1 and np.count_nonzero(confusion.sum(axis=1)) > 1:
        logger.warning(
            "WARNING: all %d images of %s were taken for %s: the model has not learned to tell classes apart. Look at "
            "the losses, and train longer (training.epochs): batch statistics that follow slowly, such as those of "
            "MobileNetV3 with momentum 0.01, need some hundreds of steps",
            metrics["samples"],
            metrics["split"],
            metrics["classes"][answers[0]],
        )


def predictions(samples: PlainSamples, logits: npt.NDArray[np.float32], classes: tuple[str, ...]) -> str:
    """The text of `predictions.jsonl`: a line for each sample, [samples, classes] logits as probabilities."""
    probabilities = torch.from_numpy(logits).softmax(dim=1).numpy()
    lines = [
        {
            "file": sample.file,
            "sha256": sample.sha256,
            "label": classes[sample.label],
            "predicted": classes[int(row.argmax())],
            "probabilities": [float(value) for value in row],
        }
        for sample, row in zip(samples.samples, probabilities, strict=True)
    ]
    return "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)

"""Checkpoint -> bundle: exported, proven, sealed."""

import logging
import shutil
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from slipway import bundle, compatibility, hashing, sealed
from slipway.bundle import Golden
from slipway.contract import Signature
from slipway.preprocessing import preprocess
from slipway.source import code_hash
from train import checkpoint, parity, runs
from train.checkpoint import Choice
from train.config import Config
from train.dataset import Dataset, Sample
from train.evaluate import load_classifier
from train.model import ImageClassifier
from train.onnx_file import write_onnx
from train.runs import Run

logger = logging.getLogger(__name__)


def export(config: Config, run: Run, folder: Dataset, evaluation: Path) -> Path:
    """Export the best checkpoint of `run`; returns the sealed bundle, an existing one if nothing changed.

    Raises:
        TrainingModeError, ExportError: the model cannot be exported as declared.
        ParityError: the artefact answers differently from the trained model; nothing is published, and the
            report is kept in the run directory.
    """
    choice = checkpoint.best(run)
    inputs = hashing.of_data(
        {
            "checkpoint": sealed.read_manifest(choice.directory).seal,
            "weights": choice.weights,
            "evaluation": sealed.read_manifest(evaluation).seal,
            "export": [config.export.max_batch, config.export.golden_per_class, config.export.golden_limit],
            "code": code_hash("train.export"),
            "pins": hashing.of_file(compatibility.TABLE),
        }
    )
    bundles = config.run.bundles / config.run.name
    with sealed.only_one(bundles, "this model's bundles"):
        if made := sealed.made_from(bundles, bundle.KIND, inputs):
            logger.info("exported already: %s", made)
            return made
        destination = bundles / str(_next_version(bundles))
        with sealed.stage(destination, kind=bundle.KIND, inputs=inputs) as staging:
            _fill(staging, config, run, folder, choice, evaluation)
    bundle.open_bundle(destination)
    logger.info("exported and proven: %s", destination)
    return destination


def _fill(staging: Path, config: Config, run: Run, folder: Dataset, choice: Choice, evaluation: Path) -> None:
    classifier, trained = load_classifier(config, choice)
    classifier.eval()
    signature = replace(trained, max_batch=config.export.max_batch)
    write_onnx(
        classifier,
        staging / bundle.MODEL,
        image_size=signature.preprocessing.image_size,
        max_batch=signature.max_batch,
        pins=compatibility.load(),
    )
    signature.save(staging / bundle.SIGNATURE)
    (staging / bundle.LABELS).write_bytes(bundle.labels(signature))
    pixels = _write_golden(staging, classifier, signature, folder, _golden_samples(folder, config))
    report = parity.run_gate(classifier, staging / bundle.MODEL, pixels, signature.max_batch)
    sealed.write_json(staging / bundle.PARITY, report)
    shutil.copy(staging / bundle.PARITY, run.directory / bundle.PARITY)
    parity.require_passed(report)
    sealed.write_json(staging / bundle.PROVENANCE, _provenance(run, folder, choice, evaluation))


def _golden_samples(folder: Dataset, config: Config) -> list[Sample]:
    """A few validation images of each class, chosen by content hash: another file added moves few of them."""
    chosen = []
    for label in range(len(folder.classes)):
        candidates = [sample for sample in folder.splits["val"] if sample.label == label]
        candidates.sort(key=lambda sample: sample.sha256)
        chosen += candidates[: config.export.golden_per_class]
    return chosen[: config.export.golden_limit]


def _write_golden(
    staging: Path,
    classifier: ImageClassifier,
    signature: Signature,
    folder: Dataset,
    samples: list[Sample],
) -> parity.Pixels:
    """Copy the golden inputs as they are, write their answers, return their pixels: uint8 [n, 3, size, size]."""
    (staging / bundle.GOLDEN).mkdir()
    paths, pixels = [], []
    for number, sample in enumerate(samples):
        suffix = PurePosixPath(sample.file).suffix.lower()
        paths.append(staging / bundle.GOLDEN / f"{number:03d}{suffix}")
        paths[-1].write_bytes(folder.read(sample))
        pixels.append(preprocess(paths[-1].read_bytes(), signature.preprocessing))
    logits = parity.eager_logits(classifier, np.stack(pixels))
    answers = [
        Golden(
            path=path,
            pixels_sha256=hashing.of_bytes(array.tobytes()),
            logits=row,
            label=signature.classes[int(row.argmax())],
        )
        for path, array, row in zip(paths, pixels, logits, strict=True)
    ]
    bundle.write_golden_answers(staging, answers)
    return np.stack(pixels)


def _provenance(run: Run, folder: Dataset, choice: Choice, evaluation: Path) -> dict[str, Any]:
    return {
        "run": run.directory.name,
        "checkpoint": choice.directory.name,
        "checkpoint_seal": sealed.read_manifest(choice.directory).seal,
        "evaluation": evaluation.name,
        "dataset_fingerprint": folder.fingerprint,
        "weights": choice.weights,
        "environment": runs.environment(),
    }


def _next_version(bundles: Path) -> int:
    """One more than the highest number ever used here; a damaged bundle keeps its number."""
    names = [path.name for path in bundles.iterdir()] if bundles.is_dir() else []
    return max((int(name) for name in names if name.isdigit()), default=0) + 1

"""Checkpoint -> bundle: exported, proven, sealed."""

import json
import logging
import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import islice, zip_longest
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import torch
from safetensors.torch import save

from slipway import artefact, bundle, compatibility, hashing, sealed
from slipway import config as configuration
from slipway.artefact import Artefact
from slipway.bundle import Golden
from slipway.contract import Signature
from slipway.cpus import available_cpus
from slipway.preprocessing import ImageError, preprocess
from slipway.signing import sign, signer
from slipway.source import code_hash
from train import accuracy, checkpoint, evaluate, parity, recommend, runs
from train.checkpoint import Choice
from train.config import Config, ExportConfig
from train.dataset import DataError, Dataset, Sample
from train.expectation import expectation
from train.formats import FORMATS
from train.loader import PlainSamples, plain_batches
from train.model import ImageClassifier
from train.nasty import nasty
from train.parity import Pixels, Rows
from train.parity_page import PAGE, write_parity_page
from train.runs import Run
from train.runtime import Runtime, running
from train.servable import Source, exporting

RANDOM_ROWS = 8

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is exported, and the staging directory that it goes to."""

    staging: Path
    config: Config
    dataset: Dataset
    classifier: ImageClassifier
    signature: Signature

    @property
    def threads(self) -> int:
        return available_cpus()


def export(config: Config, run: Run, dataset: Dataset, evaluation: Path) -> Path:
    """Export the best checkpoint of `run`; returns the sealed bundle, an existing one if nothing changed.

    Raises:
        TrainingModeError, ExportError: the model cannot be exported as declared.
        ParityError: an artefact answers differently from the trained model, or lost too much accuracy; nothing is
            published, and the report is kept in the run directory.
    """
    choice = checkpoint.best(run)
    inputs = _inputs(config, choice, evaluation)
    bundles = config.run.bundles / config.run.name
    with sealed.only_one(bundles, "this model's bundles"):
        if made := sealed.made_from(bundles, bundle.KIND, inputs):
            logger.info("exported already: %s", made)
            return made
        destination = bundles / str(_next_version(bundles))
        with sealed.stage(destination, kind=bundle.KIND, inputs=inputs) as staging:
            _fill(staging, config, run, dataset, choice, evaluation)
    bundle.open_bundle(destination)
    logger.info("exported and proven: %s", destination)
    return destination


def _inputs(config: Config, choice: Choice, evaluation: Path) -> str:
    """Everything that a bundle is made from. Raises SignatureError for a key that cannot be signed with."""
    names, key = config.export.formats, config.export.sign_key
    return hashing.of_data(
        {
            "checkpoint": sealed.read_manifest(choice.directory).seal,
            "weights": choice.weights,
            "evaluation": sealed.read_manifest(evaluation).seal,
            "export": {
                **configuration.to_dict(config)["export"],
                # Who signs, not where the key lies: another key may take the place of one.
                "sign_key": None if key is None else signer(key),
            },
            "code": [code_hash("train.export"), *(code_hash(FORMATS[name].module) for name in names)],
            "lock": hashing.of_file(runs.LOCK),
            # What is compiled here may be refused elsewhere, and what is fastest here need not be so there.
            "machine": artefact.instructions() if _depends_on_the_machine(config.export) else None,
            "pins": hashing.of_file(compatibility.TABLE),
        }
    )


def _fill(
    staging: Path, config: Config, run: Run, dataset: Dataset, choice: Choice, evaluation: Path
) -> None:
    classifier, trained = evaluate.load_classifier(config, choice)
    signature = replace(trained, max_batch=config.export.max_batch)
    job = Job(staging=staging, config=config, dataset=dataset, classifier=classifier, signature=signature)
    signature.save(staging / bundle.SIGNATURE)
    (staging / bundle.WEIGHTS).write_bytes(_weights_of(classifier))
    (staging / bundle.LABELS).write_bytes(bundle.labels(signature))
    with exporting(classifier, signature.preprocessing.image_size):
        artefacts = _write_artefacts(job)
        golden = _write_golden(job)
        report, judged = _prove(job, artefacts, golden)
    _keep_report(job, run, report)
    parity.require_passed(report)
    accuracy.require_good(report)
    measured = _recommend(job, artefacts, judged, golden.pixels) if config.export.recommend else None
    write_parity_page(staging / PAGE, signature.name, report, measured)
    default = artefact.DEFAULT if measured is None else measured["served"]
    artefact.write_artefacts(staging, artefacts, default)
    for each in artefacts:
        is_served_here = each.name == default and default != artefact.DEFAULT
        if is_served_here or each.for_gpus:
            _write_served(job, each, golden.pixels)
    expectation(dataset, signature, evaluation).save(staging)
    sealed.write_json(staging / bundle.PROVENANCE, _provenance(run, dataset, choice, evaluation))
    if config.export.sign_key is not None:
        sign(staging, config.export.sign_key)


def _weights_of(classifier: ImageClassifier) -> bytes:
    """In safetensors, which would not say by an OSError that it cannot write a file. Copies: tensors may share none."""
    return save(
        {
            name: value.clone(memory_format=torch.contiguous_format)
            for name, value in classifier.state_dict().items()
        }
    )


def _keep_report(job: Job, run: Run, report: dict[str, Any]) -> None:
    """In the bundle to be, and in the run, where it stays if there is to be none. The bundle's page comes later."""
    sealed.write_json(job.staging / bundle.PARITY, report)
    shutil.copy(job.staging / bundle.PARITY, run.directory / bundle.PARITY)
    page = write_parity_page(run.directory / PAGE, job.signature.name, report)
    logger.info("the parity gate %s: %s", report["verdict"], page)


def _write_artefacts(job: Job) -> list[Artefact]:
    source = Source(
        classifier=job.classifier,
        image_size=job.signature.preprocessing.image_size,
        max_batch=job.signature.max_batch,
        onnx=job.staging / bundle.MODEL,
        calibration=_calibration(job),
    )
    artefacts = []
    # ONNX first: other formats are converted from it.
    for name in sorted(job.config.export.formats, key=lambda name: name != artefact.DEFAULT):
        logger.info("exporting %s: %s", name, FORMATS[name].files[0])
        artefacts.append(FORMATS[name].write(name, source, job.staging))
    return artefacts


def _calibration(job: Job) -> Pixels:
    """Training images for quantisation, chosen by content hash: uint8 [n, 3, size, size]; none if none is needed."""
    rules = job.signature.preprocessing
    if not any(FORMATS[name].precision == "int8" for name in job.config.export.formats):
        return np.zeros((0, 3, rules.image_size, rules.image_size), np.uint8)
    skips = job.config.data.on_bad_sample == "skip"
    arrays: list[Pixels] = []
    for sample in sorted(job.dataset.splits["train"], key=lambda sample: sample.sha256):
        if len(arrays) == job.config.export.calibration_images:
            break
        try:
            arrays.append(preprocess(job.dataset.read(sample), rules))
        except ImageError as error:
            if not skips:  # as training would have done
                raise DataError(f"{job.dataset.where(sample)}: {error}") from error
    logger.info("calibrating int8 on %d training images", len(arrays))
    return np.stack(arrays)


def _prove(
    job: Job, artefacts: list[Artefact], golden: Rows
) -> tuple[dict[str, Any], list[accuracy.Judgement]]:
    """The parity gate, and where it passes, the judgement of accuracy; together they are the report."""
    odd = nasty(job.signature.preprocessing)
    shape = (RANDOM_ROWS, *golden.pixels.shape[1:])
    noise = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    inputs = [
        golden,
        _rows(job, "nasty", list(odd), np.stack(list(odd.values()))),
        _rows(job, "random", [f"noise {number}" for number in range(RANDOM_ROWS)], noise),
    ]
    report = parity.run_gate(
        job.classifier,
        job.staging,
        artefacts,
        inputs,
        max_batch=job.signature.max_batch,
        threads=job.threads,
    )
    judged = _judge(job, artefacts) if report["verdict"] == "passed" else []
    if not all(each.passed for each in judged):
        report["verdict"] = "failed"
    return {**report, "accuracy": accuracy.as_report(judged)}, judged


def _judge(job: Job, artefacts: list[Artefact]) -> list[accuracy.Judgement]:
    """Of reduced precision; of everything where one is to be recommended."""
    everything = job.config.export.recommend
    chosen = [each for each in artefacts if everything or each.precision != "float32"]
    if not chosen:
        return []
    batches = plain_batches(
        PlainSamples(job.dataset, "val", job.signature.preprocessing),
        job.signature.max_batch,
        rank=0,
        world_size=1,
        workers=job.config.data.workers,
    )
    limit = job.config.export.max_accuracy_drop
    with ExitStack() as stack:
        runtimes = [stack.enter_context(running(job.staging, each, job.threads)) for each in chosen]
        return accuracy.judge(runtimes, job.classifier, batches, job.signature.classes, limit)


def _recommend(
    job: Job, artefacts: list[Artefact], judged: list[accuracy.Judgement], golden: Pixels
) -> dict[str, Any]:
    """What was measured, and is to be served; it goes into the bundle. judged: of all artefacts, in their order."""
    here = [each for each in artefacts if not each.for_gpus]
    measured = recommend.measure(
        job.staging, here, golden, max_batch=job.signature.max_batch, threads=job.threads
    )
    by_name = {each.name: judgement for each, judgement in zip(artefacts, judged, strict=True)}
    for_gpus = [each.name for each in artefacts if each.for_gpus]
    recommendation = recommend.recommend(measured, by_name, for_gpus, job.threads)
    sealed.write_json(job.staging / recommend.RECOMMENDATION, recommendation)
    return recommendation


def _golden_samples(dataset: Dataset, settings: ExportConfig) -> list[Sample]:
    """A few validation images of each class, chosen by content hash: another file added moves few of them.

    Where all of them are more than the limit, every class gets its first one before any gets a second. Of more classes
    than the limit, those behind it get none.
    """
    of_each: list[list[Sample]] = [[] for _ in dataset.classes]
    for sample in sorted(dataset.splits["val"], key=lambda sample: sample.sha256):
        of_each[sample.label].append(sample)
    rounds = islice(zip_longest(*of_each), settings.golden_per_class)
    dealt = [sample for each in rounds for sample in each if sample is not None]
    return sorted(dealt[: settings.golden_limit], key=lambda sample: sample.label)


def _write_golden(job: Job) -> Rows:
    """Copy the golden inputs as they are and write their answers; returns them as rows of the parity gate."""
    (job.staging / bundle.GOLDEN).mkdir()
    paths, arrays = [], []
    for number, sample in enumerate(_golden_samples(job.dataset, job.config.export)):
        suffix = PurePosixPath(sample.file).suffix.lower()
        paths.append(job.staging / bundle.GOLDEN / f"{number:03d}{suffix}")
        paths[-1].write_bytes(job.dataset.read(sample))
        arrays.append(preprocess(paths[-1].read_bytes(), job.signature.preprocessing))
    pixels = np.stack(arrays)
    answers = [
        Golden(
            path=path,
            pixels_sha256=hashing.of_bytes(array.tobytes()),
            logits=row,
            label=job.signature.classes[int(row.argmax())],
        )
        for path, array, row in zip(paths, arrays, parity.eager_logits(job.classifier, pixels), strict=True)
    ]
    bundle.write_golden_answers(job.staging, answers)
    return _rows(job, parity.GOLDEN, [path.name for path in paths], pixels)


def _write_served(job: Job, served: Artefact, golden: Pixels) -> None:
    """What an artefact that is served, and is not model.onnx, answers: serving is held to that.

    To the golden inputs `golden`, uint8 [n, 3, size, size]; and, where servers can be tried, to the test split.
    """
    (job.staging / bundle.SERVED).mkdir(exist_ok=True)
    with running(job.staging, served, job.threads) as runtime:
        if served.for_gpus:
            _write_own_answers(job, runtime, golden, bundle.SERVED_ON_GPUS_ANSWERS)
        else:
            _write_own_answers(job, runtime, golden, bundle.SERVED_ANSWERS)
            _write_own_predictions(job, runtime)


def _write_own_answers(job: Job, runtime: Runtime, golden: Pixels, file: str) -> None:
    logits = np.concatenate([parity.logits_of(runtime.answer(pixels[None])) for pixels in golden])
    answers = [
        replace(known, logits=row, label=job.signature.classes[int(row.argmax())])
        for known, row in zip(bundle.read_golden(job.staging), logits, strict=True)
    ]
    bundle.write_golden_answers(job.staging, answers, file)


def _write_own_predictions(job: Job, runtime: Runtime) -> None:
    """To the test split, like an evaluation's predictions."""
    samples = PlainSamples(job.dataset, "test", job.signature.preprocessing)
    batches = plain_batches(samples, 1, rank=0, world_size=1, workers=job.config.data.workers)
    logits = np.concatenate([parity.logits_of(runtime.answer(each.images.numpy())) for each in batches])
    lines = evaluate.predictions(samples, logits, job.signature.classes)
    (job.staging / bundle.SERVED_PREDICTIONS).write_text(lines, encoding="utf-8")


def _rows(job: Job, kind: str, names: Sequence[str], pixels: Pixels) -> Rows:
    expected = parity.reference_logits(job.classifier, pixels)
    return Rows(kind=kind, names=names, pixels=pixels, expected=expected)


def _provenance(run: Run, dataset: Dataset, choice: Choice, evaluation: Path) -> dict[str, Any]:
    metrics = json.loads((evaluation / evaluate.METRICS).read_bytes())
    return {
        "run": run.directory.name,
        "checkpoint": choice.directory.name,
        "checkpoint_seal": sealed.read_manifest(choice.directory).seal,
        "step": checkpoint.load_progress(choice.directory).step,
        "evaluation": evaluation.name,
        "metrics": {name: metrics[name] for name in ("split", "samples", "accuracy", "loss")},
        "dataset_fingerprint": dataset.fingerprint,
        "weights": choice.weights,
        "environment": runs.environment(),
    }


def _depends_on_the_machine(settings: ExportConfig) -> bool:
    return settings.recommend or any(FORMATS[name].runtime == "aoti" for name in settings.formats)


def _next_version(bundles: Path) -> int:
    """One more than the highest number ever used here; a damaged bundle keeps its number."""
    names = [path.name for path in bundles.iterdir()] if bundles.is_dir() else []
    return max((int(name) for name in names if name.isdigit()), default=0) + 1

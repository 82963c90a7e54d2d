"""What `python -m train data` does: check | stats | split | show. Each returns a path."""

import csv
from pathlib import Path, PurePosixPath
from typing import Literal

from rich.console import Console

from slipway import sealed
from slipway.errors import UsageError
from slipway.files import writing
from train.config import Config
from train.dataset import DataError, Dataset, Sample
from train.doctor import Diagnosis, diagnose, findings, require_healthy, to_record
from train.doctor_page import write_data_page
from train.doctor_tables import print_tables
from train.examine import examine
from train.folder import Files
from train.sources import folder_of
from train.split import SPLITS, Split

KIND = "split"

Action = Literal["check", "stats", "split", "show"]


def act(action: Action, config: Config, dataset: Dataset, to: Path | None) -> Path:
    """`check` returns a folder of the test images, the others what they made. to: where `split` copies all images to.

    Raises:
        DataError: `check` found what must not be trained on.
        UsageError: `to` makes no sense. SealError: it exists, or could not be written.
        SlipwayError: a result could not be written.
    """
    if to is not None and action != "split":
        raise UsageError(f"--to goes with `data split`, not with `data {action}`")
    if action == "split":
        return write_split(_made(config, "split.csv"), dataset) if to is None else copy_split(to, dataset)
    diagnosis = _diagnosed(config, dataset)
    if action == "stats":
        return _stats(config, diagnosis)
    if action == "show":
        return write_data_page(_made(config, "doctor.html"), config, dataset, diagnosis)
    require_healthy(diagnosis, config, dataset.storage.where)
    return folder_of(dataset, "test", config.data.cache)


def write_split(path: Path, dataset: Dataset) -> Path:
    """One line a file: split, class, path relative to the root, SHA-256."""
    with writing(path), path.open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(["split", "class", "file", "sha256"])
        for split in SPLITS:
            for sample in dataset.splits[split]:
                table.writerow([split, dataset.classes[sample.label], sample.file, sample.sha256])
    return path


def copy_split(to: Path, dataset: Dataset) -> Path:
    """Copy every image to `to`/<split>/<class>/*, all or nothing: an ordinary folder with splits of its own.

    Copies, because a sealed directory is read-only and a link would make the originals so.
    """
    root = dataset.storage.root if isinstance(dataset.storage, Files) else None
    if root and to.resolve().is_relative_to(root.resolve()):
        raise UsageError(f"{to}: lies inside {root}, where it would be taken for a class")
    with sealed.stage(to, kind=KIND, inputs=dataset.fingerprint) as staging:
        for split, samples in dataset.splits.items():
            for sample in samples:
                path = staging / _place_in_copy(split, dataset.classes[sample.label], sample)
                if path.exists():
                    raise DataError(f"{dataset.where(sample)}: two images would be copied to one place")
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(dataset.read(sample))
    return to


def _place_in_copy(split: Split, name: str, sample: Sample) -> PurePosixPath:
    """<split>/<class>/ and what the file's own path has below them, if it has them."""
    parts = PurePosixPath(sample.file).parts
    for known in (split, name):
        parts = parts[1:] if len(parts) > 1 and parts[0] == known else parts
    return PurePosixPath(split, name, *parts)


def _diagnosed(config: Config, dataset: Dataset) -> Diagnosis:
    found = examine(dataset, config.image.preprocessing(), config.run.directory / ".examined")
    return diagnose(dataset, found, config.image.size)


def _stats(config: Config, diagnosis: Diagnosis) -> Path:
    worth_a_word = findings(diagnosis, config)
    print_tables(diagnosis, worth_a_word, Console(stderr=True))
    path = _made(config, "doctor.json")
    with writing(path):
        sealed.write_json(path, to_record(diagnosis, worth_a_word))
    return path


def _made(config: Config, name: str) -> Path:
    """Never in the image folder, which is the user's."""
    path = config.run.directory / f"{config.run.name}-data" / name
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    return path

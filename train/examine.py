"""Every file of a data set -> what it is. Decodes on all cores, and remembers by content what it has decoded."""

import json
import logging
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path

import PIL
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from slipway import hashing, sealed
from slipway.contract import Preprocessing
from slipway.cpus import available_cpus
from slipway.files import writing
from slipway.source import code_hash
from train.dataset import DataError, Dataset, Sample
from train.image_facts import Facts, Refusal, facts_of, from_record, to_record

BATCH = 256
"""Files that are handed to the workers at once; a killed check decodes about so many again."""

logger = logging.getLogger(__name__)


def examine(dataset: Dataset, rules: Preprocessing, memory: Path) -> dict[str, Facts | Refusal]:
    """What each file of every split is, by the SHA-256 of its content. Equal contents are decoded once.

    memory: directory of what earlier calls found, one file for each combination of rules, code and Pillow, one line
    an image. It is written as the work goes on, so a killed check continues, and one that has nothing new to look at
    decodes nothing.

    Raises:
        DataError: a file changed since it was listed.
        SlipwayError: `memory` cannot be written.
    """
    path = memory / f"{_key(rules)}.jsonl"
    with sealed.only_one(path, "examining images"), writing(path):
        return _found_in(path, dataset, rules)


def _found_in(path: Path, dataset: Dataset, rules: Preprocessing) -> dict[str, Facts | Refusal]:
    wanted = {sample.sha256: sample for samples in dataset.splits.values() for sample in samples}
    found = {sha256: facts for sha256, facts in _remembered(path) if sha256 in wanted}
    missing = [sample for sha256, sample in wanted.items() if sha256 not in found]
    if found and missing:
        logger.info("%d images are known from before, %d are decoded now", len(found), len(missing))
    _end_last_line(path)
    with path.open("a", encoding="utf-8") as file:
        for sample, facts in _examined(dataset, missing, rules):
            found[sample.sha256] = facts
            # A file that cannot be read says nothing about its content, and may be readable tomorrow.
            if not (isinstance(facts, Refusal) and facts.code == "UNREADABLE"):
                file.write(json.dumps({"sha256": sample.sha256, **to_record(facts)}) + "\n")
    return found


def _key(rules: Preprocessing) -> str:
    """Whatever may change what is found for equal bytes."""
    inputs = {"rules": asdict(rules), "code": code_hash("train.image_facts"), "pillow": PIL.__version__}
    return hashing.of_data(inputs)[:16]


def _remembered(path: Path) -> Iterator[tuple[str, Facts | Refusal]]:
    """Every line that can be read. A kill may have cut one short; its image is looked at again."""
    if not path.exists():
        return
    unreadable = 0
    with path.open("rb") as file:
        for line in file:
            try:
                record = json.loads(line)
                yield record.pop("sha256"), from_record(record)
            except (ValueError, KeyError, TypeError, AttributeError):
                unreadable += 1
    if unreadable:
        logger.info("%s: %d lines were cut short; those images are decoded again", path, unreadable)


def _end_last_line(path: Path) -> None:
    """What is appended must not continue a line that a kill cut short."""
    with path.open("ab+") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read() != b"\n":
                file.write(b"\n")


def _examined(
    dataset: Dataset, samples: Sequence[Sample], rules: Preprocessing
) -> Iterator[tuple[Sample, Facts | Refusal]]:
    examine_one = partial(_examine_one, dataset, rules)
    with ThreadPoolExecutor(available_cpus()) as pool, _progress() as progress:
        task = progress.add_task("decoding", total=len(samples))
        # Batch by batch: handed all at once, a million files would wait as a million tasks.
        for start in range(0, len(samples), BATCH):
            batch = samples[start : start + BATCH]
            for sample, facts in zip(batch, pool.map(examine_one, batch), strict=True):
                progress.advance(task)
                yield sample, facts


def _examine_one(dataset: Dataset, rules: Preprocessing, sample: Sample) -> Facts | Refusal:
    try:
        data = dataset.read(sample)
    except DataError as error:
        return Refusal("UNREADABLE", str(error).removeprefix(f"{dataset.where(sample)}: "))
    if hashing.of_bytes(data) != sample.sha256:
        raise DataError(f"{dataset.where(sample)}: changed while the data set was being checked; check again")
    return facts_of(data, rules)


def _progress() -> Progress:
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, disable=not console.is_terminal, transient=True)

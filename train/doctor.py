"""What is wrong with a data set, and what of it must stop a training. `data check` asks for the verdict.

This file finds and judges; `examine.py` looks at the files, `doctor_tables.py` and `doctor_page.py` show.
"""

import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from train.charts import LOG_FROM
from train.config import Config
from train.dataset import DataError, Dataset
from train.duplicates import alike
from train.image_facts import Facts, Refusal, colour_statistics
from train.split import SPLITS, Split

SHOWN = 20
"""Findings of one kind named in a message. `data stats` writes all of them. Bad files are always all named."""

IMBALANCE = 10.0
"""Ratio of the largest to the smallest class of the training split from which it is worth a word."""

BINS = 24
"""Bars of a histogram."""

Where = Callable[[str], str]
"""From a file of the data set to how a person is told of it."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, order=True, slots=True)
class Place:
    """Where a file lies: split, path relative to the root, class name."""

    split: Split
    file: str
    label: str


@dataclass(frozen=True, kw_only=True)
class LookAlike:
    """Two different files with much the same picture. bits: how many of 64 bits their perceptual hashes differ in."""

    first: Place
    second: Place
    bits: int


@dataclass(frozen=True, kw_only=True)
class Spread:
    """How a figure is distributed. counts: how many lie between each two `edges`, which ascend."""

    least: float
    median: float
    most: float
    edges: Sequence[float]
    counts: Sequence[int]


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """All that was found.

    counts: split -> class name -> images, every class in every split, bad files included.
    refused: each file that is no usable image. copies: places of each content that lies at more than one.
    look_alikes: closest first. sizes: width, height, shorter side (pixels) and aspect of all images that decode.
    formats, modes, orientations: how many images have each, most frequent first.
    mean, std: per channel of the training split as the model sees it, 0..1; None when nothing decodes.
    """

    images: int
    counts: Mapping[Split, Mapping[str, int]]
    refused: Sequence[tuple[Place, Refusal]]
    copies: Sequence[Sequence[Place]]
    look_alikes: Sequence[LookAlike]
    sizes: Mapping[str, Spread]
    formats: Mapping[str, int]
    modes: Mapping[str, int]
    orientations: Mapping[str, int]
    mean: Sequence[float] | None
    std: Sequence[float] | None

    def leaks(self) -> list[Sequence[Place]]:
        """Copies that lie in more than one split."""
        return [places for places in self.copies if len({place.split for place in places}) > 1]

    def near_leaks(self) -> list[LookAlike]:
        return [pair for pair in self.look_alikes if pair.first.split != pair.second.split]

    def contradictions(self) -> list[Sequence[Place]]:
        """Copies under more than one class."""
        return [places for places in self.copies if len({place.label for place in places}) > 1]

    def absent(self) -> list[tuple[Split, str]]:
        """(split, class) without an image."""
        return [(split, name) for split in SPLITS for name, count in self.counts[split].items() if not count]

    def imbalance(self) -> float:
        """Images of the largest class of the training split for each one of its smallest."""
        counts = self.counts["train"].values()
        return max(counts) / max(1, min(counts))


@dataclass(frozen=True, kw_only=True)
class Finding:
    """All that was found of one kind. title: what, and how many. examples: a line each. advice: what to do."""

    kind: Literal["refused", "skipped", "leaks", "contradictions", "near_leaks", "imbalance"]
    severity: Literal["error", "warn"]
    title: str
    examples: Sequence[str]
    advice: str


def diagnose(dataset: Dataset, found: Mapping[str, Facts | Refusal], image_size: int) -> Diagnosis:
    """found: what each content is, by its SHA-256, from `examine`. image_size: side of the model input, pixels."""
    places: dict[str, list[Place]] = defaultdict(list)
    counts: dict[Split, dict[str, int]] = {split: dict.fromkeys(dataset.classes, 0) for split in SPLITS}
    for split, samples in dataset.splits.items():
        for sample in samples:
            label = dataset.classes[sample.label]
            places[sample.sha256].append(Place(split=split, file=sample.file, label=label))
            counts[split][label] += 1
    refused = [
        (place, facts)
        for sha256, facts in found.items()
        if isinstance(facts, Refusal)
        for place in places[sha256]
    ]
    good = {sha256: facts for sha256, facts in found.items() if isinstance(facts, Facts)}
    everywhere = [good[sha256] for sha256, where in places.items() if sha256 in good for _ in where]
    trained_on = [found[sample.sha256] for sample in dataset.splits["train"]]
    colours = [facts for facts in trained_on if isinstance(facts, Facts)]
    mean, std = colour_statistics(colours, image_size) if colours else (None, None)
    return Diagnosis(
        images=sum(map(len, dataset.splits.values())),
        counts=counts,
        refused=sorted(refused),
        copies=sorted(sorted(where) for sha256, where in places.items() if sha256 in good and len(where) > 1),
        look_alikes=_look_alikes(good, places),
        sizes=_sizes(everywhere),
        formats=_tally(facts.format for facts in everywhere),
        modes=_tally(facts.mode for facts in everywhere),
        orientations=_tally(str(facts.orientation) for facts in everywhere),
        mean=mean,
        std=std,
    )


def findings(diagnosis: Diagnosis, config: Config, where: Where = str) -> list[Finding]:
    """What somebody should know, errors first. Files are named as `where` says; by default, as the data set does."""
    policy = config.doctor
    found = [
        *_about_files(diagnosis, config, where),
        Finding(
            kind="leaks",
            severity=policy.leaks,
            title=f"images in more than one split: {len(diagnosis.leaks()):,}",
            examples=[_same(where, places) for places in diagnosis.leaks()],
            advice="keep each in one split, or the figures of the others are not to be trusted "
            "(--doctor.leaks warn lets them pass)",
        ),
        Finding(
            kind="contradictions",
            severity=policy.contradictions,
            title=f"images under more than one class: {len(diagnosis.contradictions()):,}",
            examples=[_same(where, places) for places in diagnosis.contradictions()],
            advice="keep each under the one that is right",
        ),
        Finding(
            kind="near_leaks",
            severity=policy.near_leaks,
            title=f"pairs that look alike, in different splits: {len(diagnosis.near_leaks()):,}",
            examples=[
                f"{where(pair.first.file)} and {where(pair.second.file)}" for pair in diagnosis.near_leaks()
            ],
            advice="look at each; frames of one film or pictures of one thing belong in one split",
        ),
        *_about_classes(diagnosis),
    ]
    return sorted((each for each in found if each.examples), key=lambda each: each.severity != "error")


def to_record(diagnosis: Diagnosis, worth_a_word: Sequence[Finding]) -> dict[str, Any]:
    """Everything, as JSON: `doctor.json`."""
    return {
        "images": diagnosis.images,
        "counts": diagnosis.counts,
        "formats": diagnosis.formats,
        "modes": diagnosis.modes,
        "orientations": diagnosis.orientations,
        "sizes": {name: asdict(spread) for name, spread in diagnosis.sizes.items()},
        "mean": diagnosis.mean,
        "std": diagnosis.std,
        "findings": [asdict(each) for each in worth_a_word],
        "refused": [{**asdict(place), **facts._asdict()} for place, facts in diagnosis.refused],
        "copies": [[asdict(place) for place in places] for places in diagnosis.copies],
        "look_alikes": [asdict(pair) for pair in diagnosis.look_alikes],
        "absent": [{"split": split, "class": name} for split, name in diagnosis.absent()],
    }


def require_healthy(diagnosis: Diagnosis, config: Config, where: Where) -> None:
    """Warn of what may pass. Raises DataError that names everything which must not."""
    worth_a_word = findings(diagnosis, config, where)
    for finding in worth_a_word:
        if finding.severity == "warn":
            logger.warning("WARNING: %s", _message(finding))
    if errors := [_message(finding) for finding in worth_a_word if finding.severity == "error"]:
        raise DataError("\n       ".join(errors))
    good = diagnosis.images - len(diagnosis.refused)
    logger.info("%s images of %d classes decode", f"{good:,}", len(diagnosis.counts["train"]))


def _about_files(diagnosis: Diagnosis, config: Config, where: Where) -> Iterator[Finding]:
    """Bad files: an error, but those that training has been told to skip."""
    skips = config.data.on_bad_sample == "skip"
    named: dict[bool, list[str]] = {True: [], False: []}
    for place, (code, reason) in diagnosis.refused:
        skipped = skips and place.split == "train" and code != "UNREADABLE"
        named[skipped].append(f"{where(place.file)}: {code}: {reason}")
    yield Finding(
        kind="refused",
        severity="error",
        title=f"images that cannot be used: {len(named[False]):,}",
        examples=named[False],
        advice="mend or remove them",
    )
    yield Finding(
        kind="skipped",
        severity="warn",
        title=f"training images that will be skipped: {len(named[True]):,}",
        examples=named[True],
        advice="they cannot be used, and data.on_bad_sample lets them weigh nothing",
    )


def _about_classes(diagnosis: Diagnosis) -> Iterator[Finding]:
    if diagnosis.imbalance() >= IMBALANCE:
        ranked = sorted(diagnosis.counts["train"].items(), key=lambda item: item[1])
        yield Finding(
            kind="imbalance",
            severity="warn",
            title=f"the largest class has {diagnosis.imbalance():.0f} times the images of the smallest",
            examples=[f"{name}: {count:,}" for name, count in (ranked[0], ranked[-1])],
            advice="judge the model by its recall of each class, not by accuracy alone",
        )


def _look_alikes(good: Mapping[str, Facts], places: Mapping[str, Sequence[Place]]) -> list[LookAlike]:
    contents = list(good)
    return [
        LookAlike(first=places[contents[a]][0], second=places[contents[b]][0], bits=bits)
        for a, b, bits in alike(list(good.values()))
    ]


def _sizes(images: Sequence[Facts]) -> dict[str, Spread]:
    if not images:
        return {}
    width = np.array([facts.width for facts in images], dtype=np.float64)
    height = np.array([facts.height for facts in images], dtype=np.float64)
    values = {
        "width": width,
        "height": height,
        "shorter side": np.minimum(width, height),
        "aspect": width / height,
    }
    return {name: _spread(each) for name, each in values.items()}


def _spread(values: npt.NDArray[np.float64]) -> Spread:
    """All values are above 0. Bins grow with their values where these span much."""
    least, median, most = float(values.min()), float(np.median(values)), float(values.max())
    if least == most:
        edges = np.array([least * 0.9, most * 1.1])
    else:
        edges = (np.geomspace if most / least > LOG_FROM else np.linspace)(least, most, BINS + 1)
        edges[0], edges[-1] = least, most  # exactly: a value beyond would not be counted
    counts, _ = np.histogram(values, edges)
    return Spread(least=least, median=median, most=most, edges=edges.tolist(), counts=counts.tolist())


def _tally(values: Iterator[str]) -> dict[str, int]:
    return dict(Counter(values).most_common())


def _same(where: Where, places: Sequence[Place]) -> str:
    return " and ".join(where(place.file) for place in places) + " are the same image"


def _message(finding: Finding) -> str:
    # However long the list of bad files is, it is what the check is run for.
    lines = list(finding.examples[: None if finding.kind in ("refused", "skipped") else SHOWN])
    if (left := len(finding.examples) - len(lines)) > 0:
        lines.append(f"and {left:,} more; `python -m train data stats` writes all of them to doctor.json")
    return "\n       ".join([f"{finding.title}; {finding.advice}", *lines])

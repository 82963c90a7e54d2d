"""What the images of the evaluation look like, and what was predicted for them: what a service may expect to see."""

import json
from pathlib import Path

from slipway import input_statistics
from slipway.contract import Signature
from slipway.input_statistics import InputStatistics
from slipway.preprocessing import preprocess_sized
from train import evaluate
from train.dataset import Dataset

# So many, chosen by content hash, tell the distribution to a hundredth or two, and are decoded within seconds.
IMAGES = 2000


def expectation(dataset: Dataset, signature: Signature, evaluation: Path) -> InputStatistics:
    """Of the split that `evaluation` is of; predictions are counted for all of it."""
    split = json.loads((evaluation / evaluate.METRICS).read_bytes())["split"]
    lines = (evaluation / evaluate.PREDICTIONS).read_text(encoding="utf-8").splitlines()
    samples = sorted(dataset.splits[split], key=lambda sample: sample.sha256)[:IMAGES]
    return input_statistics.measured(
        (preprocess_sized(dataset.read(sample), signature.preprocessing) for sample in samples),
        (json.loads(line)["predicted"] for line in lines),
        signature.classes,
    )

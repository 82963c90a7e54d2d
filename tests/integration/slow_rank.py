"""A program that starts two ranks, of which the second is slow to read its images, and measures their steps.

    python slow_rank.py IMAGES RUNS

Prints what `python -m train profile` prints.
"""

import os
import sys
import time
from dataclasses import dataclass, replace
from unittest.mock import patch

import torch
from torch import nn

from slipway.config import load
from train.config import Config
from train.dataset import Storage
from train.folder import read_folder
from train.profile import profile

SECONDS_AN_IMAGE = 0.1


@dataclass(frozen=True)
class Slow:
    storage: Storage

    def read(self, file: str) -> bytes:
        time.sleep(SECONDS_AN_IMAGE)
        return self.storage.read(file)

    def where(self, file: str) -> str:
        return self.storage.where(file)


class OfMeans(nn.Module):
    """Logits from the mean of each channel, which take no time."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.head = nn.Linear(3, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(images.float().mean((2, 3)) / 255)
        return logits


def main(images: str, runs: str) -> None:
    settings = {
        "data.root": images,
        "data.workers": "0",
        "run.directory": runs,
        "image.size": "16",
        "training.batch_size": "8",
        "hardware.accelerator": "cpu",
        "hardware.devices": "2",
    }
    config = load(Config, None, settings)
    dataset = read_folder(config.data)
    if os.environ.get("LOCAL_RANK") == "1":
        dataset = replace(dataset, storage=Slow(dataset.storage))
    with (
        patch("train.fit.build_model", lambda *_: OfMeans(len(dataset.classes))),
        patch.multiple("train.profile", WARM_UP=1, MEASURED=4),
    ):
        said = profile(config, dataset)
    if said is not None:
        print(said)


if __name__ == "__main__":
    main(*sys.argv[1:])

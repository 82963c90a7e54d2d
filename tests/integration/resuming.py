"""A program for each of several ranks: train a run straight through, and one that is stopped and resumed.

    python resuming.py IMAGES STRAIGHT RESUMED

All in one process, because starting one takes most of the time.
"""

import os
import signal
import sys
from contextlib import suppress
from typing import Any
from unittest.mock import patch

from slipway.config import load
from train import fit as loop
from train.config import Config
from train.fit import fit
from train.folder import read_folder
from train.hardware import Machine
from train.preemption import Preempted
from train.step import step
from train.trainer import Trainer


def main(images: str, straight: str, resumed: str) -> None:
    config = config_for(images, resumed)
    dataset = read_folder(config.data)

    def step_and_signal(trainer: Trainer, *arguments: Any) -> bool:
        if trainer.progress.step == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(trainer, *arguments)

    # As long as there is more to come, the ranks stay in touch.
    with patch.object(Machine, "leave"):
        with patch.object(loop, "step", step_and_signal), suppress(Preempted):
            fit(config, dataset)
        fit(config, dataset)
    fit(config_for(images, straight), dataset)


def config_for(images: str, runs: str) -> Config:
    settings = {
        "data.root": images,
        "data.workers": "0",
        "run.directory": runs,
        "image.size": "16",
        "image.resize": "16",
        "model.name": "mobilenet_v3_small",
        "model.stem": "small",
        "training.batch_size": "24",
        "training.epochs": "1",
        "training.checkpoint_every": "1",
        "hardware.accelerator": "cpu",
        "hardware.strategy": "ddp",
    }
    return load(Config, None, settings)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""A program for each of two ranks: how often do gradients travel in a step, under every strategy?

    python collectives.py IMAGES RUNS

Prints what was counted as JSON: strategy -> one number for one micro-batch, and one for four.
"""

import json
import sys

from torch.profiler import profile

from slipway.config import load
from train.config import Config
from train.fit import batches_of, prepare
from train.folder import read_folder
from train.hardware import launch
from train.preemption import StopRequest
from train.runs import run_for
from train.step import accumulate_gradients

# How each strategy sends them.
OPERATIONS = {"ddp": "c10d::allreduce_", "fsdp2": "c10d::_reduce_scatter_base_"}


def main(images: str, runs: str) -> None:
    counts = {strategy: [count(images, runs, strategy, n) for n in (1, 4)] for strategy in OPERATIONS}
    print(json.dumps(counts))


def count(images: str, runs: str, strategy: str, micro_batches: int) -> int:
    settings = {
        "data.root": images,
        "data.workers": "0",
        "run.directory": runs,
        "image.size": "16",
        "image.resize": "16",
        "model.stem": "small",
        "training.batch_size": "24",
        "training.accumulate": str(micro_batches),
        "hardware.accelerator": "cpu",
        "hardware.strategy": strategy,
    }
    config = load(Config, None, settings)
    dataset = read_folder(config.data)
    machine = launch(config.hardware, config.training)
    trainer = prepare(config, run_for(config, dataset), dataset, machine, StopRequest(), is_new=True)
    batches, window = batches_of(trainer), next(trainer.order.windows(0))
    with profile() as recorded:
        accumulate_gradients(trainer, window, batches)
    return sum(event.count for event in recorded.key_averages() if event.key == OPERATIONS[strategy])


if __name__ == "__main__":
    main(*sys.argv[1:])

"""A program for each of two ranks: what training takes and sends, under every strategy, for a plan to be held against.

    python planned.py IMAGES RUNS

Prints what was measured as JSON, in bytes, of each of CASES: the most that PyTorch's allocator had given out at a time,
what the objects of training hold, and what each collective worked on in one step.
"""

import json
import sys
from collections import Counter
from contextlib import nullcontext
from itertools import accumulate
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.profiler import profile

from slipway.config import load
from train.compilation import _blank_batches, needs_warm_up, warm_up
from train.config import Config
from train.display import _Silence
from train.evaluate import score
from train.fit import prepare
from train.folder import read_folder
from train.hardware import launch
from train.loader import Batch
from train.preemption import StopRequest
from train.runs import run_for
from train.step import accumulate_gradients, step
from train.trainer import Outputs, Trainer

CASES = [
    {"hardware.strategy": "ddp", "training.accumulate": "2", "training.ema": "0.9"},
    {"hardware.strategy": "fsdp2", "training.accumulate": "4", "training.ema": "0.9"},
]
BYTES = {"float": 4, "int": 4, "long int": 8}


def main(images: str, runs: str) -> None:
    torch.set_num_threads(1)  # each would work with copies of its own
    print(json.dumps([measured(configuration(images, runs, case)) for case in CASES]))


def configuration(images: str, runs: str, settings: dict[str, str]) -> Config:
    """With batches as large as the data set, which is 72 images."""
    usual = {
        "data.root": images,
        "data.workers": "0",
        "run.directory": runs,
        "image.size": "48",
        "training.batch_size": "64",
        "training.log_every": "100",
        "hardware.accelerator": "cpu",
    }
    return load(Config, None, {**usual, **settings})


def measured(config: Config) -> dict[str, Any]:
    """most: from the beginning to the end of the first step. validation: most that a batch takes beside what is there.

    messages: of the gradients of another step.
    """
    dataset = read_folder(config.data)
    machine = launch(config.hardware, config.training)
    run = run_for(config, dataset)
    with profile(profile_memory=True) as beginning:
        trainer = prepare(config, run, dataset, machine, StopRequest(), is_new=True)
        if needs_warm_up(config.hardware, machine):
            warm_up(trainer)
        window = next(trainer.order.windows(0))
        step(trainer, window, _blank_batches(trainer, window), Outputs(show=_Silence(), board=None))
    averaged = trainer.ema.applied_to(trainer.module) if trainer.ema else nullcontext()
    with profile(profile_memory=True) as validation, averaged:
        score(trainer.module, [_blank(trainer)], machine)
    with profile(record_shapes=True) as again:
        accumulate_gradients(trainer, window, _blank_batches(trainer, window))
    return {
        "most": _most(beginning),
        "validation": _most(validation),
        "held": _held(trainer),
        "messages": _messages(again),
    }


def _blank(trainer: Trainer) -> Batch:
    """As large as those of a validation."""
    count, size = trainer.micro_batch, trainer.config.image.size
    return Batch(
        images=torch.zeros(count, 3, size, size, dtype=torch.uint8),
        labels=torch.zeros(count, dtype=torch.int64),
        weights=torch.ones(count),
    )


def _most(recorded: profile) -> int:
    sizes = (event.nbytes() for event in _events(recorded) if event.name() == "[memory]")
    return max(accumulate(sizes))


def _held(trainer: Trainer) -> dict[str, int]:
    module, moments = trainer.module, trainer.optimizer.optimizer.state.values()
    found: dict[str, list[Any]] = {
        "parameters": list(module.parameters()),
        "gradients": [each.grad for each in module.parameters() if each.grad is not None],
        "optimiser state": [value for each in moments for value in each.values()],
        "moving average": list(trainer.ema.values.values()) if trainer.ema else [],
        "buffers": list(module.buffers()),
    }
    return {what: _bytes(tensors) for what, tensors in found.items()}


def _bytes(tensors: list[Any]) -> int:
    """Of the memory that they lie in, which some of them share."""
    here = [each.to_local() if isinstance(each, DTensor) else each for each in tensors]
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage() for each in here}
    return sum(each.nbytes() for each in storages.values())


def _messages(recorded: profile) -> dict[str, int]:
    """Gloo does a reduce-scatter as an all-reduce; the profiler tells of both."""
    found: Counter[str] = Counter()
    for event in _events(recorded):
        shapes, types = event.shapes(), event.dtypes()
        if event.name() == "c10d::_allgather_base_":
            found["all-gather"] += shapes[0][0] * BYTES[types[0]]
        elif event.name() == "c10d::_reduce_scatter_base_":
            found["reduce-scatter"] += shapes[1][0] * BYTES[types[1]]
        elif event.name() in ("gloo:all_reduce", "gloo:broadcast"):
            name = event.name().removeprefix("gloo:").replace("_", "-")
            found[name] += (shapes[0][0] if shapes[0] else 1) * BYTES[types[0]]
    found["all-reduce"] -= found["reduce-scatter"]
    return dict(found)


def _events(recorded: profile) -> Any:
    assert recorded.profiler
    assert recorded.profiler.kineto_results
    return recorded.profiler.kineto_results.events()


if __name__ == "__main__":
    main(*sys.argv[1:])

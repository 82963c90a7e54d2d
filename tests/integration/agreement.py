"""A program for each of two ranks: what one of them meets ends the other one, too, instead of leaving it to wait.

    python agreement.py IMAGES RUNS

Prints a sentence for each case, as JSON.
"""

import json
import os
import signal
import sys
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from unittest.mock import patch

from slipway import sealed
from slipway.config import load
from slipway.errors import SlipwayError
from train import checkpoint
from train.config import Config
from train.fit import _save, _wait_for_others, prepare
from train.folder import read_folder
from train.hardware import launch
from train.preemption import StopRequest, stop_requests
from train.runs import run_for


def main(images: str, runs: str) -> None:
    settings = {
        "data.root": images,
        "data.workers": "0",
        "run.directory": runs,
        "model.name": "mobilenet_v3_small",
        "hardware.accelerator": "cpu",
    }
    config = load(Config, None, settings)
    dataset = read_folder(config.data)
    run = run_for(config, dataset)
    machine = launch(config.hardware, config.training)
    trainer = prepare(config, run, dataset, machine, StopRequest(), is_new=True)

    def first_cannot_decide() -> None:
        machine.decide(lambda: json.loads("no JSON"))

    def last_cannot_read() -> None:
        _save(trainer)
        directory, optimizer = run.checkpoints / trainer.progress.name, trainer.optimizer.optimizer
        stale = patch.object(checkpoint, "_stored", side_effect=OSError("stale file handle"))
        with nullcontext() if machine.is_first else stale:
            checkpoint.restore(directory, machine, trainer.module, optimizer, None)

    def last_is_stopped_while_all_wait() -> None:
        with ExitStack() as stack:
            if machine.is_first:
                stack.enter_context(sealed.only_one(run.directory, "the run"))
            stop = stack.enter_context(stop_requests())
            if not machine.is_first:
                os.kill(os.getpid(), signal.SIGTERM)
            _wait_for_others(run, machine, stop, stack)

    cases = [first_cannot_decide, last_cannot_read, last_is_stopped_while_all_wait]
    print(json.dumps([said(case) for case in cases]))
    machine.leave()


def said(case: Callable[[], None]) -> str:
    try:
        case()
    except (SlipwayError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


if __name__ == "__main__":
    main(*sys.argv[1:])

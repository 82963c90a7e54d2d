"""Start real training runs, disturb them, and read what they wrote."""

import contextlib
import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from safetensors.torch import load_file

from tests.integration.checkout import Checkout, end, outcome
from train.runs import MEASURED

DEADLINE_SECONDS = 240


@dataclass(frozen=True, kw_only=True)
class Setup:
    """How many processes train, under which strategy, with how many loader workers each, and who writes checkpoints."""

    ranks: int = 1
    strategy: str = "auto"
    workers: int = 0
    background_saving: bool = False

    def command(self, options: Sequence[str]) -> list[str]:
        train = [
            "-m",
            "train",
            "fit",
            f"--hardware.strategy={self.strategy}",
            f"--data.workers={self.workers}",
            f"--hardware.background_saving={str(self.background_saving).lower()}",
        ]
        if self.ranks > 1:
            train = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={self.ranks}", *train]
        return [*train, *options]


def options(data: Path, runs: Path, **settings: object) -> list[str]:
    """A model with dropout and, where not said otherwise, with batch normalisation; checkpoints at odd steps."""
    chosen: dict[str, object] = {
        "data.root": data,
        "run.directory": runs,
        "run.name": "disturbed",
        "image.size": 16,
        "image.resize": 20,
        "model.name": "mobilenet_v3_small",
        "model.stem": "small",
        "training.epochs": 4,
        "training.batch_size": 24,
        "training.accumulate": 2,
        "training.ema": 0.9,
        "training.checkpoint_every": 2,
        "training.keep_checkpoints": 3,
        "training.log_every": 1,
    }
    chosen |= {name.replace("__", "."): value for name, value in settings.items()}
    return [f"--{name}={value}" for name, value in chosen.items()]


def run_of(runs: Path) -> Path:
    (run,) = (path for path in runs.iterdir() if not path.name.startswith("."))
    return run


def metrics(run: Path) -> list[dict[str, Any]]:
    """Everything logged but the speed."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in MEASURED} for line in lines]


def losses(run: Path) -> list[float]:
    return [line["loss"] for line in metrics(run) if line["kind"] == "train"]


def final_state(run: Path) -> dict[str, bytes]:
    """Every file of the last checkpoint; tensors by name, so that the number of files does not matter."""
    directory = max((run / "checkpoints").glob("step-*"))
    state = {"progress": (directory / "progress.json").read_bytes()}
    for file in sorted((directory / "state").iterdir()):
        for name, tensor in load_file(file).items():
            state[f"{file.name if tensor.ndim else ''}{name}"] = tensor.numpy().tobytes()
    return state


def finish(checkout: Checkout, command: Sequence[str], patience: float = 600) -> None:
    """patience: in seconds."""
    result = outcome(checkout.start(*command), patience)
    assert result.returncode == 0, result.stderr


def disturb(
    checkout: Checkout, setup: Setup, arguments: list[str], runs: Path, kills: int, seed: int
) -> list[str]:
    """Start training again and again, kill or stop a random rank at a random moment each time, then let it finish.

    Says what it does, for a person who waits, and returns it, a line each.
    """
    print(f"\nseed {seed}", flush=True)
    moments = random.Random(seed)
    done = []
    for _ in range(kills):
        process = checkout.start(*setup.command(arguments))
        try:
            last = newest_step(runs)
            wait_for_step_after(process, runs, last, moments.randint(1, 2))
            time.sleep(moments.uniform(0, 0.3))
            ranks = ranks_in(process, setup)
            number = moments.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM])
            rank = moments.randrange(len(ranks)) if ranks else 0
            if ranks:
                _send(ranks[rank], number)
            _, errors = process.communicate(timeout=DEADLINE_SECONDS)
        finally:
            end(process)
        done.append(f"{signal.Signals(number).name} to rank {rank} after step {newest_step(runs)}")
        print(f"  {len(done)} of {kills}: {done[-1]}", flush=True)
        if process.returncode == 0:  # it had just finished
            break
        assert "Traceback (most recent call last)" not in errors or setup.ranks > 1, errors
    finish(checkout, setup.command(arguments))
    return done


def newest_step(runs: Path) -> int:
    return max((int(path.name[5:]) for path in runs.glob("*/checkpoints/step-*")), default=0)


def wait_for_step_after(process: "subprocess.Popen[str]", runs: Path, last: int, checkpoints: int) -> None:
    """Until so many checkpoints behind step `last` are there, or the process has ended."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while newest_step(runs) < last + 2 * checkpoints and process.poll() is None:
        assert time.monotonic() < deadline, "no checkpoint in time"
        time.sleep(0.01)


def ranks_in(process: "subprocess.Popen[str]", setup: Setup) -> list[int]:
    """Process ids of the ranks: under torchrun its children."""
    if setup.ranks == 1:
        return [process.pid] if process.poll() is None else []
    try:
        return [child.pid for child in psutil.Process(process.pid).children()]
    except psutil.NoSuchProcess:
        return []


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)

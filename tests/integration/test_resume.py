"""Real processes, really killed."""

import json
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.conftest import Checkout
from tests.integration.images import write_odd_folder

pytestmark = [pytest.mark.integration, pytest.mark.slow]

KILLS = 3


def options(folder: Path, runs: Path) -> list[str]:
    settings = {
        "data.root": folder,
        "run.directory": runs,
        "run.name": "killed",
        "data.workers": 0,
        "image.size": 16,
        "image.resize": 20,
        "model.name": "mobilenet_v3_small",
        "model.stem": "small",
        "training.epochs": 6,
        "training.batch_size": 16,
        "training.accumulate": 2,
        "training.checkpoint_every": 1,
        "training.log_every": 1,
    }
    return ["-m", "train", "fit", *(f"--{key}={value}" for key, value in settings.items())]


def metrics(run: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "images_per_second"} for line in lines]


def state(run: Path) -> dict[str, Any]:
    return torch.load(max((run / "checkpoints").glob("step-*")) / "state.pt", weights_only=True)


def flat(value: Any, name: str = "") -> dict[str, Any]:
    """Every leaf of nested dictionaries and lists by its path; tensors as their bytes."""
    if isinstance(value, dict):
        return {k: v for key in value for k, v in flat(value[key], f"{name}.{key}").items()}
    if isinstance(value, list | tuple):
        return {k: v for i, item in enumerate(value) for k, v in flat(item, f"{name}.{i}").items()}
    return {name: value.numpy().tobytes() if isinstance(value, torch.Tensor) else value}


def test_killed_at_random_moments_is_bit_identical_to_never_killed(
    checkout: Checkout, tmp_path: Path
) -> None:
    folder = write_odd_folder(tmp_path / "images")
    undisturbed = checkout.run(*options(folder, tmp_path / "straight"))
    assert undisturbed.returncode == 0, undisturbed.stderr
    straight = Path(undisturbed.stdout.strip())

    seed = random.randrange(2**32)
    print(f"seed of the kills: {seed}")
    moments = random.Random(seed)
    killed = tmp_path / "killed" / straight.name
    for number in range(KILLS):
        process = checkout.start(*options(folder, tmp_path / "killed"))
        wait_for_steps(killed, 4 + 6 * number)
        time.sleep(moments.uniform(0, 0.3))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert process.returncode == -signal.SIGKILL
    finished = checkout.run(*options(folder, tmp_path / "killed"))
    assert finished.returncode == 0, finished.stderr
    assert "continuing" in finished.stderr
    assert metrics(killed) == metrics(straight)
    assert flat(state(killed)) == flat(state(straight))


def wait_for_steps(run: Path, steps: int) -> None:
    """Until a checkpoint of at least this step is there."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if any(int(path.name[5:]) >= steps for path in (run / "checkpoints").glob("step-*")):
            return
        time.sleep(0.01)
    raise AssertionError(f"{run} did not reach step {steps}")


def test_two_processes_train_one_model(checkout: Checkout, tmp_path: Path) -> None:
    """As torchrun starts them: one run, one line on stdout, and evaluation that counts every image once."""
    folder = write_odd_folder(tmp_path / "images")
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    arguments = [*options(folder, tmp_path / "runs"), "--training.epochs=1"]
    result = checkout.run(*launcher, *arguments)
    assert result.returncode == 0, result.stderr
    run = Path(result.stdout.strip())
    assert json.loads((run / "environment.json").read_text())["world_size"] == 2
    (evaluation,) = (line for line in metrics(run) if line["kind"] == "evaluation")
    assert evaluation["accuracy"] * 24 == round(evaluation["accuracy"] * 24)
    alone = checkout.run(*options(folder, tmp_path / "alone"), "--training.epochs=1")
    assert alone.returncode == 0, alone.stderr
    samples = [line["samples"] for line in metrics(run) if line["kind"] == "train"]
    assert samples == [16, 32, 48, 64, 72]
    assert samples == [
        line["samples"] for line in metrics(Path(alone.stdout.strip())) if line["kind"] == "train"
    ]

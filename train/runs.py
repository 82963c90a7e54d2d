"""A run: one directory that says what was trained, from what, on what, and how it went."""

import json
import platform
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch

import slipway
from slipway import config as configuration
from slipway import hashing, sealed
from slipway.files import write_whole, writing
from slipway.paths import PROJECT_ROOT
from slipway.sealed import write_json
from slipway.source import code_hash
from train.config import Config
from train.dataset import Dataset
from train.hardware import Machine

LOCK = PROJECT_ROOT / "requirements" / "train.lock"
# What lines of metrics.jsonl say of the machine and not of training: no two runs agree in these.
MEASURED = frozenset({"images_per_second", "data_wait", "memory_mb", "memory_reserved_mb"})
_PACKAGES = (
    "torch",
    "torchvision",
    "lightning",
    "numpy",
    "pillow",
    "onnx",
    "onnxscript",
    "onnxruntime",
    "openvino",
    "nncf",
)


@dataclass(frozen=True, kw_only=True)
class Run:
    """`runs/<name>-<hash of its inputs>/`: equal inputs are the same run, and continue it."""

    directory: Path
    inputs: str

    @property
    def checkpoints(self) -> Path:
        return self.directory / "checkpoints"

    @property
    def evaluations(self) -> Path:
        return self.directory / "evaluations"

    @property
    def metrics(self) -> Path:
        return self.directory / "metrics.jsonl"


def run_for(config: Config, dataset: Dataset) -> Run:
    """The run that this configuration, data set, code and lock determine. Nothing is created.

    Raises SealError if `model.start_from` is not a sealed directory.
    """
    settings = configuration.to_dict(config)
    # Where things lie, what trains and what happens afterwards do not change what is trained.
    for section in ("run", "doctor", "hardware", "debug", "export"):
        del settings[section]
    for option in ("source", "root", "url", "classes", "cache", "embedded", "workers"):
        del settings["data"][option]
    if start := config.model.start_from:
        settings["model"]["start_from"] = _seal_of(start)
    inputs = hashing.of_data(
        {
            "name": config.run.name,
            "settings": settings,
            "data": dataset.fingerprint,
            "code": code_hash("train.fit"),
            "lock": hashing.of_file(LOCK),
        }
    )
    return Run(directory=config.run.directory / f"{config.run.name}-{inputs[:8]}", inputs=inputs)


def _seal_of(start: Path) -> str:
    try:
        return sealed.read_manifest(start).seal
    except sealed.SealError as error:
        raise sealed.SealError(
            f"model.start_from: {error}. A run is named after what it started from, so keep that: copy a checkpoint "
            "out of a run that goes on and removes its older ones"
        ) from error


def describe(run: Run, config: Config, dataset: Dataset, machine: Machine) -> None:
    """Write `config.yaml` (every value, resolved) and `environment.json`. Raises SlipwayError."""
    found = {**environment(), **_launched(config, dataset, machine)}
    with writing(run.directory):
        run.directory.mkdir(parents=True, exist_ok=True)
        (run.directory / "config.yaml").write_text(configuration.to_yaml(config), encoding="utf-8")
        write_json(run.directory / "environment.json", found)


def environment() -> dict[str, Any]:
    """What could make the same code behave differently elsewhere."""
    return {
        "versions": {"slipway": slipway.__version__, **{name: version(name) for name in _PACKAGES}},
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": {"threads": torch.get_num_threads(), "capability": torch.backends.cpu.get_cpu_capability()},
        "lock_sha256": hashing.of_file(LOCK),
        "code_sha256": code_hash("train.__main__"),
        "git": git_state(),
    }


def git_state() -> dict[str, Any]:
    """The commit, and whether the working tree differs from it; null where there is no repository."""
    try:
        commit = _git("rev-parse", "HEAD")
        return {"commit": commit, "dirty": bool(_git("status", "--porcelain"))}
    except (OSError, subprocess.CalledProcessError):
        return {"commit": None, "dirty": None}


def append_metrics(run: Run, line: dict[str, Any]) -> None:
    """Raises SlipwayError where it cannot be written: a full disk is met here, long before the next checkpoint."""
    with writing(run.metrics), run.metrics.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def read_metrics(run: Run) -> Iterator[dict[str, Any]]:
    """Every complete line. A line cut short by a kill is the last one, and is left out."""
    if not run.metrics.exists():
        return
    with run.metrics.open(encoding="utf-8") as file:
        for line in file:
            if not line.endswith("\n"):  # or being written just now
                return
            yield json.loads(line)


def epochs_without_gain(run: Run) -> int:
    """Epochs since the best validation so far: by accuracy, then by loss, of the weights or their average."""
    evaluations = [line for line in read_metrics(run) if line["kind"] == "evaluation"]
    best, since = (-1.0, 0.0), 0
    for _, lines in groupby(evaluations, key=itemgetter("epoch")):
        reached = max((line["accuracy"], -line["loss"]) for line in lines)
        best, since = (reached, 0) if reached > best else (best, since + 1)
    return since


def forget_metrics_after(run: Run, cursor: int) -> None:
    """Drop what was logged behind the checkpoint that training continues from: it will happen again.

    Raises SlipwayError where the rest cannot be written.
    """
    kept = [line for line in read_metrics(run) if line["samples"] <= cursor]
    with writing(run.metrics):
        write_whole(run.metrics, "".join(json.dumps(line) + "\n" for line in kept))


def _launched(config: Config, dataset: Dataset, machine: Machine) -> dict[str, Any]:
    on_cuda = machine.device.type == "cuda"
    device = torch.cuda.get_device_name(machine.device) if on_cuda else platform.machine()
    return {
        "command": sys.argv,
        "device": device,
        "world_size": machine.fabric.world_size,
        "precision": {"requested": config.training.precision, "effective": machine.precision.precision},
        "data": {
            "root": config.data.url or str(configuration.to_dict(config)["data"]["root"]),
            "fingerprint": dataset.fingerprint,
            "images": {split: len(samples) for split, samples in dataset.splits.items()},
        },
    }


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(PROJECT_ROOT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

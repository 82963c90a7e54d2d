"""Checkpoints: the complete state of training at an optimiser step, as a sealed directory.

`checkpoints/step-00000123/` holds `state.pt` (tensors and plain values only, loads with weights_only=True),
`progress.json`, `signature.json` and `config.yaml`. Parameter names are the module's own. There is no random state:
data order, augmentation and dropout are pure functions of seed, epoch, step and rank.
"""

import json
import logging
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from slipway import config as configuration
from slipway import sealed
from slipway.contract import Signature
from slipway.errors import SlipwayError
from train.config import Config
from train.folder import ImageFolder
from train.runs import Run, read_metrics

KIND = "checkpoint"

logger = logging.getLogger(__name__)


class CheckpointError(SlipwayError):
    """A checkpoint is missing, or does not fit the model it is to be loaded into."""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far training has come. step: optimiser steps taken. cursor: samples consumed. skipped: overflows."""

    step: int = 0
    cursor: int = 0
    skipped: int = 0


def save(run: Run, config: Config, signature: Signature, progress: Progress, state: dict[str, Any]) -> Path:
    """Write one checkpoint and prune older ones, in that order. Call on one rank only.

    Raises SealError when it cannot be written; earlier checkpoints stay as they are.
    """
    directory = run.checkpoints / f"step-{progress.step:08d}"
    if not directory.exists():
        with sealed.stage(directory, kind=KIND, inputs=run.inputs) as staging:
            _save_state(state, staging / "state.pt")
            sealed.write_json(staging / "progress.json", asdict(progress))
            signature.save(staging / "signature.json")
            (staging / "config.yaml").write_text(configuration.to_yaml(config), encoding="utf-8")
    _prune(run, config.training.keep_checkpoints)
    return directory


def load_state(directory: Path) -> dict[str, Any]:
    """Verify a checkpoint and read `state.pt` onto the CPU. Raises SealError."""
    sealed.verify(directory, KIND)
    state: dict[str, Any] = torch.load(directory / "state.pt", map_location="cpu", weights_only=True)
    return state


def load_model(directory: Path, model: torch.nn.Module) -> None:
    """Load the weights strictly. Raises SealError, or CheckpointError naming what does not fit."""
    weights, wanted = load_state(directory)["model"], model.state_dict()
    for problem, names in (
        ("lacks", wanted.keys() - weights.keys()),
        ("has the unknown", weights.keys() - wanted.keys()),
        (
            "has another shape of",
            {n for n in wanted.keys() & weights.keys() if wanted[n].shape != weights[n].shape},
        ),
    ):
        if names:
            raise CheckpointError(
                f"{directory}: does not fit this model: it {problem} {min(names)} ({len(names)} of {len(wanted)}). "
                "Was it trained with another model.name, model.stem or class list?"
            )
    model.load_state_dict(weights, strict=True)


def load_progress(directory: Path) -> Progress:
    return Progress(**json.loads((directory / "progress.json").read_bytes()))


def load_signature(directory: Path) -> Signature:
    return Signature.load(directory / "signature.json")


def signature_for(config: Config, folder: ImageFolder) -> Signature:
    """The contract of the model that this configuration trains on this data."""
    return Signature(
        name=config.run.name,
        classes=folder.classes,
        preprocessing=config.image.preprocessing(),
        mean=config.image.mean,
        std=config.image.std,
        max_batch=config.export.max_batch,
    )


def newest(run: Run) -> Path | None:
    """The last good checkpoint; damaged ones are passed over with a warning."""
    return sealed.newest_good(run.checkpoints, KIND)


def best(run: Run) -> Path:
    """The checkpoint with the best validation accuracy; of equals the lower loss, then the later step.

    Recovered from what is really there, not from a pointer that could be wrong. Raises CheckpointError.
    """
    there = {directory.name: directory for directory in sealed.sealed_in(run.checkpoints)}
    for name in _ranked(run):
        if name in there:
            sealed.verify(there[name], KIND)
            return there[name]
    raise CheckpointError(
        f"{run.directory}: has no evaluated checkpoint; run `make train` with this configuration"
    )


def _save_state(state: dict[str, Any], path: Path) -> None:
    try:
        torch.save(state, path)
    except RuntimeError as error:  # how torch.save reports a full disk
        raise OSError(f"{path.name}: {error}") from error


def _ranked(run: Run) -> list[str]:
    """Names of evaluated checkpoints, best first."""
    evaluations = [line for line in read_metrics(run) if line["kind"] == "evaluation"]
    evaluations.sort(key=lambda line: (-line["accuracy"], line["loss"], -line["step"]))
    return [f"step-{line['step']:08d}" for line in evaluations]


def _prune(run: Run, keep: int) -> None:
    directories = sealed.sealed_in(run.checkpoints)
    protected = {directory.name for directory in directories[-keep:]} | set(_ranked(run)[:1])
    for directory in directories:
        if directory.name not in protected:
            shutil.rmtree(directory)

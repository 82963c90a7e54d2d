"""Checkpoints: the complete state of training at an optimiser step, as a sealed directory.

    checkpoints/step-00000123/     (step-00000123+0002, if two windows since the start of training were passed over)
      state/*.safetensors   model.*, optimizer.* and ema.*: a file for each rank, written by all ranks at once
      progress.json         where training stands, and the loss scale
      signature.json        the contract of the model
      config.yaml           every value it was trained with

One format for every strategy: PyTorch's distributed checkpoint with safetensors as its storage, so nothing is
pickled, and what two sharded ranks wrote can be read by one, three, or none at all (evaluation and export).
Parameter names are the module's own. There is no random state: data order, augmentation and dropout are functions
of the position in training.
"""

import json
import logging
import shutil
import uuid
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from slipway import config as configuration
from slipway import sealed
from slipway.contract import Signature
from slipway.errors import SlipwayError
from slipway.sealed import SealError
from train.config import Config
from train.dataset import Dataset
from train.hardware import Machine
from train.runs import Run, read_metrics

KIND = "checkpoint"
STATE = "state"

Weights = Literal["raw", "ema"]
Tensors = dict[str, torch.Tensor]

_OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)

logger = logging.getLogger(__name__)


class CheckpointError(SlipwayError):
    """A checkpoint is missing, cannot be read, or does not fit the model it is to be loaded into."""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far training has come.

    step: optimiser steps taken. cursor: samples consumed by all ranks. skipped: steps that were not taken, because
    of overflow, a bad loss, or a window without a good sample. bad_samples: of those consumed, how many could not be
    decoded. precision: what training really runs in. loss_average: over the last steps. loss_scale: the GradScaler's
    state; empty where there is none.
    """

    step: int = 0
    cursor: int = 0
    skipped: int = 0
    bad_samples: int = 0
    precision: str = "32-true"
    loss_average: float | None = None
    loss_scale: dict[str, float] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Of the checkpoint that holds it. Every window of the data has another one, and they sort by time."""
        return f"step-{self.step:08d}" + (f"+{self.skipped:04d}" if self.skipped else "")


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A checkpoint, and which of its weights: as trained, or their moving average."""

    directory: Path
    weights: Weights


def save(
    machine: Machine, run: Run, config: Config, signature: Signature, progress: Progress, tensors: Tensors
) -> Path:
    """Write one checkpoint, all ranks together, and prune older ones, in that order.

    One that is there already stays if it is whole, and is set aside under a hidden name if it is damaged.
    Raises SealError on every rank when it cannot be written; earlier checkpoints stay as they are.
    """
    directory = run.checkpoints / progress.name
    if machine.decide(lambda: _is_whole(directory)):
        return directory
    with _staged_by_all(machine, directory, run.inputs) as staging:
        _write_tensors(tensors, staging / STATE, machine)
        if machine.is_first:
            set_aside(directory)
            sealed.write_json(staging / "progress.json", asdict(progress))
            signature.save(staging / "signature.json")
            (staging / "config.yaml").write_text(configuration.to_yaml(config), encoding="utf-8")
    machine.decide(lambda: _prune(run, config.training.keep_checkpoints, saved=directory))
    return directory


def _is_whole(directory: Path) -> bool:
    try:
        sealed.verify(directory, KIND)
    except SealError:
        return False
    return True


def set_aside(damaged: Path) -> None:
    """Make way for what is to have the same name, if there is any; kept for whoever wants to know what happened."""
    if damaged.exists():
        aside = damaged.with_name(f".damaged-{damaged.name}-{uuid.uuid4().hex[:8]}")
        damaged.rename(aside)
        logger.warning("WARNING: %s is damaged; kept as %s and written again", damaged, aside.name)


def tensors_of(module: torch.nn.Module, optimizer: torch.optim.Optimizer, ema: Tensors | None) -> Tensors:
    """Everything a checkpoint holds of these, by name. The tensors are the live ones, not copies."""
    model: dict[str, Any] = get_model_state_dict(module)
    # Plain values, such as learning rates, are configuration.
    moments = {
        name: value
        for name, value in _optimizer_state(module, optimizer).items()
        if isinstance(value, torch.Tensor)
    }
    groups: dict[str, Tensors] = {"model": model, "optimizer": moments, "ema": ema or {}}
    return {f"{group}.{name}": value for group, values in groups.items() for name, value in values.items()}


def restore(
    directory: Path,
    machine: Machine,
    module: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    ema: Tensors | None,
) -> Progress:
    """Load a verified checkpoint into model, optimiser and average, in place, on any number of ranks.

    Raises CheckpointError where names or shapes differ, or the storage fails.
    """
    tensors = tensors_of(module, optimizer, ema)
    # Before the reading, which is one of all ranks.
    with _same_end(machine, CheckpointError), _readable(directory):
        _require_fits(tensors, directory)
        progress = load_progress(directory)
    with _readable(directory):
        _read_tensors(tensors, directory, alone=machine.world_size == 1)
    moments = {
        name.removeprefix("optimizer."): value
        for name, value in tensors.items()
        if name.startswith("optimizer.")
    }
    state = {**_optimizer_state(module, optimizer), **moments}
    set_optimizer_state_dict(module, optimizer, state, options=_OPTIONS)
    return progress


def _optimizer_state(module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Tensors and plain values by `state.<parameter>.<moment>` and `param_groups.<parameter>.<setting>`."""
    return dict(get_optimizer_state_dict(module, optimizer, options=_OPTIONS))


def load_weights(choice: Choice, module: torch.nn.Module) -> None:
    """Load the chosen weights of a checkpoint into a plain module, strictly. Raises SealError, CheckpointError."""
    sealed.verify(choice.directory, KIND)
    group = "model" if choice.weights == "raw" else "ema"
    tensors = {f"{group}.{name}": value for name, value in module.state_dict().items()}
    with _readable(choice.directory):
        _require_fits(tensors, choice.directory)
        _read_tensors(tensors, choice.directory, alone=True)


def read_weights(choice: Choice) -> Tensors:
    """The chosen weights of a checkpoint, on the CPU, by the module's own names. Raises SealError, CheckpointError."""
    sealed.verify(choice.directory, KIND)
    group = "model" if choice.weights == "raw" else "ema"
    with _readable(choice.directory):
        stored = _stored(choice.directory, f"{group}.")
        tensors = {
            name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in stored.items()
        }
        _read_tensors(tensors, choice.directory, alone=True)
    return {name.removeprefix(f"{group}."): value for name, value in tensors.items()}


def load_progress(directory: Path) -> Progress:
    return Progress(**json.loads((directory / "progress.json").read_bytes()))


def load_signature(directory: Path) -> Signature:
    return Signature.load(directory / "signature.json")


def signature_for(config: Config, dataset: Dataset) -> Signature:
    """The contract of the model that this configuration trains on this data."""
    return Signature(
        name=config.run.name,
        classes=dataset.classes,
        preprocessing=config.image.preprocessing(),
        mean=config.image.mean,
        std=config.image.std,
        max_batch=config.export.max_batch,
    )


def newest(run: Run) -> Path | None:
    """The last good checkpoint; damaged ones are passed over with a warning."""
    return sealed.newest_good(run.checkpoints, KIND)


def best(run: Run) -> Choice:
    """The weights with the best validation accuracy; of equals the lower loss, then the later step.

    Recovered from what is really there, not from a pointer that could be wrong; damaged ones are passed over with a
    warning. Raises CheckpointError.
    """
    there = {directory.name: directory for directory in sealed.sealed_in(run.checkpoints)}
    for name, weights in _ranked(run):
        if name in there:
            try:
                sealed.verify(there[name], KIND)
            except SealError as error:
                logger.warning("WARNING: passing over a damaged checkpoint: %s", error)
                del there[name]  # its other weights are no better
            else:
                return Choice(directory=there[name], weights=weights)
    raise CheckpointError(
        f"{run.directory}: has no evaluated checkpoint that is whole; run `make train` with this configuration"
    )


def _ranked(run: Run) -> list[tuple[str, Weights]]:
    """Evaluated checkpoints by name and weights, best first."""
    evaluations = [line for line in read_metrics(run) if line["kind"] == "evaluation"]
    evaluations.sort(key=lambda line: (-line["accuracy"], line["loss"], -line["step"]))
    return [(line["checkpoint"], line["weights"]) for line in evaluations]


def _prune(run: Run, keep: int, saved: Path) -> None:
    """Of those up to the one just saved. Training passed over what is newer, and will get there again."""
    directories = [path for path in sealed.sealed_in(run.checkpoints) if path.name <= saved.name]
    protected = {directory.name for directory in directories[-keep:]}
    protected |= {name for name, _ in _ranked(run)[:1]}
    for directory in directories:
        if directory.name not in protected:
            try:
                shutil.rmtree(directory)
            except OSError as error:
                logger.warning("WARNING: %s: is old but cannot be removed (%s)", directory, error)


@contextmanager
def _staged_by_all(machine: Machine, directory: Path, inputs: str) -> Iterator[Path]:
    """The first rank stages and seals; all of them write."""
    staged, staging = ExitStack(), ""
    with _same_end(machine, SealError):
        if machine.is_first:
            staging = str(staged.enter_context(sealed.stage(directory, kind=KIND, inputs=inputs)))
    staging = machine.decide(lambda: staging)
    # What went wrong with writing reaches the first rank before it seals, and its sentence reaches all.
    with _same_end(machine, SealError), staged, _same_end(machine, OSError):
        yield Path(staging)


@contextmanager
def _same_end(machine: Machine, kind: type[OSError | SlipwayError]) -> Iterator[None]:
    """What fails on one rank fails on all: each raises `kind`, in the words of the first of those that failed."""
    words = ""
    try:
        yield
    except (OSError, SlipwayError) as error:
        words = str(error) or repr(error)
    if failed := [said for said in machine.everyones(words) if said]:
        raise kind(failed[0])


def _write_tensors(tensors: Tensors, directory: Path, machine: Machine) -> None:
    # What all ranks hold alike, such as batch statistics, is taken from the first.
    planner = DefaultSavePlanner(dedup_save_to_lowest_rank=True)
    writer = HuggingFaceStorageWriter(str(directory), save_distributed=True)
    with _plain_errors(directory), _one_process_is_meant():
        state_dict_saver.save(
            tensors,
            storage_writer=writer,
            planner=planner,
            process_group=machine.group,
            no_dist=machine.world_size == 1,
        )


def _require_fits(tensors: Tensors, directory: Path) -> None:
    """Raises CheckpointError if the checkpoint has other names or shapes than these."""
    groups = tuple({f"{name.split('.')[0]}." for name in tensors})
    shapes = {name: entry.size for name, entry in _stored(directory, groups).items()}
    for problem, names in (
        ("lacks", tensors.keys() - shapes.keys()),
        ("has the unknown", shapes.keys() - tensors.keys()),
        (
            "has another shape of",
            {n for n in shapes.keys() & tensors.keys() if shapes[n] != tensors[n].shape},
        ),
    ):
        if names:
            raise CheckpointError(
                f"{directory}: does not fit this model: it {problem} {min(names)} ({len(names)} of {len(tensors)}). "
                "Was it trained with another model.name, model.stem, optimizer.name or class list?"
            )


def _read_tensors(tensors: Tensors, directory: Path, *, alone: bool) -> None:
    """Fill `tensors`, which fit, in place."""
    reader = HuggingFaceStorageReader(str(directory / STATE))
    with _plain_errors(directory), _one_process_is_meant():
        state_dict_loader.load(tensors, storage_reader=reader, no_dist=alone)


def _stored(directory: Path, groups: str | tuple[str, ...]) -> dict[str, TensorStorageMetadata]:
    """What a checkpoint holds of the tensors whose names start with one of `groups`."""
    metadata = HuggingFaceStorageReader(str(directory / STATE)).read_metadata().state_dict_metadata
    return {
        name: entry
        for name, entry in metadata.items()
        if name.startswith(groups) and isinstance(entry, TensorStorageMetadata)
    }


@contextmanager
def _readable(directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"{directory}: cannot be read ({error}); is its storage still there? Start again when it is"
        ) from error


@contextmanager
def _plain_errors(directory: Path) -> Iterator[None]:
    """PyTorch gathers what went wrong on all ranks in an exception that `except Exception` does not catch."""
    try:
        yield
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items())
        raise OSError(f"{directory.name}, rank {rank}: {cause}") from error


@contextmanager
def _one_process_is_meant() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
        yield

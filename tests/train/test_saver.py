"""In the background, a checkpoint is that of the moment it was asked for, and what goes wrong is told."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from slipway import sealed
from slipway.sealed import SealError
from tests.train.conftest import MakeConfig, MakeFolder
from train import checkpoint
from train.checkpoint import Choice, Progress, Tensors
from train.config import HardwareConfig, TrainingConfig
from train.folder import read_folder
from train.hardware import launch
from train.runs import Run, run_for
from train.saver import Saver

MakeSaver = Callable[..., Saver]


@pytest.fixture
def run(make_folder: MakeFolder, make_config: MakeConfig) -> Run:
    config = make_config(make_folder())
    return run_for(config, read_folder(config.data))


@pytest.fixture
def make_saver(make_config: MakeConfig, run: Run) -> Iterator[MakeSaver]:
    """A saver for the run; it is closed in the end."""
    config = make_config(run.directory.parents[1] / "images")
    signature = checkpoint.signature_for(config, read_folder(config.data))
    savers = []

    def make(*, background: bool) -> Saver:
        machine = launch(HardwareConfig(accelerator="cpu"), TrainingConfig())
        hardware = replace(config.hardware, background_saving=background)
        savers.append(Saver(machine, run, replace(config, hardware=hardware), signature))
        return savers[-1]

    yield make
    for saver in savers:
        saver.close()


def weights(value: float) -> Tensors:
    return {"model.weight": torch.full((2, 3), value), "model.bias": torch.full((2,), value)}


def saved(run: Run, step: int) -> nn.Module:
    module = nn.Linear(3, 2)
    checkpoint.load_weights(
        Choice(directory=run.checkpoints / Progress(step=step).name, weights="raw"), module
    )
    return module


class HeldUp:
    """A disk that waits until it is let go, and may then be full."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, full: bool = False) -> None:
        self.go, self.reached = threading.Event(), threading.Event()
        write = checkpoint._write_tensors

        def held_up(tensors: Tensors, directory: Path, machine: object) -> None:
            self.reached.set()
            assert self.go.wait(60)
            if full:
                raise OSError("No space left on device")
            write(tensors, directory, machine)  # type: ignore[arg-type]

        monkeypatch.setattr(checkpoint, "_write_tensors", held_up)


def test_background_checkpoint_holds_the_state_of_its_step_although_training_went_on(
    make_saver: MakeSaver, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = HeldUp(monkeypatch)
    saver, live = make_saver(background=True), weights(1.0)
    saver.save(Progress(step=1), live)
    assert disk.reached.wait(60)
    for tensor in live.values():
        tensor.fill_(2.0)  # the next step, in place
    assert not sealed.sealed_in(run.checkpoints)
    disk.go.set()
    saver.finish()
    saver.save(Progress(step=2), live)
    saver.finish()
    for step in (1, 2):
        assert torch.equal(saved(run, step).weight, torch.full((2, 3), float(step)))  # type: ignore[arg-type]


def test_failure_in_the_background_is_raised_by_the_next_call(
    make_saver: MakeSaver, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case B03: a full disk is no smaller fault for being found later."""
    disk = HeldUp(monkeypatch, full=True)
    disk.go.set()
    saver = make_saver(background=True)
    saver.save(Progress(step=1), weights(1.0))
    with pytest.raises(SealError, match=r"step-00000001: could not be written .*No space left"):
        saver.save(Progress(step=2), weights(2.0))
    saver.finish()  # told once
    assert not sealed.sealed_in(run.checkpoints)


def test_failure_that_no_call_hears_of_is_said_at_the_end(
    make_saver: MakeSaver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    disk = HeldUp(monkeypatch, full=True)
    disk.go.set()
    saver = make_saver(background=True)
    saver.save(Progress(step=1), weights(1.0))
    saver.close()
    assert "the last checkpoint was not written" in caplog.text


def test_checkpoint_in_the_foreground_is_there_when_the_call_returns(make_saver: MakeSaver, run: Run) -> None:
    make_saver(background=False).save(Progress(step=1), weights(1.0))
    assert [path.name for path in sealed.sealed_in(run.checkpoints)] == ["step-00000001"]

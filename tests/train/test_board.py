"""Experiment trackers get the figures that metrics.jsonl has, as one run, however often training is continued."""

import importlib.util
import socket
from dataclasses import replace
from pathlib import Path

import pytest
from mlflow import MlflowClient
from torch.utils.tensorboard import SummaryWriter

from slipway.errors import SlipwayError
from tests.train.conftest import MakeConfig, MakeFolder
from train import fit as loop
from train.board import Board, BoardError, board
from train.config import Config
from train.dataset import Dataset
from train.fit import fit
from train.folder import read_folder
from train.runs import Run, read_metrics, run_for


@pytest.fixture
def data(make_folder: MakeFolder, make_config: MakeConfig) -> tuple[Dataset, MakeConfig, Path]:
    root = make_folder()
    return read_folder(make_config(root).data), make_config, root


def rates(run: Path) -> dict[int, float]:
    lines = read_metrics(Run(directory=run, inputs=""))
    return {line["step"]: line["lr"] for line in lines if line["kind"] == "train"}


@pytest.mark.filterwarnings("ignore")  # of MLflow, about itself
def test_mlflow_has_one_run_with_every_figure_also_after_a_restart(
    data: tuple[Dataset, MakeConfig, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    dataset, make_config, root = data
    config = make_config(root, run__loggers="[mlflow]")
    run = stopped_and_continued(config, dataset, monkeypatch)
    client = MlflowClient((config.run.directory / "mlruns").as_uri())
    experiment = client.get_experiment_by_name("tiny")
    assert experiment is not None
    (tracked,) = client.search_runs([experiment.experiment_id])
    assert tracked.info.run_name == run.name
    assert tracked.info.status == "FINISHED"
    assert tracked.data.params["optimizer/lr"] == "0.001"
    history = client.get_metric_history(tracked.info.run_id, "train/lr")
    assert {entry.step: entry.value for entry in history} == pytest.approx(rates(run))


def stopped_and_continued(config: Config, dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> Path:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(loop, "_validate", interrupt)
        with pytest.raises(KeyboardInterrupt):
            fit(config, dataset)
    # With another value that does not determine what is trained: MLflow lets nobody change parameters.
    hardware = replace(config.hardware, background_saving=True)
    return fit(replace(config, hardware=hardware), dataset)


def test_tracker_that_fails_is_given_up_and_training_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Gone:
        asked = 0

        def log_metrics(self, figures: dict[str, float], step: int) -> None:
            self.asked += 1
            raise ConnectionError("no such server")

    tracker = Gone()
    with SummaryWriter(str(tmp_path)) as tensorboard:
        shown = Board(tensorboard, [tracker])  # type: ignore[list-item]
        shown.log({"loss": 1.0}, 1)
        shown.log({"loss": 0.5}, 2)
    assert tracker.asked == 1
    assert caplog.messages == ["WARNING: Gone: no such server; it gets no more figures"]


@pytest.mark.filterwarnings("ignore")  # of MLflow, about itself
def test_tracking_server_that_is_down_is_named(
    data: tuple[Dataset, MakeConfig, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset, make_config, root = data
    config = make_config(root, run__loggers="[mlflow]")
    with socket.socket() as deaf:  # its port is nobody else's meanwhile
        deaf.bind(("127.0.0.1", 0))
        uri = f"http://127.0.0.1:{deaf.getsockname()[1]}"
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
        with (
            pytest.raises(BoardError, match=rf"run\.loggers mlflow: {uri} cannot be used .* or leave it out"),
            board(run_for(config, dataset), config, 0),
        ):
            pytest.fail("there is no such server")


def test_tensorboard_that_cannot_be_written_is_said_in_words(
    data: tuple[Dataset, MakeConfig, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case B03. Its own thread writes, so where a real disk is full, the next figure raises what happened there."""
    config = data[1](data[2])

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(SummaryWriter, "add_scalar", full)
    words = r"tensorboard: cannot be written .*No space left.* MB are free"
    with (
        board(Run(directory=tmp_path, inputs=""), config, 0) as shown,
        pytest.raises(SlipwayError, match=words),
    ):
        shown.log({"loss": 1.0}, 1)
    nowhere = tmp_path / "file"
    nowhere.write_text("no directory")
    with (
        pytest.raises(SlipwayError, match="file/tensorboard: cannot be written"),
        board(Run(directory=nowhere, inputs=""), config, 0),
    ):
        pytest.fail("there is no room for it")


@pytest.mark.filterwarnings("ignore")  # of W&B, about itself
def test_wandb_keeps_the_figures_in_the_runs_directory(
    data: tuple[Dataset, MakeConfig, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB__SERVICE_WAIT", "300")  # seconds; a busy machine needs more than its 30
    dataset, make_config, root = data
    run = fit(make_config(root, run__loggers="[wandb]"), dataset)
    (file,) = run.glob("wandb/offline-run-*/*.wandb")
    assert b"val/accuracy/raw" in file.read_bytes()


def test_tracker_that_is_not_installed_is_named_before_anything_is_trained(
    data: tuple[Dataset, MakeConfig, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset, make_config, root = data
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BoardError, match=r"names wandb, which is not installed; run `make extras`"):
        fit(make_config(root, run__loggers="[wandb]"), dataset)

"""Experiment trackers get the figures that metrics.jsonl has, as one run, however often training is continued."""

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest
from mlflow import MlflowClient
from torch.utils.tensorboard import SummaryWriter

from tests.train.conftest import MakeConfig, MakeFolder
from train import fit as loop
from train.board import Board, BoardError
from train.config import Config
from train.dataset import Dataset
from train.fit import fit
from train.folder import read_folder
from train.runs import Run, read_metrics


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

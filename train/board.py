"""Where figures go besides metrics.jsonl: TensorBoard always, and the experiment trackers that `run.loggers` names."""

import importlib.util
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from torch.utils.tensorboard import SummaryWriter

from slipway import config as configuration
from slipway.errors import SlipwayError
from train.config import Config
from train.runs import Run

if TYPE_CHECKING:
    from lightning.pytorch.loggers import Logger


class BoardError(SlipwayError):
    """A tracker is asked for that is not installed."""


class Board:
    """Takes figures by name, for a step of training."""

    def __init__(self, tensorboard: SummaryWriter, trackers: "Sequence[Logger]") -> None:
        self._tensorboard, self._trackers = tensorboard, trackers

    def log(self, figures: dict[str, float], step: int) -> None:
        for name, value in figures.items():
            self._tensorboard.add_scalar(name, value, step)
        for tracker in self._trackers:
            tracker.log_metrics(figures, step=step)


@contextmanager
def board(run: Run, config: Config, step: int) -> Iterator[Board]:
    """Open all of them for a run that stands at `step`; in each it is one run, however often it is continued."""
    with ExitStack() as stack:
        tensorboard = SummaryWriter(str(run.directory / "tensorboard"), purge_step=step + 1)
        stack.callback(tensorboard.close)
        trackers = [stack.enter_context(_TRACKERS[name](run, config)) for name in config.run.loggers]
        for tracker in trackers:
            tracker.log_hyperparams(configuration.to_dict(config))
        yield Board(tensorboard, trackers)


def require_installed(trackers: Sequence[str]) -> None:
    """Raises BoardError for one that is not."""
    for name in trackers:
        if importlib.util.find_spec(name) is None:
            raise BoardError(
                f"run.loggers names {name}, which is not installed; run `make extras`, or leave it out"
            )


@contextmanager
def _mlflow(run: Run, config: Config) -> Iterator["Logger"]:
    """At MLFLOW_TRACKING_URI, or in files beside the runs."""
    from lightning.pytorch.loggers import MLFlowLogger
    from mlflow import MlflowClient

    # Files are what works with nothing else running. MLflow asks for a word before it writes them.
    os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = os.environ.get("MLFLOW_TRACKING_URI") or (config.run.directory.absolute() / "mlruns").as_uri()
    client = MlflowClient(uri)
    name = run.directory.name
    experiment = client.get_experiment_by_name(config.run.name)
    found = client.search_runs([experiment.experiment_id], f"run_name = '{name}'") if experiment else []
    logger = MLFlowLogger(
        experiment_name=config.run.name,
        run_name=name,
        tracking_uri=uri,
        run_id=found[0].info.run_id if found else None,
    )
    status = "failed"
    try:
        yield logger
        status = "success"
    finally:
        logger.finalize(status)


@contextmanager
def _wandb(run: Run, config: Config) -> Iterator["Logger"]:
    """As its own settings say: WANDB_MODE=offline keeps all of it in the run's directory."""
    from lightning.pytorch.loggers import WandbLogger

    name = run.directory.name
    logger = WandbLogger(name=name, id=name, project=config.run.name, save_dir=run.directory)
    with logger.experiment:
        yield logger


_TRACKERS = {"mlflow": _mlflow, "wandb": _wandb}

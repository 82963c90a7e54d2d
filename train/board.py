"""Where figures go besides metrics.jsonl: TensorBoard always, and the experiment trackers that `run.loggers` names."""

import importlib.util
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from torch.utils.tensorboard import SummaryWriter

from slipway import config as configuration
from slipway.errors import SlipwayError
from slipway.files import writing
from train.config import Config
from train.runs import Run

if TYPE_CHECKING:
    from lightning.pytorch.loggers import Logger, MLFlowLogger


# Files are what works with nothing else running, and MLflow asks for a word before it writes them. A server that is
# gone must not hold training up for minutes; and that training runs is nobody else's affair.
_MLFLOW_SETTINGS = {
    "MLFLOW_ALLOW_FILE_STORE": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}

logger = logging.getLogger(__name__)


class BoardError(SlipwayError):
    """A tracker is asked for that is not installed, or cannot be opened."""


class Board:
    """Takes figures by name, for a step of training."""

    def __init__(self, tensorboard: SummaryWriter, trackers: "Sequence[Logger]") -> None:
        self._tensorboard, self._trackers = tensorboard, list(trackers)

    def log(self, figures: dict[str, float], step: int) -> None:
        """Raises SlipwayError where TensorBoard's file cannot be written."""
        with writing(Path(self._tensorboard.log_dir)):
            for name, value in figures.items():
                self._tensorboard.add_scalar(name, value, step)
        for tracker in list(self._trackers):
            try:
                tracker.log_metrics(figures, step=step)
            except Exception as error:  # noqa: BLE001 - whatever it is, it is no reason to lose training
                logger.warning("WARNING: %s: %s; it gets no more figures", type(tracker).__name__, error)
                self._trackers.remove(tracker)


@contextmanager
def board(run: Run, config: Config, step: int) -> Iterator[Board]:
    """Open all of them for a run that stands at `step`; in each it is one run, however often it is continued.

    Raises BoardError for a tracker that cannot be opened, SlipwayError where TensorBoard's file cannot be written.
    """
    with ExitStack() as stack:
        tensorboard = stack.enter_context(_tensorboard(run.directory / "tensorboard", step))
        trackers = [stack.enter_context(_TRACKERS[name](run, config)) for name in config.run.loggers]
        yield Board(tensorboard, trackers)


def require_installed(trackers: Sequence[str]) -> None:
    """Raises BoardError for one that is not."""
    for name in trackers:
        if importlib.util.find_spec(name) is None:
            raise BoardError(
                f"run.loggers names {name}, which is not installed; run `make extras`, or leave it out"
            )


@contextmanager
def _tensorboard(directory: Path, step: int) -> Iterator[SummaryWriter]:
    with writing(directory):
        writer = SummaryWriter(str(directory), purge_step=step + 1)
    try:
        yield writer
    finally:
        with _not_fatal("TensorBoard"):
            writer.close()


@contextmanager
def _mlflow(run: Run, config: Config) -> Iterator["Logger"]:
    """At MLFLOW_TRACKING_URI, or in files beside the runs."""
    for name, value in _MLFLOW_SETTINGS.items():
        os.environ.setdefault(name, value)
    uri = os.environ.get("MLFLOW_TRACKING_URI") or (config.run.directory.absolute() / "mlruns").as_uri()
    with _in_words("mlflow", uri):
        tracker = _open_mlflow(uri, run.directory.name, config)
    status = "failed"
    try:
        yield tracker
        status = "success"
    finally:
        with _not_fatal("run.loggers mlflow"):
            tracker.finalize(status)


def _open_mlflow(uri: str, name: str, config: Config) -> "MLFlowLogger":
    from lightning.pytorch.loggers import MLFlowLogger
    from mlflow import MlflowClient

    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name(config.run.name)
    found = client.search_runs([experiment.experiment_id], f"run_name = '{name}'") if experiment else []
    tracker = MLFlowLogger(
        experiment_name=config.run.name,
        run_name=name,
        tracking_uri=uri,
        run_id=found[0].info.run_id if found else None,
    )
    if not found:  # they cannot be changed, and a run may go on with other settings of `hardware`
        tracker.log_hyperparams(configuration.to_dict(config))
    return tracker


@contextmanager
def _wandb(run: Run, config: Config) -> Iterator["Logger"]:
    """As its own settings say: WANDB_MODE=offline keeps all of it in the run's directory."""
    from lightning.pytorch.loggers import WandbLogger

    name = run.directory.name
    with _in_words("wandb", "W&B"):
        tracker = WandbLogger(name=name, id=name, project=config.run.name, save_dir=run.directory)
        tracker.log_hyperparams(configuration.to_dict(config))
    code = 1
    try:
        yield tracker
        code = 0
    finally:
        with _not_fatal("run.loggers wandb"):
            tracker.experiment.finish(exit_code=code)


@contextmanager
def _in_words(name: str, place: str) -> Iterator[None]:
    """What goes wrong in here is a BoardError, which says with which tracker, and where that is."""
    try:
        yield
    except Exception as error:
        raise BoardError(
            f"run.loggers {name}: {place} cannot be used ({error}); start again when it can, or leave it out"
        ) from error


@contextmanager
def _not_fatal(name: str) -> Iterator[None]:
    """What goes wrong in here is only said: it must not take the place of the reason why training ends."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - trackers raise what they like
        logger.warning("WARNING: %s: could not be closed well: %s", name, error)


_TRACKERS = {"mlflow": _mlflow, "wandb": _wandb}

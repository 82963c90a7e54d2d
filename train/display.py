"""What a person sees while training runs: a live bar on a terminal, one line an epoch elsewhere."""

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from train.evaluate import Score
from train.meter import Meter

logger = logging.getLogger(__name__)


class Display(Protocol):
    """`step` after every optimiser step, `epoch` after every validation."""

    def step(self, step: int, loss: float, rate: float, meter: Meter) -> None: ...

    def epoch(self, epoch: int, step: int, weights: str, validation: Score) -> None: ...


@contextmanager
def display(steps: int, epochs: int, *, done: int = 0, speaks: bool) -> Iterator[Display]:
    """A display for this rank, `done` of its steps being taken. Only the rank that `speaks` shows anything."""
    if not speaks:
        yield _Silence()
    elif sys.stderr.isatty():
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=Console(stderr=True)) as progress:
            yield _Bar(progress, steps, epochs, done)
    else:
        yield _Lines(epochs)


class _Silence:
    def step(self, step: int, loss: float, rate: float, meter: Meter) -> None:
        pass

    def epoch(self, epoch: int, step: int, weights: str, validation: Score) -> None:
        pass


class _Bar:
    def __init__(self, progress: Progress, steps: int, epochs: int, done: int) -> None:
        self.progress, self.epochs = progress, epochs
        self.task = progress.add_task("training", total=steps, completed=done, figures="")

    def step(self, step: int, loss: float, rate: float, meter: Meter) -> None:
        speed = f"{meter.images_per_second:,.0f} images/s  {meter.memory_mb:,.0f} MB"
        figures = f"loss {loss:.4f}  lr {rate:.2e}  {speed}"
        self.progress.update(self.task, completed=step, figures=figures)

    def epoch(self, epoch: int, step: int, weights: str, validation: Score) -> None:
        self.progress.console.print(
            _epoch_line(epoch, self.epochs, step, weights, validation), highlight=False
        )


class _Lines:
    def __init__(self, epochs: int) -> None:
        self.epochs, self.started = epochs, time.monotonic()
        self.last = ""

    def step(self, step: int, loss: float, rate: float, meter: Meter) -> None:  # noqa: ARG002
        self.last = f"train loss {loss:.4f}, {meter.images_per_second:,.0f} images/s"

    def epoch(self, epoch: int, step: int, weights: str, validation: Score) -> None:
        elapsed = time.monotonic() - self.started
        line = _epoch_line(epoch, self.epochs, step, weights, validation)
        logger.info("%s, %s, %.0f s", line, self.last, elapsed)


def _epoch_line(epoch: int, epochs: int, step: int, weights: str, validation: Score) -> str:
    average = " of the moving average" if weights == "ema" else ""
    return (
        f"epoch {epoch + 1}/{epochs}, step {step}: validation accuracy{average} {validation.accuracy:.4f}, "
        f"loss {validation.loss:.4f}"
    )

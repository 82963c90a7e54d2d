"""What a run says to Prometheus: `metrics.prom` in its directory, read by the textfile collector of node_exporter.

    prometheus-node-exporter --collector.textfile.directory='runs/*'

A file, because training is not there to be asked: it comes and goes, and what has to be noticed is that it hangs or
was killed. `slipway_training_running` is 1 until training has ended, failed or was given up; a run that was killed, or
was preempted and not started again, still says 1 and makes no progress.
"""

import contextlib
import logging
import re
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from prometheus_client import CollectorRegistry, Gauge, write_to_textfile

from slipway import sealed
from train.preemption import Preempted

logger = logging.getLogger(__name__)

TEXTFILE = "metrics.prom"
# However short a step is.
WRITE_SECONDS = 1.0

_ABOUT = {
    "running": "1 until training has ended, failed or was given up",
    "progress_timestamp_seconds": "When a step was last logged, or training began",
    "checkpoint_timestamp_seconds": "When the newest checkpoint was made, or training began, whichever is later",
    "step": "Optimiser steps taken",
    "samples": "Samples drawn",
    "planned_samples": "Samples that all epochs will have drawn",
}


def says_that_it_runs(directory: Path) -> bool:
    """Whether the file of a run does."""
    try:
        text = (directory / TEXTFILE).read_text(encoding="utf-8")
    except FileNotFoundError:
        return False
    return re.search(r"^slipway_training_running\{.*\} 1", text, re.MULTILINE) is not None


class Exposition:
    """Keeps the file of one run while a `with` block lasts.

    directory, checkpoints: of the run. planned_samples: in all epochs together.
    """

    def __init__(self, directory: Path, checkpoints: Path, planned_samples: int) -> None:
        self._file = directory / TEXTFILE
        self._run = directory.name
        self._checkpoints = checkpoints
        self._registry = CollectorRegistry()
        self._gauges: dict[str, Gauge] = {}
        self._began = time.time()
        self._write_at = 0.0
        self._failed = False
        self._set(
            {"running": 1, "planned_samples": planned_samples, "progress_timestamp_seconds": self._began}
        )
        self._write()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not isinstance(error, Preempted):
            self._set({"running": 0})
        self._write()

    def update(self, step: int, samples: int, figures: Mapping[str, float]) -> None:
        """Note progress; it is written at once, or with what comes within the next second."""
        self._set({"step": step, "samples": samples, "progress_timestamp_seconds": time.time(), **figures})
        if time.monotonic() >= self._write_at:
            self._write()

    def _write(self) -> None:
        self._write_at = time.monotonic() + WRITE_SECONDS
        try:
            self._set({"checkpoint_timestamp_seconds": self._last_saved()})
            write_to_textfile(str(self._file), self._registry)
        except (
            OSError
        ) as error:  # a full disk, say; being watched is no reason to end, nor to hide why training does
            if not self._failed:
                logger.warning("WARNING: %s: cannot be written (%s)", self._file, error)
            self._failed = True

    def _last_saved(self) -> float:
        """Since when work would be lost."""
        times = [self._began]
        for directory in sealed.sealed_in(self._checkpoints):
            with contextlib.suppress(FileNotFoundError):  # older ones are being removed
                times.append((directory / sealed.MANIFEST).stat().st_mtime)
        return max(times)

    def _set(self, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            if name not in self._gauges:
                about = _ABOUT.get(name, "As in metrics.jsonl")
                self._gauges[name] = Gauge(
                    f"slipway_training_{name}", about, ("run",), registry=self._registry
                )
            self._gauges[name].labels(self._run).set(value)

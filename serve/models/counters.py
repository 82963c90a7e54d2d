"""What a model counts: why requests fail, and what is in them. Triton's own metrics know neither.

To count with Triton's metrics is a message to its process and its answer, 0.1 ms each time. So models count with
plain numbers, which cost next to nothing, and a thread tells Triton once a second what has come to them. Instances
of a model that count the same thing share the metric in Triton, which adds up.
"""

import os
import signal
import threading
import time
from collections.abc import Iterable, Mapping
from typing import Any

import triton_python_backend_utils as pb_utils

TELL_SECONDS = 1.0
LOOK_SECONDS = 0.1


class Counter:
    """A number that grows. Only the model's thread adds, only the telling one reads, so neither needs a lock."""

    __slots__ = ("_metric", "_told", "_total")

    def __init__(self, metric: Any) -> None:
        self._metric = metric
        self._total = self._told = 0.0

    def add(self, amount: float = 1.0) -> None:
        self._total += amount

    def tell(self) -> None:
        total = self._total
        if total != self._told:
            self._metric.increment(total - self._told)
            self._told = total


class Counters:
    """All that one model instance counts: make them, then `start`; in the end `stop`."""

    def __init__(self) -> None:
        self._families: dict[str, Any] = {}
        self._counters: list[Counter] = []
        self._gauges: list[Any] = []  # Triton shows a metric for as long as it is kept here
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._tell_now_and_then, name="counters", daemon=True)

    def counter(self, name: str, description: str, **labels: str) -> Counter:
        family = self._family(name, description, pb_utils.MetricFamily.COUNTER)
        self._counters.append(Counter(family.Metric(labels=labels)))
        return self._counters[-1]

    def gauge(self, name: str, description: str, value: float, **labels: str) -> None:
        """A number that stays as it is."""
        metric = self._family(name, description, pb_utils.MetricFamily.GAUGE).Metric(labels=labels)
        metric.set(value)
        self._gauges.append(metric)

    def errors(self, model: str, codes: Iterable[str]) -> dict[str, Counter]:
        """Code -> requests that this model answered with it."""
        about = "Requests that a model answered with an error, by its stable code"
        return {code: self.counter("slipway_errors_total", about, model=model, code=code) for code in codes}

    def inputs(self, feature: str, bins: Iterable[str], expected: Mapping[str, float]) -> dict[str, Counter]:
        """Bin of a feature -> images that fell into it. Beside each, what to expect, as far as that is known."""
        about = "Images by what they look like; probes are left out"
        about_expected = "Which part of the images should fall into a bin: as it was in evaluation"
        counters = {}
        for name in bins:
            labels = {"feature": feature, "bin": name}
            counters[name] = self.counter("slipway_inputs_total", about, **labels)
            if name in expected:
                self.gauge("slipway_inputs_expected_ratio", about_expected, expected[name], **labels)
        return counters

    def start(self) -> None:
        self._thread.start()
        threading.Thread(target=_end_with, args=(os.getppid(),), name="end-with-triton", daemon=True).start()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join()

    def _tell_now_and_then(self) -> None:
        while not self._stopping.wait(TELL_SECONDS):
            for counter in self._counters:
                counter.tell()

    def _family(self, name: str, description: str, kind: Any) -> Any:
        if name not in self._families:
            self._families[name] = pb_utils.MetricFamily(name=name, description=description, kind=kind)
        return self._families[name]


def _end_with(triton: int) -> None:
    """End this process when Triton has ended, which is its parent.

    It would do so by itself, but waits for Triton's answer first if it was being told something, or is told that a
    metric is no more: for ever.
    """
    while os.getppid() == triton:
        time.sleep(LOOK_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)

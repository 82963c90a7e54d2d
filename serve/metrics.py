"""What the service says about itself, beside what Triton and its models say: how it is, and what clients got.

It is kept where it survives the servers: in the process of `serve up`. docs/monitoring.md lists all metrics.
"""

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    start_http_server,
)

from serve.health import WrongAnswer
from serve.protocol import ServingError
from serve.server import LOOPBACK
from slipway.errors import SlipwayError

# Upper edges in seconds. Alerts and the objective in deploy/monitoring need one at 0.25.
LATENCY_EDGES = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
PROTOCOLS = ("http", "grpc")
# ok: answered. refused: the request was at fault. unavailable: the queue is full, or no server is ready; try again.
# failed: the server's fault. abandoned: the client left, or was too slow to send its request.
OUTCOMES = ("ok", "refused", "unavailable", "failed", "abandoned")
# Why a server was replaced.
DIED, SILENT, WRONG = "died", "silent", "wrong"


class ServiceMetrics:
    """One set of metrics for one `serve up`. Every series is there from the start, at 0, so that growth is seen."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        durations = Histogram(
            "slipway_request_duration_seconds",
            "Inference requests as clients see them, from the first byte in to the last byte out",
            ("protocol", "outcome"),
            buckets=LATENCY_EDGES,
            registry=self.registry,
        )
        self._durations = {pair: durations.labels(*pair) for pair in itertools.product(PROTOCOLS, OUTCOMES)}
        self._probe_good = self._gauge(
            "slipway_golden_probe_good", "1 if the last golden image was answered well"
        )
        self._probed_at = self._gauge("slipway_golden_probe_timestamp_seconds", "When that was found out")
        probes = self._counter("slipway_golden_probes", "Golden images asked for", "result")
        self._probes = {True: probes.labels("good"), False: probes.labels("bad")}
        failures = self._counter("slipway_server_failures", "Servers that had to be replaced", "reason")
        self._failures = {reason: failures.labels(reason) for reason in (DIED, SILENT, WRONG)}
        self._takeovers = self._counter("slipway_server_takeovers", "Servers that began to serve")
        self._front_restarts = self._counter("slipway_front_restarts", "Attempts to start HAProxy again")
        self._refusals = self._counter(
            "slipway_releases_refused", "Releases that were to be served and are not"
        )

    def answered(self, protocol: str, outcome: str, seconds: float) -> None:
        self._durations[protocol, outcome].observe(seconds)

    def probed(self, *, good: bool) -> None:
        self._probes[good].inc()
        self._probe_good.set(good)
        self._probed_at.set(time.time())

    def server_failed(self, reason: SlipwayError) -> None:
        if isinstance(reason, WrongAnswer):
            kind = WRONG
            self.probed(good=False)
        else:  # of probes without an answer it takes several, and each was counted
            kind = SILENT if isinstance(reason, ServingError) else DIED
        self._failures[kind].inc()
        self._probe_good.set(0)

    def front_restarted(self) -> None:
        self._front_restarts.inc()

    def release_refused(self) -> None:
        self._refusals.inc()

    def took_over(self) -> None:
        """A server that has answered golden images over both protocols serves now."""
        self._takeovers.inc()
        self.probed(good=True)

    @contextmanager
    def exposed(self, address: str = LOOPBACK, port: int = 0) -> Iterator[int]:
        """The port where they can be read, whatever the path, for as long as the block lasts; 0 takes a free one.

        Raises OSError if somebody else listens there.
        """
        server, thread = start_http_server(port, addr=address, registry=self.registry)
        try:
            yield server.server_port
        finally:
            server.shutdown()
            server.server_close()
            thread.join()

    def _gauge(self, name: str, about: str) -> Gauge:
        return Gauge(name, about, registry=self.registry)

    def _counter(self, name: str, about: str, *labels: str) -> Counter:
        return Counter(name, about, labels, registry=self.registry)

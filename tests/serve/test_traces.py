"""A trace that a client begins goes on through HAProxy and the ensemble, down to each model."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import tritonclient.grpc
import tritonclient.http

from serve import protocol
from serve import server as servers
from serve.front import Front
from serve.model_config import CLASSIFIER, ENSEMBLE, PREPROCESS
from serve.release import Release
from serve.server import LOOPBACK, free_ports
from tests import images
from tests.serve.tools import wait_until

pytestmark = pytest.mark.integration

BY_HTTP, BY_GRPC, SPAN = "a" * 32, "b" * 32, "c" * 16
EXPORT_SECONDS = 20  # Triton gathers spans for five


class Collector(ThreadingHTTPServer):
    """Takes spans as an OpenTelemetry collector does, OTLP/JSON over HTTP."""

    daemon_threads = True

    def __init__(self) -> None:
        self.spans: list[Any] = []
        super().__init__((LOOPBACK, 0), _Incoming)

    def names(self, trace: str) -> set[str]:
        return {span["name"] for span in self.spans if span["traceId"] == trace}

    def parents(self, trace: str) -> set[str]:
        return {span.get("parentSpanId") for span in self.spans if span["traceId"] == trace}


class _Incoming(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        content = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        for resource in content["resourceSpans"]:
            for scope in resource["scopeSpans"]:
                self.server.spans += scope["spans"]
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        try:
            yield running
        finally:
            running.shutdown()
            thread.join()


def test_a_client_s_trace_reaches_every_model_over_both_protocols(
    release: Release, collector: Collector
) -> None:
    def reached_every_model(trace: str) -> bool:
        models = {ENSEMBLE, PREPROCESS, CLASSIFIER}
        return models <= collector.names(trace) and SPAN in collector.parents(trace)

    def is_traced(trace: str, ask: Callable[[], object]) -> bool:
        """Asked again, because on a busy machine Triton at times sends no spans until there are more."""
        ask()
        deadline = time.monotonic() + EXPORT_SECONDS
        while not reached_every_model(trace) and time.monotonic() < deadline:
            time.sleep(0.05)
        return reached_every_model(trace)

    traces = f"http://{LOOPBACK}:{collector.server_port}/v1/traces"
    server = servers.start(release, free_ports(), traces=traces)
    try:
        server.wait_until_it_answers()
        with Front(free_ports()) as front:
            front.point_at(server)
            for trace, module, url in (
                (BY_HTTP, tritonclient.http, front.http),
                (BY_GRPC, tritonclient.grpc, front.grpc),
            ):
                inputs, outputs = protocol.request(module, protocol.tensor([images.flat(3)]), 1)
                with module.InferenceServerClient(url) as client:
                    parent = {"traceparent": f"00-{trace}-{SPAN}-01"}
                    ask = partial(client.infer, ENSEMBLE, inputs, outputs=outputs, headers=parent)
                    wait_until(partial(is_traced, trace, ask))
    finally:
        server.stop()

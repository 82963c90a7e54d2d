"""One address, whichever server is behind it."""

import asyncio
import contextlib
import http.client
import http.server
import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import cast

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException

from serve import front as fronts
from serve.async_client import ASYNC_CLIENTS
from serve.client import CLIENTS, HttpClient
from serve.front import Front, FrontFailure
from serve.protocol import MAX_IMAGE_BYTES, MAX_REQUEST_BYTES, Overloaded, Unreachable
from serve.server import LOOPBACK, Ports, PortTaken, Server, free_ports
from tests import images
from tests.serve.tools import still_running, wait_until

pytestmark = pytest.mark.integration


@pytest.fixture
def front(server: Server) -> Iterator[Front]:
    with Front(free_ports()) as running:
        running.point_at(server)
        yield running


def test_it_passes_on_requests_over_both_protocols_and_metrics(front: Front, server: Server) -> None:
    for protocol, url in (("http", front.http), ("grpc", front.grpc)):
        with CLIENTS[protocol](url) as client:
            assert client.classify([images.flat(7)])[0].label == "7"
            assert client.server_version() == "2.51.0"
    connection = http.client.HTTPConnection(front.metrics, timeout=30)
    connection.request("GET", "/metrics")
    assert b"nv_inference_count" in connection.getresponse().read()
    connection.close()
    wait_until(lambda: front.in_flight(server) == 0)


@pytest.mark.parametrize("module", [tritonclient.http, tritonclient.grpc])
def test_only_what_is_for_clients_is_passed_on(front: Front, module: ModuleType) -> None:
    url = front.http if module is tritonclient.http else front.grpc
    with module.InferenceServerClient(url) as raw:
        assert raw.is_server_live()
        assert raw.is_server_ready()
        assert raw.is_model_ready("classify")
        for call in (raw.get_model_metadata, raw.get_model_config, raw.get_inference_statistics):
            assert "classify" in str(call("classify", "1"))
        for call in (
            raw.get_model_repository_index,
            raw.get_system_shared_memory_status,
            raw.get_trace_settings,
            raw.get_log_settings,
            partial(raw.load_model, "classify"),
            partial(raw.unload_model, "classify"),
        ):
            with pytest.raises(InferenceServerException) as refused:
                call()
            assert refused.value.status() in ("403", "StatusCode.PERMISSION_DENIED")


def test_an_image_of_the_limit_is_passed_on(front: Front, protocol: str) -> None:
    """Case D17: zeros after the end of a JPEG are no part of the image."""
    image = images.flat(2, "JPEG")
    padded = image + bytes(MAX_IMAGE_BYTES - len(image))
    with CLIENTS[protocol](getattr(front, protocol)) as client:
        assert client.classify([padded])[0].label == "2"


def test_without_a_server_every_client_is_told_to_try_again_later(protocol: str) -> None:
    """Case D09: over gRPC, the status is that of a lost connection."""
    words = "no server is ready.*; try again later"

    async def ask(url: str) -> None:
        async with ASYNC_CLIENTS[protocol](url) as client:
            await client.classify([images.flat(1)])

    with Front(free_ports()) as front:
        url = front.urls[protocol]
        with CLIENTS[protocol](url) as client, pytest.raises(Overloaded, match=words):
            client.classify([images.flat(1)])
        with pytest.raises(Overloaded, match=words):
            asyncio.run(ask(url))


def test_a_client_that_was_connected_may_ask_again_when_the_server_has_gone(
    front: Front, protocol: str
) -> None:
    """Case D09."""
    with CLIENTS[protocol](front.urls[protocol]) as client:
        assert client.classify([images.flat(7)])[0].label == "7"
        front.point_at_nobody()
        with pytest.raises(Overloaded):
            client.classify([images.flat(7)])


def test_a_client_that_was_connected_may_ask_again_when_nobody_listens_any_more(
    front: Front, protocol: str
) -> None:
    """Case D09: what is sent on a connection that has just been lost may have arrived; what is not sent has not."""
    with CLIENTS[protocol](front.urls[protocol]) as client:
        assert client.classify([images.flat(7)])[0].label == "7"
        front.stop()
        with contextlib.suppress(Unreachable):
            client.classify([images.flat(7)])
        with pytest.raises(Unreachable) as raised:
            client.classify([images.flat(7)])
        assert raised.value.repeatable


def test_a_request_over_the_limit_is_refused_before_it_is_read(front: Front) -> None:
    """Case D17: the head alone says how long the body would be."""
    connection = http.client.HTTPConnection(front.http, timeout=30)
    connection.putrequest("POST", "/v2/models/classify/infer")
    connection.putheader("Content-Length", str(MAX_REQUEST_BYTES + 1))
    connection.endheaders()
    response = connection.getresponse()
    assert response.status == 413
    assert f"more than {MAX_REQUEST_BYTES} bytes" in json.loads(response.read())["error"]
    connection.close()


def test_compressed_requests_are_refused(front: Front) -> None:
    """What a few bytes become behind us would be past every limit, and past the memory of the machine."""
    zeros = images.flat(1) + bytes(10**6)
    modules = {"http": tritonclient.http, "grpc": tritonclient.grpc}
    encoded = {name: module.InferInput("encoded", [1, 1], "BYTES") for name, module in modules.items()}
    for one in encoded.values():
        one.set_data_from_numpy(np.array([[zeros]], dtype=np.object_))
    with contextlib.closing(tritonclient.http.InferenceServerClient(front.http)) as raw:
        for algorithm in ("gzip", "deflate"):
            with pytest.raises(InferenceServerException, match="COMPRESSED: ") as refused:
                raw.infer("classify", [encoded["http"]], request_compression_algorithm=algorithm)
            assert refused.value.status() == "415"
        raw.infer("classify", [encoded["http"]], headers={"Content-Encoding": "identity"})
    with contextlib.closing(tritonclient.grpc.InferenceServerClient(front.grpc)) as raw:
        with pytest.raises(InferenceServerException, match="COMPRESSED: ") as refused:
            raw.infer("classify", [encoded["grpc"]], compression_algorithm="gzip")
        assert refused.value.status() == "StatusCode.INVALID_ARGUMENT"


def test_a_half_sent_request_disturbs_nobody(front: Front) -> None:
    half = b"POST /v2/models/classify/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\nhalf"
    with socket.create_connection((LOOPBACK, front.ports.http), timeout=60) as connection:
        connection.sendall(half)
        with HttpClient(front.http) as client:
            assert client.classify([images.flat(3)])[0].label == "3"


@dataclass(frozen=True, kw_only=True)
class StandIn:
    """For a Server, as far as Front knows one: it answers over HTTP, with 200 and only when it is let."""

    ports: Ports
    let: threading.Event
    ended: bool = False


@contextlib.contextmanager
def stand_in() -> Iterator[StandIn]:
    let = threading.Event()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            let.wait()
            self.send_response(200)
            self.end_headers()

    listener = http.server.ThreadingHTTPServer((LOOPBACK, 0), Handler)
    thread = threading.Thread(target=listener.serve_forever)
    thread.start()
    try:
        yield StandIn(ports=replace(free_ports(), http=listener.server_port), let=let)
    finally:
        let.set()
        listener.shutdown()
        thread.join()
        listener.server_close()


def get_ready(front: Front) -> int:
    connection = http.client.HTTPConnection(front.http)
    connection.request("GET", "/v2/health/ready")
    status = connection.getresponse().status
    connection.close()
    return status


def test_a_server_keeps_its_requests_when_others_get_its_slot() -> None:
    """HAProxy has two slots, and servers may be switched faster than one of them answers."""
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(stand_in()) for _ in range(4)]
        first, second, third, fourth = (cast(Server, one) for one in servers)
        pool = stack.enter_context(ThreadPoolExecutor(2))
        front = stack.enter_context(Front(free_ports()))
        for one in servers:
            stack.callback(one.let.set)
        front.point_at(first)
        slow = pool.submit(get_ready, front)
        wait_until(lambda: front.in_flight(first) == 1)
        for other in (second, third, fourth, third, fourth):
            front.point_at(other)
            assert front.in_flight(first) == 1
            assert front.in_flight(second) == 0
        of_last = pool.submit(get_ready, front)
        wait_until(lambda: front.in_flight(fourth) == 1)
        front.point_at(second)
        assert front.in_flight(first) == front.in_flight(fourth) == 1
        servers[0].let.set()
        assert slow.result() == 200
        wait_until(lambda: front.in_flight(first) == 0)
        assert front.in_flight(fourth) == 1
        servers[3].let.set()
        assert of_last.result() == 200
        wait_until(lambda: front.in_flight(fourth) == 0)
        assert not front._leftovers


def test_a_port_that_is_taken_is_named() -> None:
    ports = free_ports()
    with (
        socket.create_server((LOOPBACK, ports.grpc)),
        pytest.raises(PortTaken, match=f"port {ports.grpc} is in use"),
    ):
        Front(ports)


def test_a_port_that_is_lost_before_haproxy_takes_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fronts, "is_free", lambda _: True)
    ports = free_ports()
    with (
        socket.create_server((LOOPBACK, ports.grpc)),
        pytest.raises(FrontFailure, match=f"(?s)ended by itself .*{LOOPBACK}:{ports.grpc}"),
    ):
        Front(ports)


def test_without_haproxy_it_says_what_brings_it(tmp_path: Path) -> None:
    with pytest.raises(FrontFailure, match="haproxy: HAProxy is missing; `make setup` puts it there"):
        Front(free_ports(), haproxy=tmp_path / "haproxy")


def test_nothing_is_left_behind() -> None:
    with Front(free_ports()) as front:
        pid, folder = front._process.pid, Path(front._folder.name)
        assert folder.is_dir()
    assert not still_running(pid)
    assert not folder.exists()

"""One error for each cause, each within its deadline, over both protocols."""

import asyncio
import http.server
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from tritonclient.grpc.model_config_pb2 import ModelConfig

from serve import health
from serve import protocol as protocols
from serve.async_client import ASYNC_CLIENTS
from serve.client import CLIENTS
from serve.front import Front
from serve.protocol import Answer, DeadlineExceeded, Overloaded, RefusedInput, ServerFailure, Unreachable
from serve.release import Release
from serve.server import LOOPBACK, Server, free_ports, serving
from slipway.errors import UsageError
from tests import images
from tests.serve.tools import SLOW, SLOW_SECONDS, ask_together, edit_config, variant, wait_until

pytestmark = pytest.mark.integration

# Far more than any deadline here and far less than a hang.
PATIENCE = 20


def test_no_server_is_unreachable(protocol: str) -> None:
    """Case D09."""
    url = f"{LOOPBACK}:{free_ports().http}"
    with (
        CLIENTS[protocol](url) as client,
        pytest.raises(Unreachable, match=f"{url}: no server answers there"),
    ):
        client.classify([b""])


def test_unknown_host_is_unreachable(protocol: str) -> None:
    """Case D09."""
    with (
        CLIENTS[protocol]("no-such-host.invalid:8000", connect_seconds=1) as client,
        pytest.raises(Unreachable),
    ):
        client.classify([b""])


def test_a_port_that_swallows_connections_is_unreachable_within_the_connect_deadline(
    protocol: str, blackhole: str
) -> None:
    """Case D09."""
    start = time.monotonic()
    with (
        CLIENTS[protocol](blackhole, connect_seconds=0.5, deadline_seconds=60) as client,
        pytest.raises(Unreachable),
    ):
        client.classify([b""])
    assert time.monotonic() - start < PATIENCE


def test_a_connection_is_not_waited_for_beyond_the_deadline(protocol: str, blackhole: str) -> None:
    """Case D09."""
    start = time.monotonic()
    with (
        CLIENTS[protocol](blackhole, connect_seconds=60, deadline_seconds=0.5) as client,
        pytest.raises((Unreachable, DeadlineExceeded)),
    ):
        client.classify([b""])
    assert time.monotonic() - start < PATIENCE


@pytest.fixture
def trickle() -> Iterator[str]:
    """An HTTP server that answers a byte at a time and never ends: no single read takes long."""
    stop = threading.Event()

    def serve(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n")
            while not stop.wait(0.05):
                connection.sendall(b" ")

    with socket.create_server((LOOPBACK, 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener,))
        thread.start()
        yield f"{LOOPBACK}:{listener.getsockname()[1]}"
        stop.set()
        thread.join()


@pytest.mark.timeout(PATIENCE)
def test_a_trickling_answer_does_not_outlast_the_deadline(trickle: str) -> None:
    """Case D09."""
    with CLIENTS["http"](trickle, deadline_seconds=0.5) as client, pytest.raises(DeadlineExceeded):
        client.server_version()


def test_a_slow_answer_ends_at_the_deadline_and_the_next_answer_is_its_own(
    protocol: str, slow_server: Server
) -> None:
    """Case D09: the late answer to the first request must not be taken for the answer to the second."""
    with CLIENTS[protocol](slow_server.urls[protocol], deadline_seconds=SLOW_SECONDS / 2) as client:
        with pytest.raises(DeadlineExceeded, match=r"no answer within 2 s"):
            client.classify([SLOW])
        client._deadline_seconds = PATIENCE  # the machine may be busy with other things
        assert client.classify([images.flat(9)])[0].label == "9"


def test_a_server_killed_in_mid_request_is_unreachable(slow_release: Release) -> None:
    """Case D09."""
    with serving(slow_release) as server, ThreadPoolExecutor() as pool:
        asked = [pool.submit(ask_together, protocol, server, [SLOW]) for protocol in CLIENTS]
        wait_until(lambda: server.log.read_text().count("slow begins") == len(asked))
        os.kill(server.pid, signal.SIGKILL)
        errors = [error for one in asked for error in one.result()]
    assert [type(error) for error in errors] == [Unreachable, Unreachable]


def test_a_full_queue_is_overloaded_and_who_got_in_is_answered(release: Release, tmp_path: Path) -> None:
    def short_queue(config: ModelConfig) -> None:
        config.instance_group[0].count = 1
        config.dynamic_batching.default_queue_policy.max_queue_size = 1

    changed = variant(
        release, tmp_path / "release", lambda models: edit_config(models / "preprocess", short_queue)
    )
    large = images.encode(images.noise(1, 1000, 1000), compress_level=1)
    with serving(changed) as server:
        for protocol in CLIENTS:
            answers = ask_together(protocol, server, [large] * 24)
            assert any(isinstance(answer, Answer) for answer in answers)
            refused = [answer for answer in answers if not isinstance(answer, Answer)]
            assert {type(error) for error in refused} == {Overloaded}
            assert {error.status for error in refused} == {"503" if protocol == "http" else "UNAVAILABLE"}


def test_a_server_that_comes_while_we_try_again_answers(protocol: str, server: Server) -> None:
    """Case D09: at first nobody is there, then HAProxy is there without a server."""
    ports = free_ports()
    url = f"{LOOPBACK}:{getattr(ports, protocol)}"

    def ask() -> str:
        with CLIENTS[protocol](url, retries=1000, deadline_seconds=120) as client:
            return client.classify([images.flat(3)])[0].label

    with ThreadPoolExecutor() as pool:
        answer = pool.submit(ask)
        with Front(ports) as front:
            front.point_at(server)
            assert answer.result(timeout=120) == "3"


def test_a_server_that_is_not_triton_is_a_failure_in_words() -> None:
    """Its answer to a POST is a page, with status 501."""
    with http.server.ThreadingHTTPServer((LOOPBACK, 0), http.server.BaseHTTPRequestHandler) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        words = "HTTP status 501, but not as Triton does; is this its HTTP port"
        with (
            CLIENTS["http"](f"{LOOPBACK}:{other.server_port}") as client,
            pytest.raises(ServerFailure, match=words),
        ):
            client.classify([b""])
        other.shutdown()


@contextmanager
def web_server(body: bytes, headers: Mapping[str, str], host: str = LOOPBACK) -> Iterator[str]:
    """It answers everything with status 200 and the same body."""

    class Server(http.server.ThreadingHTTPServer):
        address_family = socket.AF_INET6 if ":" in host else socket.AF_INET

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_response(200)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET  # noqa: N815 - it is called so

        def log_message(self, *args: object) -> None:
            """Nobody reads it."""

    with Server((host, 0), Handler) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        yield f"[{host}]:{other.server_port}" if ":" in host else f"{host}:{other.server_port}"
        other.shutdown()


def with_output(**content: object) -> bytes:
    """JSON of an answer that has something of what it should have."""
    output = {"name": "probabilities", "datatype": "BYTES", "shape": [1], **content}
    return json.dumps({"model_version": "1", "outputs": [output]}).encode()


HALF_AN_OUTPUT = with_output(parameters={"binary_data_size": 2})


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        (b"x", {}),
        (b"", {}),
        (b"{}", {}),
        (b"[]", {}),
        (b"<p>caf\xe9</p>", {}),
        (b"x", {"Content-Encoding": "deflate"}),
        (with_output(data=["x"]), {}),
        (HALF_AN_OUTPUT + b"ab", {"Inference-Header-Content-Length": str(len(HALF_AN_OUTPUT))}),
    ],
)
def test_a_web_server_that_is_content_with_everything_is_a_failure_in_words(
    body: bytes, headers: dict[str, str]
) -> None:
    words = "not answer as Triton does|not as Triton does; is this its HTTP port"

    async def ask(url: str, method: str, *arguments: object) -> None:
        async with ASYNC_CLIENTS["http"](url) as client:
            await getattr(client, method)(*arguments)

    with web_server(body, headers) as url, CLIENTS["http"](url) as client:
        for method, arguments in (("classify", ([b""],)), ("server_version", ())):
            with pytest.raises(ServerFailure, match=words):
                getattr(client, method)(*arguments)
            with pytest.raises(ServerFailure, match=words):
                asyncio.run(ask(url, method, *arguments))


def test_fewer_answers_than_images_are_a_failure_in_words() -> None:
    """Whoever puts them side by side would leave out the last, without a word."""

    def output(name: str, datatype: str, *data: object) -> dict[str, object]:
        return {"name": name, "datatype": datatype, "shape": [1, len(data)], "data": data}

    outputs = [
        output("probabilities", "FP32", 1, 0),
        output("logits", "BYTES", "1:0:a"),
        output("release", "BYTES", "x"),
    ]
    body = json.dumps({"model_version": "1", "outputs": outputs}).encode()
    words = "not answer as Triton does .*1 answers to 2 images"

    async def ask(url: str) -> None:
        async with ASYNC_CLIENTS["http"](url) as client:
            await client.classify([b"", b""])

    with web_server(body, {}) as url:
        with CLIENTS["http"](url) as client, pytest.raises(ServerFailure, match=words):
            client.classify([b"", b""])
        with pytest.raises(ServerFailure, match=words):
            asyncio.run(ask(url))


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6, not even to itself")
def test_a_host_of_ipv6_is_asked() -> None:
    async def ask(url: str) -> str:
        async with ASYNC_CLIENTS["http"](url) as client:
            return await client.server_version()

    with web_server(b'{"version": "2.51.0"}', {}, host="::1") as url:
        with CLIENTS["http"](url) as client:
            assert client.server_version() == "2.51.0"
        assert asyncio.run(ask(url)) == "2.51.0"


def test_what_cannot_be_read_is_no_metrics() -> None:
    with web_server(b"\xff", {}) as url, pytest.raises(Unreachable, match="no metrics can be read there"):
        health.load(url, PATIENCE)


def test_none_of_the_most_probable_classes_is_wrong_usage(protocol: str) -> None:
    """Nobody is asked: nobody is there."""

    async def ask(url: str) -> None:
        async with ASYNC_CLIENTS[protocol](url) as client:
            await client.classify([b""], top=-1)

    nobody = f"{LOOPBACK}:{free_ports().http}"
    with CLIENTS[protocol](nobody) as client, pytest.raises(UsageError, match="top is 0; must be at least 1"):
        client.classify([b""], top=0)
    with pytest.raises(UsageError, match="top is -1; must be at least 1"):
        asyncio.run(ask(nobody))


def test_an_image_over_the_limit_is_not_even_sent(protocol: str) -> None:
    nobody = f"{LOOPBACK}:{free_ports().http}"
    too_long = bytes(protocols.MAX_IMAGE_BYTES + 1)
    with CLIENTS[protocol](nobody) as client, pytest.raises(RefusedInput, match="It was not sent") as refused:
        client.classify([b"", too_long])
    assert refused.value.code == "TOO_MANY_BYTES"


def test_an_image_of_the_limit_arrives(protocol: str, server: Server) -> None:
    image = images.flat(2, "JPEG")
    padded = image + bytes(protocols.MAX_IMAGE_BYTES - len(image))
    with CLIENTS[protocol](server.urls[protocol]) as client:
        assert client.classify([padded])[0].label == "2"


def test_more_images_than_the_model_takes_at_once_is_a_refused_request(protocol: str, server: Server) -> None:
    """Case C01: one more than the largest batch."""
    with (
        CLIENTS[protocol](server.urls[protocol]) as client,
        pytest.raises(RefusedInput, match="batch-size must be <= 8") as refused,
    ):
        client.classify([images.flat(0)] * 9)
    assert refused.value.code == "INVALID_REQUEST"


def test_a_proxy_in_the_environment_is_not_asked(
    protocol: str, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, f"http://{LOOPBACK}:9")
    with CLIENTS[protocol](server.urls[protocol]) as client:
        assert client.classify([images.flat(1)])[0].label == "1"

"""Each request leaves a line of JSON that says enough, and never a key."""

import json
import re
import socket
import ssl
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http

from deploy.gateway.settings import Upstream
from serve.server import LOOPBACK
from tests import images
from tests.deploy.gateway.conftest import Start
from tests.deploy.gateway.tools import INFER, Door, question, raw_client
from tests.serve.tools import wait_until

pytestmark = pytest.mark.integration

TRACE = "0af7651916cd43dd8448eb211c80319c"
TRACEPARENT = f"00-{TRACE}-b7ad6b7169203331-01"


def test_the_release_is_read_out_of_every_form_of_answer(door: Door) -> None:
    everything = ("probabilities", "release", "logits")
    forms: list[list[dict[str, Any]]] = [
        [],
        [{"name": name} for name in everything],
        [{"name": name, "parameters": {"binary_data": True}} for name in everything],
        [{"name": "logits", "parameters": {"classification": 3}}, {"name": "release"}],
    ]
    for outputs in forms:
        reply = door.ask(INFER, *question(images.flat(2), *outputs))
        (line,) = door.logged(reply)
        assert line["release"].startswith("stable/1@")
        assert line["release"].encode() in reply.body
    reply = door.ask(INFER, *question(images.flat(2), {"name": "logits"}))
    assert door.logged(reply)[0]["release"] == ""


@pytest.mark.parametrize("module", [tritonclient.http, tritonclient.grpc])
def test_it_is_read_behind_a_large_tensor_too(door: Door, module: ModuleType) -> None:
    """Pixels of eight images, which come in many parts; and they come through unchanged."""
    pictures = [images.encode(images.noise(seed)) for seed in range(8)]
    encoded = module.InferInput("encoded", [8, 1], "BYTES")
    encoded.set_data_from_numpy(np.array([[picture] for picture in pictures], dtype=np.object_))
    outputs = [module.InferRequestedOutput(name) for name in ("image", "release")]
    name = f"large-{module.__name__}"
    with raw_client(module, door) as raw:
        result = raw.infer("preprocess", [encoded], outputs=outputs, headers={"x-request-id": name})
    assert result.as_numpy("image").shape == (8, 3, 32, 32)
    wait_until(lambda: any(line["id"] == name for line in door.log()))
    (line,) = [line for line in door.log() if line["id"] == name]
    assert line["release"].encode() == result.as_numpy("release")[0][0]
    assert line["model"] == "preprocess"
    assert line["grpc_status"] == {tritonclient.http: "", tritonclient.grpc: "0"}[module]


def test_a_line_says_who_asked_for_what_and_how_long_it_took(door: Door) -> None:
    body, headers = question(images.flat(2))
    reply = door.ask(INFER, body, {**headers, "traceparent": TRACEPARENT, "User-Agent": 'a "test"'})
    (line,) = door.logged(reply)
    assert (
        line.items()
        >= {
            "client": "alice",
            "address": LOOPBACK,
            "method": "POST",
            "path": INFER,
            "status": 200,
            "upstream": door.settings.stable.http,
            "upstream_status": "200",
            "track": "stable",
            "model": "classify",
            "trace": TRACE,
            "agent": 'a "test"',
        }.items()
    )
    assert isinstance(line["seconds"], float)
    assert isinstance(line["upstream_seconds"], float)
    assert line["bytes_in"] > len(body)
    assert line["bytes_out"] > len(reply.body)
    assert float(reply.headers["X-Server-Seconds"]) >= 0


def test_a_known_client_may_name_its_request_and_nobody_else(door: Door) -> None:
    named = {"X-Request-ID": "order-66:a.1"}
    assert door.ask("/v2", headers=named).headers["X-Request-ID"] == "order-66:a.1"
    made = {
        door.ask("/v2").headers["X-Request-ID"],
        door.ask("/v2", headers=named, key="").headers["X-Request-ID"],
        door.ask("/v2", headers={"X-Request-ID": 'a"b\\'}).headers["X-Request-ID"],
        door.ask("/v2", headers={"X-Request-ID": "a" * 129}).headers["X-Request-ID"],
        door.ask("/", key="").headers["X-Request-ID"],
        door.ask("/nowhere", key="").headers["X-Request-ID"],
    }
    assert len(made) == 6
    assert all(re.fullmatch("[0-9a-f]{32}", name) for name in made)


def test_a_refusal_names_the_request(door: Door) -> None:
    reply = door.ask("/v2", key="")
    assert reply.json["request_id"] == reply.headers["X-Request-ID"]
    (line,) = door.logged(reply)
    assert (line["status"], line["client"], line["upstream_seconds"]) == (401, "", None)
    assert (line["method"], line["path"]) == ("GET", "/v2")
    (line,) = door.logged(door.ask(INFER, b"no JSON"))
    assert (line["status"], line["method"], line["upstream_status"]) == (400, "POST", "500")


def test_no_line_holds_a_key_and_every_line_is_json(door: Door, capfd: pytest.CaptureFixture[str]) -> None:
    """Also if a client puts its key where it does not belong, or bytes that are no text."""
    door.ask("/v2")
    door.ask(f"/v2?api_key={door.key}")
    door.ask("/v2", headers={"X-Request-ID": door.key}, key="")
    door.ask("/v2", headers={"User-Agent": "\xff\x00 \\".replace("\x00", "")})
    context = ssl.create_default_context(cafile=door.settings.certificate)
    host, port = door.gateway.address.split(":")
    with (
        socket.create_connection((host, int(port)), timeout=60) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as connection,
    ):
        connection.sendall(b'GET /\xff\xfe"\\ HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n')
        while connection.recv(4096):
            pass
    last = door.ask("/v2")
    door.logged(last)
    text = door.settings.access_log.read_bytes()
    assert door.key.encode() not in text
    for line in text.splitlines():
        assert json.loads(line.decode("ascii"))
    assert door.key not in "".join(capfd.readouterr())


@pytest.fixture
def echo() -> Iterator[HTTPServer]:
    """A server that answers with the head of the request."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            head = json.dumps({name.lower(): value for name, value in self.headers.items()}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(head)))
            self.end_headers()
            self.wfile.write(head)

        def log_message(self, *arguments: object) -> None:
            pass

    with HTTPServer((LOOPBACK, 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_what_is_passed_on_is_the_trace_and_the_id_and_not_the_key(start: Start, echo: HTTPServer) -> None:
    address = f"{LOOPBACK}:{echo.server_port}"
    with start(stable=Upstream(http=address, grpc=address)) as door:
        sent = {"traceparent": TRACEPARENT, "tracestate": "a=b", "Accept-Encoding": "gzip"}
        reply = door.ask("/v2", headers=sent)
        head = reply.json
    assert (head["traceparent"], head["tracestate"]) == (TRACEPARENT, "a=b")
    assert head["x-request-id"] == reply.headers["X-Request-ID"]
    assert not {"authorization", "accept-encoding"} & head.keys()

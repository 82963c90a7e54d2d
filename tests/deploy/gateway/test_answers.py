"""What the gateway says when something is wrong with a request or its answer, and what it leaves as it is."""

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from deploy.gateway.settings import Upstream
from serve.protocol import RefusedInput
from serve.server import LOOPBACK
from tests import images
from tests.deploy.gateway.conftest import Start
from tests.deploy.gateway.tools import INFER, Door, question

pytestmark = pytest.mark.integration


def test_typed_refusals_of_the_model_pass_as_they_are(door: Door, protocol: str) -> None:
    with door.client(protocol) as client, pytest.raises(RefusedInput) as refused:
        client.classify([images.BAD["html"]])
    assert refused.value.code == "NOT_AN_IMAGE"


GOOD = {"name": "encoded", "datatype": "BYTES", "shape": [1, 1], "data": ["x"]}
MALFORMED = {
    "no JSON": b"image",
    "cut short": b'{"inputs":[',
    "no object": b"[1]",
    "null": b"null",
    "no inputs": b"{}",
    "inputs that are no list": b'{"inputs":1}',
    "an input that is no object": b'{"inputs":[1]}',
    "a negative shape": json.dumps({"inputs": [{**GOOD, "shape": [-1, 1]}]}).encode(),
    "a shape that is no list": json.dumps({"inputs": [{**GOOD, "shape": 1}]}).encode(),
    "no name": json.dumps({"inputs": [{**GOOD, "name": None}]}).encode(),
}


@pytest.mark.parametrize("body", MALFORMED.values(), ids=MALFORMED.keys())
def test_malformed_requests_are_the_client_s_fault(door: Door, body: bytes) -> None:
    """Triton itself answers 500 to most of them."""
    reply = door.ask(INFER, body)
    assert reply.status == 400
    assert reply.json["error"]
    assert door.ask(INFER, *question(images.flat(1))).status == 200


def test_a_failure_of_the_server_stays_one_and_its_words_stay_inside(start: Start) -> None:
    """A request that is as it should be, and a traceback for an answer."""

    class Failing(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            words = b'{"error":"File /opt/secret.py, line 1"}'
            self.send_response(500)
            self.send_header("Content-Length", str(len(words)))
            self.end_headers()
            self.wfile.write(words)

        def log_message(self, *arguments: object) -> None:
            pass

    with HTTPServer((LOOPBACK, 0), Failing) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        address = f"{LOOPBACK}:{server.server_port}"
        try:
            with start(stable=Upstream(http=address, grpc=address)) as door:
                reply = door.ask(INFER, *question(images.flat(1)))
        finally:
            server.shutdown()
            thread.join()
    assert (reply.status, reply.json["code"]) == (500, "SERVER_FAILURE")
    assert b"secret" not in reply.body

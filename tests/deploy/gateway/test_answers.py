"""What the gateway says when something is wrong with a request or its answer, and what it leaves as it is."""

import json

import pytest

from serve.protocol import RefusedInput
from tests import images
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

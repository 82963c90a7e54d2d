"""Requests that no client of ours sends: each is its sender's fault, whatever Triton says."""

import json
from typing import Any

from tritonclient.grpc.service_pb2 import ModelInferRequest

from tests import images

LENGTH = "Inference-Header-Content-Length"
IMAGE = images.flat(1)
# How Triton wants a string: its length as four bytes, little-endian, and its bytes.
STRING = len(IMAGE).to_bytes(4, "little") + IMAGE
TOO_LONG_A_STRING = (2**20).to_bytes(4, "little") + IMAGE


def over_http(tensor: bytes = STRING, head: str = "", **changes: Any) -> tuple[bytes, dict[str, str]]:
    """Body and headers of a request about an image, with `changes` to what it says of its input."""
    said: dict[str, object] = {"name": "encoded", "datatype": "BYTES", "shape": [1, 1]}
    said |= {"parameters": {"binary_data_size": len(tensor)}, **changes}
    text = json.dumps({"inputs": [said]}).encode()
    return text + tensor, {LENGTH: head or str(len(text))}


def in_json(**changes: Any) -> tuple[bytes, dict[str, str]]:
    said = {"name": "encoded", "datatype": "BYTES", "shape": [1, 1], "data": ["x"], **changes}
    return json.dumps({"inputs": [said]}).encode(), {}


def over_grpc(tensor: bytes | None = STRING, output: str = "", **changes: Any) -> bytes:
    """The message of a request about an image."""
    request = ModelInferRequest(model_name="classify")
    request.inputs.add(**{"name": "encoded", "datatype": "BYTES", "shape": [1, 1], **changes})
    if tensor is not None:
        request.raw_input_contents.append(tensor)
    if output:
        request.outputs.add(name=output)
    return bytes(request.SerializeToString())


HTTP: dict[str, tuple[bytes, dict[str, str]]] = {
    "nothing": (b"", {}),
    "no JSON": (IMAGE, {}),
    "cut short": (b'{"inputs":[', {}),
    "no object": (b"[1]", {}),
    "null": (b"null", {}),
    "no inputs": (b"{}", {}),
    "inputs that are no list": (b'{"inputs":1}', {}),
    "an input that is no object": (b'{"inputs":[1]}', {}),
    "no name": in_json(name=None),
    "another name": over_http(name="image"),
    "no datatype": in_json(datatype=None),
    "another datatype": over_http(datatype="FP32"),
    "a datatype that does not exist": over_http(datatype="JPEG"),
    "a shape that is no list": in_json(shape=1),
    "a negative shape": in_json(shape=[-1, 1]),
    "another shape": over_http(shape=[1, 2]),
    "a dimension too few": over_http(shape=[1]),
    "no data": over_http(b"", parameters={}),
    "data that are no list": in_json(data="x"),
    "data that are no strings": in_json(data=[1]),
    "fewer data than the shape says": in_json(shape=[2, 1]),
    "fewer bytes than it says": over_http(parameters={"binary_data_size": len(STRING) + 1}),
    "more bytes than it says": over_http(parameters={"binary_data_size": len(STRING) - 1}),
    "a negative number of bytes": over_http(parameters={"binary_data_size": -1}),
    "a number of bytes that is none": over_http(parameters={"binary_data_size": "all"}),
    "a string longer than the request": over_http(TOO_LONG_A_STRING),
    "a string without a length": over_http(b"x"),
    "a head shorter than it is": over_http(head="10"),
    "a head longer than it is": over_http(head="120"),
    "a head longer than the request": over_http(head="1000000"),
    "a negative head": over_http(head="-1"),
    "a head that is no number": over_http(head="all"),
    "an output that does not exist": (
        json.dumps({"inputs": [json.loads(in_json()[0])["inputs"][0]], "outputs": [{"name": "x"}]}).encode(),
        {},
    ),
    "an impossible number of names": (
        json.dumps(
            {
                "inputs": [json.loads(in_json()[0])["inputs"][0]],
                "outputs": [{"name": "logits", "parameters": {"classification": -1}}],
            }
        ).encode(),
        {},
    ),
    "outputs that are no list": (
        json.dumps({"inputs": [json.loads(in_json()[0])["inputs"][0]], "outputs": 1}).encode(),
        {},
    ),
}
GRPC: dict[str, bytes] = {
    "nothing": b"",
    "another name": over_grpc(name="image"),
    "another datatype": over_grpc(datatype="FP32"),
    "a datatype that does not exist": over_grpc(datatype="JPEG"),
    "a negative shape": over_grpc(shape=[-1, 1]),
    "another shape": over_grpc(shape=[1, 2]),
    "a dimension too few": over_grpc(shape=[1]),
    "no data": over_grpc(None),
    "a string longer than the request": over_grpc(TOO_LONG_A_STRING),
    "a string without a length": over_grpc(b"x"),
    "an output that does not exist": over_grpc(output="x"),
}

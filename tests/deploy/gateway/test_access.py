"""Who is let in, to what, and how much of it."""

import asyncio
import gzip
from functools import partial
from types import ModuleType

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException

from deploy.gateway import keys
from deploy.gateway.settings import Upstream
from serve.protocol import Answer, NotAllowed, Overloaded, RefusedInput
from tests import images
from tests.deploy.gateway.conftest import Start
from tests.deploy.gateway.tools import INFER, Door, question, raw_client
from tests.serve.tools import Oracle, wait_until

pytestmark = pytest.mark.integration


@pytest.mark.parametrize("kind", ["plain", "async"])
def test_answers_through_tls_are_those_of_offline_evaluation(
    door: Door, oracle: Oracle, protocol: str, kind: str
) -> None:
    pictures = [images.encode(images.noise(seed), "JPEG") for seed in range(3)]

    async def ask() -> list[Answer]:
        async with door.async_client(protocol) as client:
            return await client.classify(pictures)

    if kind == "async":
        answers = asyncio.run(ask())
    else:
        with door.client(protocol) as client:
            answers = client.classify(pictures)
    for picture, answer in zip(pictures, answers, strict=True):
        np.testing.assert_allclose(answer.probabilities, oracle.probabilities(picture), rtol=0, atol=1e-5)
        assert answer.label == oracle.label(picture)
        assert answer.release.startswith("stable/1@")


@pytest.mark.parametrize("key", ["", "slipway_wrong"])
def test_without_a_known_key_nothing_is_answered(door: Door, protocol: str, key: str) -> None:
    with door.client(protocol, key) as client:
        with pytest.raises(NotAllowed, match="UNAUTHORIZED: the key is missing or not known"):
            client.classify([images.flat(1)])
        with pytest.raises(NotAllowed):
            client.server_version()


@pytest.mark.parametrize("authorization", ["Bearer", "Bearer ", "Basic YWxpY2U6", "Bearer é", '"" alice'])
def test_what_is_no_key_is_refused_as_one_that_is_unknown(door: Door, authorization: str) -> None:
    headers = {"Authorization": authorization.encode("latin-1").decode("latin-1")}
    reply = door.ask("/v2", headers=headers, key="")
    assert (reply.status, reply.json["code"]) == (401, "UNAUTHORIZED")
    assert reply.headers["WWW-Authenticate"] == "Bearer"


def test_a_hash_out_of_the_file_of_keys_is_no_key(door: Door) -> None:
    digest = door.settings.keys.read_text().split('"')[1]
    assert door.ask("/v2", key=digest).status == 401


def test_whether_the_server_is_well_may_be_asked_without_a_key(door: Door) -> None:
    assert door.ask("/v2/health/ready", key="").status == 200
    assert door.ask("/v2/health/live", key="").status == 200


@pytest.mark.parametrize("module", [tritonclient.http, tritonclient.grpc])
def test_only_what_is_for_clients_is_passed_on(door: Door, module: ModuleType) -> None:
    with raw_client(module, door) as raw:
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
            with pytest.raises(InferenceServerException, match="FORBIDDEN") as refused:
                call()
            assert refused.value.status() in ("403", "StatusCode.PERMISSION_DENIED")


@pytest.mark.parametrize(
    "path",
    [
        "/v2/repository/index",
        "/v2/models/classify/../../repository/index",
        "/v2/models/x/%2e%2e/%2e%2e/repository/index",
        "/v2/models/classify%2finfer",
        "/v2/./repository/index",
        "//v2/repository/index",
        "/v2/models/classify/infer/../trace/setting",
        "/v2/models/classify/trace/setting",
        "/v2/repository/index?/v2/health/live",
        "/v2/logging",
        "/v2/systemsharedmemory/status",
        "/metrics",
    ],
)
def test_no_spelling_of_a_path_leads_past_the_rules(door: Door, path: str) -> None:
    assert door.ask(path).status in (403, 404)
    assert door.ask(path, b"{}").status in (403, 404)


def test_a_request_over_the_limit_is_refused(
    start: Start, upstreams: dict[str, Upstream], protocol: str
) -> None:
    """Case D17: over HTTP the head alone says how long the body would be."""
    with start(stable=upstreams["stable"], max_request_bytes=50_000) as door:
        with door.client(protocol) as client:
            assert client.classify([images.flat(3)])[0].label == "3"
            with pytest.raises(RefusedInput, match="TOO_MANY_BYTES") as refused:
                client.classify([bytes(60_000)])
            assert refused.value.code == "TOO_MANY_BYTES"
            assert client.classify([images.flat(3)])[0].label == "3"
        connection = door.connect()
        connection.putrequest("POST", INFER)
        connection.putheader("Content-Length", "50001")
        connection.endheaders()
        assert connection.getresponse().status == 413
        connection.close()


def test_requests_that_come_too_fast_are_refused_for_that_client_alone(
    start: Start, upstreams: dict[str, Upstream], protocol: str
) -> None:
    """One a minute, and two more at once."""
    with start(stable=upstreams["stable"], requests_per_minute=1, burst=2) as door:
        other = keys.add("bob", door.settings.keys)
        door.gateway.reload()
        wait_until(lambda: door.ask("/v2", key=other).status == 200)
        with door.client(protocol) as client:
            client.server_version()  # over gRPC it asks, besides, whether the server lives
            client.classify([images.flat(4)])
            if protocol == "http":
                client.classify([images.flat(4)])
            with pytest.raises(Overloaded, match="TOO_MANY_REQUESTS"):
                client.classify([images.flat(4)])
        refused = door.ask("/v2")
        assert (refused.status, refused.json["code"]) == (429, "TOO_MANY_REQUESTS")
        assert refused.headers["Retry-After"] == "1"
        assert door.ask("/v2", key=other).status == 200


def test_compressed_requests_are_refused(door: Door) -> None:
    """What a few bytes become behind the gateway would be past every limit."""
    body, headers = question(images.flat(1))
    reply = door.ask(INFER, gzip.compress(body), {**headers, "Content-Encoding": "gzip"})
    assert (reply.status, reply.json["code"]) == (415, "COMPRESSED")
    with raw_client(tritonclient.grpc, door) as raw:
        encoded = tritonclient.grpc.InferInput("encoded", [1, 1], "BYTES")
        encoded.set_data_from_numpy(np.array([[images.flat(1)]], dtype=np.object_))
        with pytest.raises(InferenceServerException, match="COMPRESSED"):
            raw.infer("classify", [encoded], compression_algorithm="gzip")

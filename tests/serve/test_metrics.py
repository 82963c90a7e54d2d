"""What Triton does not say, its models and the service say: checked on a real server, behind a real HAProxy."""

import http.client
import json
import urllib.request
from collections.abc import Callable, Iterator

import grpc
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from serve import model_config
from serve.client import CLIENTS
from serve.front import Front
from serve.protocol import RefusedInput, ServerFailure
from serve.release import Release
from serve.server import Server, free_ports, serving
from tests import images
from tests.serve import malformed
from tests.serve.tools import edit_text, variant, wait_until

pytestmark = pytest.mark.integration

INPUTS = "slipway_inputs_total"
FAILS = b"what the model fails on"

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def samples(url: str) -> Samples:
    with urllib.request.urlopen(f"http://{url}", timeout=30) as response:
        text = response.read().decode()
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(url: str, name: str, **labels: str) -> float:
    return samples(url)[name, frozenset(labels.items())]


@pytest.fixture(scope="module")
def server(release: Release, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Its own, so that nobody else is counted. It fails on one input."""
    failing = variant(
        release,
        tmp_path_factory.mktemp("failing") / "release",
        lambda models: edit_text(
            models / "preprocess" / "1" / "slipway" / "preprocessing.py",
            "    image = decode(data, rules)\n",
            f"    if data == {FAILS!r}:\n        raise RuntimeError\n    image = decode(data, rules)\n",
        ),
    )
    with serving(failing) as running:
        yield running


@pytest.fixture(scope="module")
def front(server: Server) -> Iterator[Front]:
    with Front(free_ports()) as running:
        running.point_at(server)
        yield running


def growth(url: str, name: str, **labels: str) -> Callable[[], float]:
    """A function that says by how much a metric has grown since now."""
    before = value(url, name, **labels)
    return lambda: value(url, name, **labels) - before


def test_models_count_what_they_are_sent_but_no_probes(front: Front, server: Server) -> None:
    """First of all tests here: what the others send would count, too."""
    url = f"{front.metrics}/metrics"
    white = images.encode((images.noise(1) // 255 + 254).astype(np.uint8))
    # What Triton warms up with is an image like any other: one and a full batch, for each instance.
    warm_ups = (1 + server.release.signature.max_batch) * model_config.instances(server.release.models)
    with CLIENTS["http"](front.http) as client:
        client.classify([white] * 5)
    server.probe(30)

    def inputs(feature: str) -> float:
        label = ("feature", feature)
        return sum(number for key, number in samples(url).items() if key[0] == INPUTS and label in key[1])

    # At least one probe over each protocol was decoded before the server was taken for ready, and now.
    wait_until(lambda: value(url, "slipway_preprocessed_images_total") >= warm_ups + 5 + 2 * 2)
    wait_until(lambda: inputs("predicted") == inputs("brightness") == inputs("shorter_side") == warm_ups + 5)
    assert value(url, INPUTS, feature="brightness", bin="+Inf") == 5
    assert value(url, "slipway_preprocess_seconds_total") > 0


def test_models_count_errors_by_their_code(front: Front, protocol: str) -> None:
    """Triton counts an answered error as a success."""
    url = f"{front.metrics}/metrics"
    grown = growth(url, "slipway_errors_total", model="preprocess", code="NOT_AN_IMAGE")
    with CLIENTS[protocol](getattr(front, protocol)) as client:
        for _ in range(3):
            with pytest.raises(RefusedInput):
                client.classify([images.BAD["html"]])
    wait_until(lambda: grown() == 3)


def test_models_say_what_to_expect_and_which_release_they_are(front: Front, release: Release) -> None:
    shown = samples(f"{front.metrics}/metrics")
    assert shown["slipway_release_info", frozenset({("release", release.identity)})] == 1
    expected = {key[1]: number for key, number in shown.items() if key[0] == "slipway_inputs_expected_ratio"}
    for feature in ("brightness", "shorter_side", "predicted"):
        shares = [number for labels, number in expected.items() if ("feature", feature) in labels]
        assert sum(shares) == pytest.approx(1)
    assert expected[frozenset({("feature", "predicted"), ("bin", "11")})] == pytest.approx(1 / 12)


def test_what_clients_got_is_counted_with_its_duration(front: Front, protocol: str) -> None:
    url = f"{front.metrics}/metrics/service"
    name = "slipway_request_duration_seconds"
    answered = growth(url, f"{name}_count", protocol=protocol, outcome="ok")
    at_all = growth(url, f"{name}_bucket", protocol=protocol, outcome="ok", le="+Inf")
    refused = growth(url, f"{name}_count", protocol=protocol, outcome="refused")
    with CLIENTS[protocol](getattr(front, protocol)) as client:
        client.server_version()  # no inference: not counted
        for k in range(4):
            client.classify([images.flat(k)])
        with pytest.raises(RefusedInput):
            client.classify([images.BAD["empty"]])
    wait_until(lambda: (answered(), at_all(), refused()) == (4, 4, 1))


def test_malformed_requests_are_the_mistakes_of_clients(front: Front) -> None:
    """Over HTTP, Triton itself answers 500 to many of them."""
    service = f"{front.metrics}/metrics/service"
    name = "slipway_request_duration_seconds_count"
    refused = {way: growth(service, name, protocol=way, outcome="refused") for way in CLIENTS}
    failed = {way: growth(service, name, protocol=way, outcome="failed") for way in CLIENTS}
    answers = {what: answer_to(front, *request) for what, request in malformed.HTTP.items()}
    assert {what: status for what, (status, _) in answers.items()} == dict.fromkeys(malformed.HTTP, 400)
    assert answers["no JSON"][1].startswith("INVALID_JSON: failed to parse the request JSON")
    codes = {what: code_of(front, message) for what, message in malformed.GRPC.items()}
    assert codes.pop("nothing") == grpc.StatusCode.NOT_FOUND  # nor is a model named
    assert set(codes.values()) == {grpc.StatusCode.INVALID_ARGUMENT}
    wait_until(lambda: refused["http"]() == len(malformed.HTTP))
    wait_until(lambda: refused["grpc"]() == len(malformed.GRPC))
    assert [grown() for grown in failed.values()] == [0, 0]
    for way in CLIENTS:
        with CLIENTS[way](getattr(front, way)) as client:
            assert client.classify([images.flat(3)])[0].label == "3"


def answer_to(front: Front, body: bytes, headers: dict[str, str]) -> tuple[int, str]:
    connection = http.client.HTTPConnection(front.http, timeout=30)
    connection.request("POST", "/v2/models/classify/infer", body, headers)
    response = connection.getresponse()
    error = json.loads(response.read())["error"]
    connection.close()
    return response.status, error


def code_of(front: Front, message: bytes) -> grpc.StatusCode:
    with grpc.insecure_channel(front.grpc, options=[("grpc.enable_http_proxy", 0)]) as channel:
        call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        with pytest.raises(grpc.RpcError) as refused:
            call(message, timeout=30)
    return refused.value.code()


def fail_once(front: Front, protocol: str) -> None:
    name = "slipway_request_duration_seconds_count"
    grown = growth(f"{front.metrics}/metrics/service", name, protocol=protocol, outcome="failed")
    with CLIENTS[protocol](getattr(front, protocol)) as client, pytest.raises(ServerFailure):
        client.classify([FAILS])
    wait_until(lambda: grown() == 1)


def test_what_the_server_could_not_do_is_its_failure(front: Front) -> None:
    """Counted by the model as INTERNAL, and by the front as failed, over both protocols."""
    for protocol in CLIENTS:
        fail_once(front, protocol)
    url = f"{front.metrics}/metrics"
    wait_until(lambda: value(url, "slipway_errors_total", model="preprocess", code="INTERNAL") == 2)

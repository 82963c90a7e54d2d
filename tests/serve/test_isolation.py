"""A bad image concerns nobody but its sender."""

import time
from collections.abc import Iterator, Sequence

import pytest
import tritonclient.http
from tritonclient.grpc.model_config_pb2 import ModelConfig

from serve.client import Client
from serve.protocol import Answer, RefusedInput, ServerFailure, ServingError
from serve.release import Release
from serve.server import Server, serving
from tests import images
from tests.serve.tools import CPUS, ask_together, edit_config, edit_text, model_processes, variant

pytestmark = pytest.mark.integration

CLIENT_ERROR = {"http": "400", "grpc": "INVALID_ARGUMENT"}


@pytest.mark.parametrize("name", images.BAD)
def test_what_is_no_image_is_a_client_error_and_the_server_goes_on(
    client: Client, protocol: str, server: Server, name: str
) -> None:
    """Case A08."""
    before = model_processes(server)
    with pytest.raises(RefusedInput) as refused:
        client.classify([images.BAD[name]])
    assert refused.value.status == CLIENT_ERROR[protocol]
    assert refused.value.code == ("EMPTY" if name == "empty" else "NOT_AN_IMAGE")
    assert client.classify([images.flat(4)])[0].label == "4"
    assert model_processes(server) == before
    assert len(before) == 2 * CPUS


def test_content_decides_not_the_name_of_the_file(client: Client) -> None:
    """Case A08."""
    assert client.classify([images.flat(6, "JPEG")])[0].label == "6"


def test_base64_text_is_refused_in_words(client: Client) -> None:
    """Case D08."""
    with pytest.raises(RefusedInput, match="NOT_AN_IMAGE: not a decodable image"):
        client.classify([b"iVBORw0KGgoAAAANSUhEUgAAADIAAAAo"])


def test_a_bad_element_refuses_its_request_and_is_named(client: Client, protocol: str) -> None:
    """Case D02."""
    with pytest.raises(RefusedInput, match="DAMAGED: image 2 of the request") as refused:
        client.classify([images.flat(0), images.flat(1), images.truncated(), images.flat(3)])
    assert (refused.value.status, refused.value.code) == (CLIENT_ERROR[protocol], "DAMAGED")


@pytest.fixture(scope="module", params=["ensemble", "fused"])
def either(request: pytest.FixtureRequest, release: Release, fused_release: Release) -> Release:
    return {"ensemble": release, "fused": fused_release}[request.param]


def decoder(release: Release) -> str:
    """The name of its model that takes encoded images."""
    return "preprocess" if (release.models / "preprocess").is_dir() else "classify"


@pytest.fixture(scope="module")
def gathering_server(either: Release, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Waits for eight requests and runs them as one batch, which production has no reason to."""

    def gather(config: ModelConfig) -> None:
        config.instance_group[0].count = 1
        config.dynamic_batching.max_queue_delay_microseconds = 2_000_000

    changed = variant(
        either,
        tmp_path_factory.mktemp("gathering") / "release",
        lambda models: edit_config(models / decoder(either), gather),
    )
    with serving(changed) as server:
        yield server


def labels(answers: Sequence[Answer | ServingError]) -> list[str]:
    """Of answers; an error among them shows as itself."""
    return [answer.label if isinstance(answer, Answer) else repr(answer) for answer in answers]


def full_batches(server: Server) -> int:
    """How often eight requests were run as one."""
    with tritonclient.http.InferenceServerClient(server.http) as raw:
        (statistics,) = raw.get_inference_statistics(decoder(server.release))["model_stats"]
    return sum(
        entry["compute_infer"]["count"] for entry in statistics["batch_stats"] if entry["batch_size"] == 8
    )


def ask_as_one_batch(protocol: str, server: Server, sent: Sequence[bytes]) -> list[Answer | ServingError]:
    """Answers to eight requests that were run as one batch: together again, if a busy machine sent some too late."""
    for _ in range(5):
        before = full_batches(server)
        answers = ask_together(protocol, server, sent)
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:  # Triton counts a batch after it has answered it
            if full_batches(server) > before:
                return answers
            time.sleep(0.05)
    pytest.fail("eight requests at the same moment never became one batch")


@pytest.mark.parametrize("position", [0, 3, 7])
@pytest.mark.parametrize("bad", [images.truncated(), images.bomb()], ids=["truncated", "bomb"])
def test_one_bad_image_fails_alone_in_a_dynamic_batch(
    gathering_server: Server, protocol: str, position: int, bad: bytes
) -> None:
    """Cases D02 and A11."""
    sent = [images.flat(k) for k in range(8)]
    sent[position] = bad
    answers = ask_as_one_batch(protocol, gathering_server, sent)
    refused = answers.pop(position)
    assert isinstance(refused, RefusedInput)
    assert refused.status == CLIENT_ERROR[protocol]
    assert labels(answers) == [str(k) for k in range(8) if k != position]


def test_a_batch_of_bad_images_is_refused_one_by_one(gathering_server: Server, protocol: str) -> None:
    """Case D02."""
    answers = ask_as_one_batch(protocol, gathering_server, [b"", images.truncated()] * 4)
    assert [isinstance(answer, RefusedInput) and answer.code for answer in answers] == [
        "EMPTY",
        "DAMAGED",
    ] * 4


def test_a_bomb_is_refused_with_its_size_and_the_limit(client: Client) -> None:
    """Case A11."""
    with pytest.raises(RefusedInput, match=r"TOO_MANY_PIXELS: 20000 x 20000 is over the limit of 64,000,000"):
        client.classify([images.bomb()])


@pytest.fixture(scope="module")
def failing_server(either: Release, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Preprocessing has a bug: it stumbles over one input with an error that nobody foresaw."""
    bug = '    if data == b"trigger":\n        raise RuntimeError("a secret in /etc/secret")\n'
    changed = variant(
        either,
        tmp_path_factory.mktemp("failing") / "release",
        lambda models: edit_text(
            models / decoder(either) / "1" / "slipway" / "preprocessing.py",
            "    image = decode(data, rules)\n",
            f"{bug}    image = decode(data, rules)\n",
        ),
    )
    with serving(changed) as server:
        yield server


def test_an_unexpected_error_tells_the_log_and_not_the_client(failing_server: Server, protocol: str) -> None:
    (failure,) = ask_together(protocol, failing_server, [b"trigger"])
    assert isinstance(failure, ServerFailure)
    assert "see the server's log" in str(failure)
    assert "secret" not in str(failure)
    assert "Traceback" not in str(failure)
    assert "a secret in /etc/secret" in failing_server.log.read_text()
    assert labels(ask_together(protocol, failing_server, [images.flat(1)])) == ["1"]

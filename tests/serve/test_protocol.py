"""How long, how often and how much, before anything is sent."""

import re

import pytest
from tritonclient.utils import InferenceServerException

from serve import protocol
from serve.async_client import ASYNC_CLIENTS
from serve.client import CLIENTS
from serve.protocol import (
    ClientSettings,
    DeadlineExceeded,
    NotAllowed,
    Overloaded,
    Patience,
    RefusedInput,
    ServerFailure,
    ServingError,
    Unreachable,
)
from slipway.errors import UsageError


@pytest.mark.parametrize("client", [*CLIENTS.values(), *ASYNC_CLIENTS.values()])
def test_a_key_is_not_sent_without_tls(client: type[ClientSettings]) -> None:
    with pytest.raises(UsageError, match="an API key is only sent over TLS; write https://host:8000"):
        client("host:8000", api_key="secret")


@pytest.mark.parametrize("client", [*CLIENTS.values(), *ASYNC_CLIENTS.values()])
@pytest.mark.parametrize(
    "url",
    [
        "http://host:8000",
        "host",
        "host:0",
        "host:65536",
        "a..b:8000",
        f"{'a' * 64}.org:8000",
        "https://a..b:8000",
        "::1:8000",
        "[::1:8000",
        "[host]:8000",
    ],
)
def test_an_address_of_another_kind_is_told(client: type[ClientSettings], url: str) -> None:
    words = f"{url}: is no address of a server; write host:port, or https://host:port"
    with pytest.raises(UsageError, match=re.escape(words)):
        client(url)


@pytest.mark.parametrize(
    ("words", "meaning", "repeatable"),
    [
        ("Received http2 header with status: 503", Overloaded, True),
        ("Received http2 header with status: 429", Overloaded, True),
        ("Received http2 header with status: 502", Unreachable, False),
        ("failed to connect to all addresses; last error: Connection refused", Unreachable, True),
        ("errors resolving host:8001: Domain name not found", Unreachable, True),
        ("Socket closed", Unreachable, False),
    ],
)
def test_what_no_server_took_is_told_from_what_one_may_have_begun_over_grpc_too(
    words: str, meaning: type[ServingError], repeatable: bool
) -> None:
    """Case D09: the status is the same for all."""
    told = protocol.grpc_error("host:8001", InferenceServerException(words, "StatusCode.UNAVAILABLE"))
    assert (type(told), told.repeatable, told.status) == (meaning, repeatable, "UNAVAILABLE")
    assert words in str(told)


@pytest.mark.parametrize(
    ("status", "meaning"),
    [
        ("UNAVAILABLE", Unreachable),
        ("DEADLINE_EXCEEDED", Unreachable),
        ("UNIMPLEMENTED", Unreachable),
        ("RESOURCE_EXHAUSTED", Overloaded),
        ("UNAUTHENTICATED", NotAllowed),
    ],
)
def test_a_gateway_that_lets_nobody_connect_is_not_taken_for_none(
    status: str, meaning: type[ServingError]
) -> None:
    error = InferenceServerException("for a reason", f"StatusCode.{status}")
    told = protocol.no_grpc_connection("host:8001", error)
    assert type(told) is meaning
    assert told.repeatable == (meaning is not NotAllowed)


def test_zeros_at_the_end_of_an_image_are_sent() -> None:
    """Case D08."""
    tensor = protocol.tensor([b"image\0\0", b"\0", b""])
    assert tensor.shape == (3, 1)
    assert tensor[:, 0].tolist() == [b"image\0\0", b"\0", b""]


def test_more_bytes_than_a_request_may_have_are_named_with_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Case D17."""
    monkeypatch.setattr(protocol, "MAX_REQUEST_BYTES", 2500)
    words = "the 3 images have together 3,000 bytes; the limit is 2,500. It was not sent"
    with pytest.raises(RefusedInput, match=words) as refused:
        protocol.tensor([bytes(1000)] * 3)
    assert refused.value.code == "TOO_MANY_BYTES"


@pytest.mark.parametrize(
    "error",
    [
        Unreachable("gone in the middle of it"),
        DeadlineExceeded("late"),
        ServerFailure("broken", "500"),
        RefusedInput("bad", "400", "DAMAGED"),
    ],
)
def test_what_the_server_may_have_begun_is_not_sent_again(error: ServingError) -> None:
    """Case D09. It may be what brought the server down."""
    with pytest.raises(type(error)) as raised:
        Patience(deadline_seconds=60, retries=5).pause_after(error)
    assert raised.value is error


@pytest.mark.parametrize("error", [Unreachable("nobody there", sent=False), Overloaded("full", "503")])
def test_what_the_server_has_not_begun_is_sent_again_a_few_times_ever_later(error: ServingError) -> None:
    """Case D09."""
    patience = Patience(deadline_seconds=600, retries=8)
    pauses = [patience.pause_after(error) for _ in range(8)]
    for pause, longest in zip(pauses, (0.1, 0.2, 0.4, 0.8, 1.6, 2, 2, 2), strict=True):
        assert longest / 2 <= pause <= longest
    with pytest.raises(type(error)):
        patience.pause_after(error)


def test_nothing_is_sent_again_when_there_is_no_time_for_it() -> None:
    with pytest.raises(Overloaded):
        Patience(deadline_seconds=0.01, retries=5).pause_after(Overloaded("full", "503"))

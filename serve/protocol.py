"""What every client does in the same way: limits, deadlines, repetitions, and what answers and errors mean.

Used by serve.client and serve.async_client, whose clients differ in how they wait and in nothing else.
"""

import random
import re
import ssl
import struct
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException

from serve import connection
from serve.model_config import DEFAULT_PRIORITY, ENCODED, PRIORITIES, RELEASE, Priority
from slipway.contract import LOGITS, PROBABILITIES, Preprocessing
from slipway.errors import SlipwayError, UsageError

# Unless a client is told otherwise. The server refuses larger images as well, but only after they have travelled.
MAX_IMAGE_BYTES = Preprocessing.max_bytes
# Of all images of a request together; serve.front refuses more, where it stands between us and the server.
MAX_REQUEST_BYTES = 256 * 2**20
CONNECT_SECONDS = 5.0
# Longer than the server lets a request wait in its queues (serve.model_config), so that it is the server that
# says "overloaded" and not our deadline.
DEADLINE_SECONDS = 30.0
# Before a request is sent again; each pause is up to twice as long as the one before, and random, so that clients
# that were refused together do not come back together.
FIRST_PAUSE_SECONDS = 0.1
LONGEST_PAUSE_SECONDS = 2.0


class ServingError(SlipwayError):
    """A request without an answer. `status` is what the server gave for it, such as "400"; empty if nothing.

    repeatable: whether the server has certainly not begun to work on it, so that it may be sent again: what has
        brought one server down would otherwise be sent to the next.
    """

    repeatable = False

    def __init__(self, message: str, status: str = "") -> None:
        super().__init__(message)
        self.status = status


class Unreachable(ServingError):
    """No server there, or it went away before it answered."""

    def __init__(self, message: str, status: str = "", *, sent: bool = True) -> None:
        super().__init__(message, status)
        self.repeatable = not sent


class DeadlineExceeded(ServingError):
    """No answer in time. The server may still be working on the request: it is not told."""


class Overloaded(ServingError):
    """The server's queue is full or the request waited there too long: try again later, more slowly."""

    repeatable = True


class UnknownModel(ServingError):
    """The server does not have this model or this version of it."""


class ServerFailure(ServingError):
    """The server could not do its work. Its log says more."""


class NotAllowed(ServingError):
    """The gateway does not know the key, or lets nobody do this."""


class RefusedInput(ServingError):
    """The request itself is at fault. `code` is that of slipway.preprocessing.ImageError, or INVALID_REQUEST."""

    def __init__(self, message: str, status: str, code: str) -> None:
        super().__init__(message, status)
        self.code = code


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What the server says about one image.

    top: the most probable classes with their probabilities, best first.
    probabilities: float32 [classes], in the order of training.
    release: which bundle answered, e.g. `digits/3@9f86d081884c`.
    """

    top: tuple[tuple[str, float], ...]
    probabilities: npt.NDArray[np.float32]
    release: str
    model_version: str

    @property
    def label(self) -> str:
        return self.top[0][0]

    @property
    def probability(self) -> float:
        return self.top[0][1]


class ClientSettings:
    """What all clients are made from.

    url: host:port, or https://host:port for TLS; a host of IPv6 stands in brackets.
    api_key: what the gateway knows us by; never sent without TLS.
    certificates: PEM file of the authorities to believe, in place of the system's; for a certificate of one's own
        making, the file of that certificate.
    version: of the model; empty for the one that is served.
    connect_seconds: how long to wait for a connection, if the deadline is not over before.
    deadline_seconds: how long a call may take, with all its repetitions.
    retries: how often a request is sent again that the server has not begun to work on.
    request_id: sent with every request; the server's log and traces name it.
    priority: "bulk" for what nobody waits for; it gives way to all that is "interactive". "probe" is for serve.health.
    max_image_bytes: larger images are not sent. The server has a limit of its own, which is that of its model.

    Raises UsageError for a key that would be sent without TLS, and for an address of another kind.
    """

    def __init__(  # noqa: PLR0913 - all but the address are given by name, and few at a time
        self,
        url: str,
        *,
        api_key: str = "",
        certificates: Path | None = None,
        version: str = "",
        connect_seconds: float = CONNECT_SECONDS,
        deadline_seconds: float = DEADLINE_SECONDS,
        retries: int = 0,
        request_id: str = "",
        priority: Priority = DEFAULT_PRIORITY,
        max_image_bytes: int = MAX_IMAGE_BYTES,
    ) -> None:
        self._tls = url.startswith("https://")
        self._url = url.removeprefix("https://")
        try:
            self._host, self._port = connection.host_and_port(self._url)
        except ValueError:
            raise UsageError(
                f"{url}: is no address of a server; write host:port, or https://host:port"
            ) from None
        if api_key and not self._tls:
            raise UsageError(f"{url}: an API key is only sent over TLS; write https://{url}")
        self._api_key = api_key
        self._certificates = certificates
        self._version = version
        self._connect_seconds = connect_seconds
        self._deadline_seconds = deadline_seconds
        self._retries = retries
        self._request_id = request_id
        self._priority = PRIORITIES[priority]
        self._max_image_bytes = max_image_bytes
        self._open()

    def _open(self) -> None:
        """Make what a client talks with. It need not connect yet."""
        raise NotImplementedError

    def _tls_context(self) -> ssl.SSLContext | None:
        return ssl.create_default_context(cafile=self._certificates) if self._tls else None

    def _deadline_exceeded(self) -> DeadlineExceeded:
        return DeadlineExceeded(
            f"{self._url}: no answer within {self._deadline_seconds:g} s; the server may still be working on it"
        )


class Key:
    """A plugin for Triton's clients: sends an API key along with every request, if there is one."""

    def __init__(self, api_key: str) -> None:
        self._headers = {"authorization": f"Bearer {api_key}"} if api_key else {}

    def __call__(self, request: Any) -> None:
        request.headers.update(self._headers)


class Patience:
    """What is left of one call: time, and repetitions."""

    def __init__(self, deadline_seconds: float, retries: int) -> None:
        self._end = time.monotonic() + deadline_seconds
        self._retries = retries
        self._longest_pause = FIRST_PAUSE_SECONDS

    @property
    def seconds(self) -> float:
        """Above 0, because a deadline of 0 means none to some."""
        return max(0.001, self._end - time.monotonic())

    def pause_after(self, error: ServingError) -> float:
        """Seconds to wait before sending again. Raises `error` if it must not be, or there is no time for it."""
        pause = random.uniform(self._longest_pause / 2, self._longest_pause)
        if not error.repeatable or self._retries == 0 or pause >= self.seconds:
            raise error
        self._retries -= 1
        self._longest_pause = min(LONGEST_PAUSE_SECONDS, 2 * self._longest_pause)
        return pause


def tensor(images: Sequence[bytes], max_image_bytes: int = MAX_IMAGE_BYTES) -> npt.NDArray[np.object_]:
    """Object [images, 1]. Raises RefusedInput if they are too large; nothing was sent then.

    Never numpy's own bytes type: it drops zeros at the end (triton server PR 2551).
    """
    for index, data in enumerate(images):
        if len(data) > max_image_bytes:
            raise too_many_bytes(f"image {index} has", len(data), max_image_bytes)
    if (total := sum(map(len, images))) > MAX_REQUEST_BYTES:
        raise too_many_bytes(f"the {len(images)} images have together", total, MAX_REQUEST_BYTES)
    result = np.empty((len(images), 1), dtype=np.object_)
    result[:, 0] = images
    return result


def too_many_bytes(what: str, found: int, limit: int) -> RefusedInput:
    """what: who has them, with its verb. found, limit: bytes."""
    message = f"TOO_MANY_BYTES: {what} {found:,} bytes; the limit is {limit:,}. It was not sent"
    return RefusedInput(message, status="", code="TOO_MANY_BYTES")


def request(module: ModuleType, images: npt.NDArray[np.object_], top: int) -> tuple[list[Any], list[Any]]:
    """Inputs and outputs of a request, made of the classes of `tritonclient.http` or `tritonclient.grpc`.

    Raises UsageError for `top` below 1.
    """
    if top < 1:
        raise UsageError(f"top is {top}; must be at least 1")
    encoded = module.InferInput(ENCODED, list(images.shape), "BYTES")
    encoded.set_data_from_numpy(images)
    # Classification is Triton's own: it makes the server answer with names from the label file.
    outputs = [
        module.InferRequestedOutput(PROBABILITIES),
        module.InferRequestedOutput(LOGITS, class_count=top),
        module.InferRequestedOutput(RELEASE),
    ]
    return [encoded], outputs


@contextmanager
def understood(url: str) -> Iterator[None]:
    """Around a call and what is read out of its answer: raises ServerFailure if that is none of Triton's."""
    try:
        yield
    except _UNREADABLE as error:
        found = f"{type(error).__name__}: {error}"
        raise ServerFailure(f"{url}: does not answer as Triton does ({found}); is this its port?") from error


def http_answers(result: tritonclient.http.InferResult, images: int) -> list[Answer]:
    """images: how many it is about. Call it within `understood`."""
    return _answers(result.as_numpy, result.get_response()["model_version"], images)


def grpc_answers(result: tritonclient.grpc.InferResult, images: int) -> list[Answer]:
    """images: how many it is about. Call it within `understood`."""
    return _answers(result.as_numpy, result.get_response().model_version, images)


def http_error(url: str, error: InferenceServerException) -> ServingError:
    """What an answer that is none means, over HTTP."""
    status, message = error.status() or "200", error.message()
    unlike_triton = error.debug_details() is not None or not isinstance(message, str)
    if unlike_triton or message.startswith(_NO_TEXT):
        return ServerFailure(
            f"{url}: answers with HTTP status {status}, but not as Triton does; is this its HTTP port?",
            status,
        )
    causes: dict[str, type[ServingError]] = {
        "401": NotAllowed,
        "403": NotAllowed,
        "404": UnknownModel,
        "429": Overloaded,
        "503": Overloaded,
    }
    return _error(url, error, causes)


def grpc_error(url: str, error: InferenceServerException) -> ServingError:
    """What an answer that is none means, over gRPC; a deadline that has passed is not among it."""
    causes: dict[str, type[ServingError]] = {
        "NOT_FOUND": UnknownModel,
        "PERMISSION_DENIED": NotAllowed,
        "RESOURCE_EXHAUSTED": Overloaded,
        "UNAUTHENTICATED": NotAllowed,
        "UNAVAILABLE": Unreachable,
    }
    meaning, words = _error(url, error, causes), error.message()
    if _NO_SERVER_TOOK_IT.match(words):
        return Overloaded(f"{url}: no server is ready or has room; try again later ({words})", meaning.status)
    if _NO_CONNECTION.match(words):
        return Unreachable(str(meaning), meaning.status, sent=False)
    return meaning


def deadline_has_passed(error: InferenceServerException) -> bool:
    return error.status() == "StatusCode.DEADLINE_EXCEEDED"


def no_grpc_connection(url: str, error: InferenceServerException) -> ServingError:
    """What it means that a server does not say that it is there. A gateway may have reasons of its own."""
    meaning = grpc_error(url, error)
    if isinstance(meaning, Overloaded | NotAllowed):
        return meaning
    return Unreachable(f"{url}: no server answers there over gRPC ({error.message()})", sent=False)


# Of a gRPC channel.
CHANNEL = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    # gRPC alone would send even a request to 127.0.0.1 to the proxy that http_proxy names; HTTP does not.
    ("grpc.enable_http_proxy", 0),
    # It connects again as soon as we ask again; left to itself, it would wait for a second, and for up to two minutes.
    ("grpc.initial_reconnect_backoff_ms", int(1000 * FIRST_PAUSE_SECONDS)),
    ("grpc.max_reconnect_backoff_ms", int(1000 * LONGEST_PAUSE_SECONDS)),
]
# What reading something else as an answer of Triton's ends in.
_UNREADABLE = (AttributeError, EOFError, LookupError, TypeError, ValueError, struct.error, zlib.error)
# Triton's client, of an answer in another encoding than that of JSON.
_NO_TEXT = "Failed to encode using UTF-8"
_REFUSED = ("400", "413", "415", "INVALID_ARGUMENT")
# Over gRPC a full queue has the same status as a lost connection; only Triton's words tell them apart.
_QUEUE_MESSAGES = ("Exceeds maximum queue size", "Request timeout expired")
# So has a request that something before the server refused with a status of HTTP, and one that was never sent, for
# want of a connection. The words are those of gRPC itself.
_NO_SERVER_TOOK_IT = re.compile(r"Received http2 header with status: (429|503)$")
_NO_CONNECTION = re.compile(r"failed to connect to all addresses|errors resolving ")
# What serve/models/preprocess.py answers, behind Triton's "in ensemble 'classify', ".
_CODED_MESSAGE = re.compile(r"(?:^|, )(?P<code>[A-Z][A-Z_]+): (?P<reason>.*)", re.DOTALL)


def _answers(output: Callable[[str], npt.NDArray[Any]], model_version: str, images: int) -> list[Answer]:
    """One Answer for each image of a request; `output` gives an output of the response by its name."""
    probabilities, ranking, releases = output(PROBABILITIES), output(LOGITS), output(RELEASE)
    if len(probabilities) != images:
        raise ValueError(f"{len(probabilities)} answers to {images} images")
    return [
        Answer(
            top=tuple(_named(entry, own) for entry in ranks),
            probabilities=own,
            release=release.decode(),
            model_version=model_version,
        )
        for own, ranks, (release,) in zip(probabilities, ranking, releases, strict=True)
    ]


def _named(entry: bytes, probabilities: npt.NDArray[np.float32]) -> tuple[str, float]:
    """Triton's `<logit>:<index>:<name>` as (name, probability)."""
    _, index, name = entry.decode().split(":", 2)
    return name, float(probabilities[int(index)])


def _error(url: str, error: InferenceServerException, causes: dict[str, type[ServingError]]) -> ServingError:
    status = (error.status() or "").removeprefix("StatusCode.")
    message = error.message()
    if any(words in message for words in _QUEUE_MESSAGES):
        return Overloaded(f"{url}: {message}", status)
    if status in _REFUSED:
        coded = _CODED_MESSAGE.search(message)
        if coded:
            return RefusedInput(f"{coded['code']}: {coded['reason']}", status, coded["code"])
        return RefusedInput(f"INVALID_REQUEST: {message}", status, "INVALID_REQUEST")
    return causes.get(status, ServerFailure)(f"{url}: {message}", status)

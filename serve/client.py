"""Ask a server about images, over HTTP or gRPC: explicit deadlines, binary tensors, one error for each cause.

    with HttpClient("127.0.0.1:8000") as client:
        (answer,) = client.classify([Path("cat.jpg").read_bytes()])
        print(answer.label, answer.probability)

A client belongs to the thread that made it: tritonclient's HTTP client is bound to its thread's event loop.
Nothing is retried here: inference may be repeated safely, but only the caller knows what another wait is worth.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self, TypeVar

import gevent
import numpy as np
import numpy.typing as npt
import tritonclient.grpc
import tritonclient.http
from geventhttpclient.response import HTTPParseError
from tritonclient.utils import InferenceServerException

from serve.model_config import ENCODED, ENSEMBLE, RELEASE
from slipway.contract import LOGITS, PROBABILITIES, Preprocessing
from slipway.errors import SlipwayError

Result = TypeVar("Result")

# The server refuses larger images as well, but only after they have travelled. It is the contract's default.
MAX_IMAGE_BYTES = Preprocessing.max_bytes
# Of all images of a request together; serve.front refuses more, where it stands between us and the server.
MAX_REQUEST_BYTES = 256 * 2**20
CONNECT_SECONDS = 5.0
# Longer than the server lets a request wait in its queues (serve.model_config), so that it is the server that
# says "overloaded" and not our deadline.
DEADLINE_SECONDS = 30.0


class ServingError(SlipwayError):
    """A request without an answer. `status` is what the server gave for it, such as "400"; empty if nothing."""

    def __init__(self, message: str, status: str = "") -> None:
        super().__init__(message)
        self.status = status


class Unreachable(ServingError):
    """No server there, or it went away before it answered."""


class DeadlineExceeded(ServingError):
    """No answer in time. The server may still be working on the request: it is not told."""


class Overloaded(ServingError):
    """The server's queue is full or the request waited there too long: try again later, more slowly."""


class UnknownModel(ServingError):
    """The server does not have this model or this version of it."""


class ServerFailure(ServingError):
    """The server could not do its work. Its log says more."""


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


class Client(Protocol):
    """What HttpClient and GrpcClient have in common."""

    def classify(self, images: Sequence[bytes], top: int = 1) -> list[Answer]:
        """Ask about encoded images in one request; they are answered together or refused together.

        Raises one of the ServingErrors above.
        """
        ...

    def server_version(self) -> str:
        """The version of Triton. Raises one of the ServingErrors above."""
        ...

    def close(self) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *exception: object) -> None: ...


class HttpClient:
    """`url` is host:port. `version` asks for one version of the model; empty, for the one that is served."""

    def __init__(
        self,
        url: str,
        *,
        version: str = "",
        connect_seconds: float = CONNECT_SECONDS,
        deadline_seconds: float = DEADLINE_SECONDS,
    ) -> None:
        self._url = url
        self._version = version
        self._connect_seconds = connect_seconds
        self._deadline_seconds = deadline_seconds
        self._client = self._connect()

    def classify(self, images: Sequence[bytes], top: int = 1) -> list[Answer]:
        encoded = tritonclient.http.InferInput(ENCODED, [len(images), 1], "BYTES")
        encoded.set_data_from_numpy(_tensor(images), binary_data=True)
        # Classification is Triton's own: it makes the server answer with names from the label file.
        outputs = [
            tritonclient.http.InferRequestedOutput(PROBABILITIES, binary_data=True),
            tritonclient.http.InferRequestedOutput(LOGITS, binary_data=True, class_count=top),
            tritonclient.http.InferRequestedOutput(RELEASE, binary_data=True),
        ]
        result = self._call(
            lambda: self._client.infer(ENSEMBLE, [encoded], model_version=self._version, outputs=outputs)
        )
        return _answers(result.as_numpy, result.get_response()["model_version"])

    def server_version(self) -> str:
        return str(self._call(self._client.get_server_metadata)["version"])

    def close(self) -> None:
        self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _connect(self) -> tritonclient.http.InferenceServerClient:
        # network_timeout is for each read: a server that trickles never exceeds it. The deadline is in _call;
        # this one is longer, so that a TimeoutError can only mean that no connection was made.
        return tritonclient.http.InferenceServerClient(
            self._url, connection_timeout=self._connect_seconds, network_timeout=2 * self._deadline_seconds
        )

    def _call(self, function: Callable[[], Result]) -> Result:
        try:
            with gevent.Timeout(self._deadline_seconds):
                return function()
        except gevent.Timeout:
            # The connection still waits for an answer that nobody wants, and would give it to the next request.
            self._client.close()
            self._client = self._connect()
            raise _deadline_exceeded(self._url, self._deadline_seconds) from None
        except InferenceServerException as error:
            if error.debug_details() is not None:  # the body, where it is not what Triton would say
                raise ServerFailure(
                    f"{self._url}: answers with HTTP status {error.status()}, but not as Triton does; is this "
                    "its HTTP port?",
                    error.status(),
                ) from None
            raise _error_from_server(self._url, error, _HTTP_CAUSES) from None
        except (OSError, HTTPParseError) as error:
            raise Unreachable(f"{self._url}: no server answers there over HTTP ({error})") from None


class GrpcClient:
    """`url` is host:port. `version` asks for one version of the model; empty, for the one that is served."""

    def __init__(
        self,
        url: str,
        *,
        version: str = "",
        connect_seconds: float = CONNECT_SECONDS,
        deadline_seconds: float = DEADLINE_SECONDS,
    ) -> None:
        self._url = url
        self._version = version
        self._connect_seconds = connect_seconds
        self._deadline_seconds = deadline_seconds
        self._connected = False
        self._client = tritonclient.grpc.InferenceServerClient(url, channel_args=_CHANNEL)

    def classify(self, images: Sequence[bytes], top: int = 1) -> list[Answer]:
        encoded = tritonclient.grpc.InferInput(ENCODED, [len(images), 1], "BYTES")
        encoded.set_data_from_numpy(_tensor(images))
        outputs = [
            tritonclient.grpc.InferRequestedOutput(PROBABILITIES),
            tritonclient.grpc.InferRequestedOutput(LOGITS, class_count=top),
            tritonclient.grpc.InferRequestedOutput(RELEASE),
        ]
        result = self._call(
            lambda: self._client.infer(
                ENSEMBLE,
                [encoded],
                model_version=self._version,
                outputs=outputs,
                client_timeout=self._deadline_seconds,
            )
        )
        return _answers(result.as_numpy, result.get_response().model_version)

    def server_version(self) -> str:
        timeout = self._deadline_seconds
        return str(self._call(lambda: self._client.get_server_metadata(client_timeout=timeout)).version)

    def close(self) -> None:
        self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _call(self, function: Callable[[], Result]) -> Result:
        self._ensure_connected()
        try:
            return function()
        except InferenceServerException as error:
            if error.status() == "StatusCode.DEADLINE_EXCEEDED":
                raise _deadline_exceeded(self._url, self._deadline_seconds) from None
            raise _error_from_server(self._url, error, _GRPC_CAUSES) from None

    def _ensure_connected(self) -> None:
        """gRPC connects on the first call, and would spend all of that call's deadline on it."""
        if self._connected:
            return
        try:
            self._client.is_server_live(client_timeout=self._connect_seconds)
        except InferenceServerException as error:
            raise Unreachable(f"{self._url}: no server answers there over gRPC ({error.message()})") from None
        self._connected = True


CLIENTS: dict[str, type[HttpClient] | type[GrpcClient]] = {"http": HttpClient, "grpc": GrpcClient}

_CHANNEL = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    # gRPC alone would send even a request to 127.0.0.1 to the proxy that http_proxy names; HTTP does not.
    ("grpc.enable_http_proxy", 0),
]
_HTTP_CAUSES: dict[str, type[ServingError]] = {"404": UnknownModel, "503": Overloaded}
_GRPC_CAUSES: dict[str, type[ServingError]] = {"NOT_FOUND": UnknownModel, "UNAVAILABLE": Unreachable}
_REFUSED = ("400", "413", "INVALID_ARGUMENT")
# Over gRPC a full queue has the same status as a lost connection; only Triton's words tell them apart.
_QUEUE_MESSAGES = ("Exceeds maximum queue size", "Request timeout expired")
# What serve/models/preprocess.py answers, behind Triton's "in ensemble 'classify', ".
_CODED_MESSAGE = re.compile(r"(?:^|, )(?P<code>[A-Z][A-Z_]+): (?P<reason>.*)", re.DOTALL)


def _tensor(images: Sequence[bytes]) -> npt.NDArray[np.object_]:
    """object [images, 1]. Never numpy's own bytes type: it drops zeros at the end (triton server PR 2551)."""
    for index, data in enumerate(images):
        if len(data) > MAX_IMAGE_BYTES:
            raise RefusedInput(
                f"TOO_MANY_BYTES: image {index} has {len(data):,} bytes; the limit is {MAX_IMAGE_BYTES:,}. "
                "It was not sent",
                status="",
                code="TOO_MANY_BYTES",
            )
    tensor = np.empty((len(images), 1), dtype=np.object_)
    tensor[:, 0] = images
    return tensor


def _answers(tensor: Callable[[str], npt.NDArray[Any]], model_version: str) -> list[Answer]:
    """One Answer for each image of a response; `tensor` gives an output by its name."""
    probabilities, ranking, releases = tensor(PROBABILITIES), tensor(LOGITS), tensor(RELEASE)
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


def _deadline_exceeded(url: str, seconds: float) -> DeadlineExceeded:
    return DeadlineExceeded(f"{url}: no answer within {seconds:g} s; the server may still be working on it")


def _error_from_server(
    url: str, error: InferenceServerException, causes: dict[str, type[ServingError]]
) -> ServingError:
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

"""Ask a server about images, over HTTP or gRPC: explicit deadlines, binary tensors, one error for each cause.

    with HttpClient("127.0.0.1:8000") as client:
        (answer,) = client.classify([Path("cat.jpg").read_bytes()])
        print(answer.label, answer.probability)

A client keeps its connection, and belongs to the thread that made it: tritonclient's HTTP client is bound to its
thread's event loop. serve.async_client has the same for asyncio.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Self, TypeVar

import gevent
import numpy as np
import numpy.typing as npt
import tritonclient.grpc
import tritonclient.http
from geventhttpclient.response import HTTPParseError
from tritonclient.utils import InferenceServerException

from serve import protocol
from serve.model_config import ENSEMBLE
from serve.protocol import Answer, ClientSettings, Patience, ServingError, Unreachable

Result = TypeVar("Result")


class Client(ClientSettings, ABC):
    """What HttpClient and GrpcClient have in common."""

    def classify(self, images: Sequence[bytes], top: int = 1) -> list[Answer]:
        """Ask about encoded images in one request; they are answered together or refused together.

        top: how many classes are named, the most probable ones.

        Raises one of the ServingErrors of serve.protocol; UsageError if `top` is below 1.
        """
        tensor = protocol.tensor(images, self._max_image_bytes)
        return self._patiently(lambda seconds: self._classify(tensor, top, seconds))

    def server_version(self) -> str:
        """The version of Triton. Raises one of the ServingErrors of serve.protocol."""
        return self._patiently(self._server_version)

    @abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @abstractmethod
    def _classify(self, tensor: npt.NDArray[np.object_], top: int, seconds: float) -> list[Answer]: ...

    @abstractmethod
    def _server_version(self, seconds: float) -> str: ...

    def _patiently(self, call: Callable[[float], Result]) -> Result:
        """`call(seconds that are left)`, and again where that is safe and worth a try."""
        patience = Patience(self._deadline_seconds, self._retries)
        while True:
            try:
                with protocol.understood(self._url):
                    return call(patience.seconds)
            except ServingError as error:
                time.sleep(patience.pause_after(error))


class HttpClient(Client):
    """Over HTTP, with Triton's binary tensors. Settings are those of serve.protocol.ClientSettings."""

    def _open(self) -> None:
        self._client = self._connect()

    def close(self) -> None:
        self._client.close()

    def _classify(self, tensor: npt.NDArray[np.object_], top: int, seconds: float) -> list[Answer]:
        inputs, outputs = protocol.request(tritonclient.http, tensor, top)
        result = self._call(
            lambda: self._client.infer(
                ENSEMBLE,
                inputs,
                model_version=self._version,
                outputs=outputs,
                request_id=self._request_id,
                priority=self._priority,
            ),
            seconds,
        )
        return protocol.http_answers(result, len(tensor))

    def _server_version(self, seconds: float) -> str:
        return str(self._call(self._client.get_server_metadata, seconds)["version"])

    def _connect(self) -> tritonclient.http.InferenceServerClient:
        # network_timeout is for each read: a server that trickles never exceeds it. The deadline is in _call;
        # this one is longer, so that a TimeoutError can only mean that no connection was made.
        client = tritonclient.http.InferenceServerClient(
            self._url,
            connection_timeout=self._connect_seconds,
            network_timeout=2 * self._deadline_seconds,
            ssl=self._tls,
            ssl_options={"ca_certs": str(self._certificates)} if self._certificates else None,
        )
        client.register_plugin(protocol.Key(self._api_key))
        return client

    def _call(self, function: Callable[[], Result], seconds: float) -> Result:
        try:
            with gevent.Timeout(seconds):
                return function()
        except gevent.Timeout:
            # The connection still waits for an answer that nobody wants, and would give it to the next request.
            self._client.close()
            self._client = self._connect()
            raise self._deadline_exceeded() from None
        except InferenceServerException as error:
            raise protocol.http_error(self._url, error) from None
        except (OSError, HTTPParseError) as error:
            # No connection was made: it was refused, the time for it is over, or nobody has that name.
            sent = not isinstance(error, ConnectionRefusedError | TimeoutError | gevent.socket.gaierror)
            raise Unreachable(
                f"{self._url}: no server answers there over HTTP ({error})", sent=sent
            ) from None


class GrpcClient(Client):
    """Over gRPC. Settings are those of serve.protocol.ClientSettings."""

    def _open(self) -> None:
        self._connected = False
        self._client = tritonclient.grpc.InferenceServerClient(
            self._url,
            ssl=self._tls,
            root_certificates=self._certificates,
            channel_args=protocol.CHANNEL,
        )
        self._client.register_plugin(protocol.Key(self._api_key))

    def close(self) -> None:
        self._client.close()

    def _classify(self, tensor: npt.NDArray[np.object_], top: int, seconds: float) -> list[Answer]:
        inputs, outputs = protocol.request(tritonclient.grpc, tensor, top)
        result = self._call(
            lambda left: self._client.infer(
                ENSEMBLE,
                inputs,
                model_version=self._version,
                outputs=outputs,
                request_id=self._request_id,
                priority=self._priority,
                client_timeout=left,
            ),
            seconds,
        )
        return protocol.grpc_answers(result, len(tensor))

    def _server_version(self, seconds: float) -> str:
        metadata = self._call(lambda left: self._client.get_server_metadata(client_timeout=left), seconds)
        return str(metadata.version)

    def _call(self, function: Callable[[float], Result], seconds: float) -> Result:
        """`function(seconds that are left)`, once there is a connection."""
        patience = Patience(seconds, retries=0)
        self._ensure_connected(seconds)
        try:
            return function(patience.seconds)
        except InferenceServerException as error:
            if protocol.deadline_has_passed(error):
                raise self._deadline_exceeded() from None
            raise protocol.grpc_error(self._url, error) from None

    def _ensure_connected(self, seconds: float) -> None:
        """gRPC connects on the first call, and would spend all of that call's deadline on it."""
        if self._connected:
            return
        try:
            self._client.is_server_live(client_timeout=min(self._connect_seconds, seconds))
        except InferenceServerException as error:
            raise protocol.no_grpc_connection(self._url, error) from None
        self._connected = True


CLIENTS: dict[str, type[HttpClient] | type[GrpcClient]] = {"http": HttpClient, "grpc": GrpcClient}

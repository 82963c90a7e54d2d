"""Ask a server about images from asyncio: serve.client, with `await` where it waits.

    async with AsyncHttpClient("127.0.0.1:8000") as client:
        answers = await asyncio.gather(*(client.classify([image]) for image in images))

A client belongs to the event loop that it was made in, where any number of calls may share it.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from typing import Self, TypeVar

import aiohttp
import numpy as np
import numpy.typing as npt
import tritonclient.grpc
import tritonclient.grpc.aio
import tritonclient.http
import tritonclient.http.aio
from tritonclient.utils import InferenceServerException

from serve import protocol
from serve.model_config import ENSEMBLE
from serve.protocol import Answer, ClientSettings, Patience, ServingError, Unreachable

Result = TypeVar("Result")


class AsyncClient(ClientSettings, ABC):
    """What AsyncHttpClient and AsyncGrpcClient have in common. Errors are those of serve.client."""

    async def classify(self, images: Sequence[bytes], top: int = 1) -> list[Answer]:
        """Ask about encoded images in one request; they are answered together or refused together."""
        tensor = protocol.tensor(images, self._max_image_bytes)
        return await self._patiently(lambda seconds: self._classify(tensor, top, seconds))

    async def server_version(self) -> str:
        """The version of Triton."""
        return await self._patiently(self._server_version)

    @abstractmethod
    async def close(self) -> None: ...

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    @abstractmethod
    async def _classify(self, tensor: npt.NDArray[np.object_], top: int, seconds: float) -> list[Answer]: ...

    @abstractmethod
    async def _server_version(self, seconds: float) -> str: ...

    async def _patiently(self, call: Callable[[float], Awaitable[Result]]) -> Result:
        """`call(seconds that are left)`, and again where that is safe and worth a try."""
        patience = Patience(self._deadline_seconds, self._retries)
        while True:
            try:
                with protocol.understood(self._url):
                    return await call(patience.seconds)
            except ServingError as error:
                await asyncio.sleep(patience.pause_after(error))


class AsyncHttpClient(AsyncClient):
    """Over HTTP. To be made where an event loop runs; settings are those of serve.protocol.ClientSettings."""

    def _open(self) -> None:
        self._connected = False
        # The deadline is in _call; this one is longer.
        self._client = tritonclient.http.aio.InferenceServerClient(
            self._url,
            conn_timeout=2 * self._deadline_seconds,
            ssl=self._tls,
            ssl_context=self._tls_context(),
        )
        self._client.register_plugin(protocol.Key(self._api_key))

    async def close(self) -> None:
        await self._client.close()

    async def _classify(self, tensor: npt.NDArray[np.object_], top: int, seconds: float) -> list[Answer]:
        inputs, outputs = protocol.request(tritonclient.http, tensor, top)
        result = await self._call(
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

    async def _server_version(self, seconds: float) -> str:
        return str((await self._call(self._client.get_server_metadata, seconds))["version"])

    async def _call(self, function: Callable[[], Awaitable[Result]], seconds: float) -> Result:
        patience = Patience(seconds, retries=0)
        await self._ensure_connected(seconds)
        try:
            async with asyncio.timeout(patience.seconds):
                return await function()
        except TimeoutError:
            raise self._deadline_exceeded() from None
        except InferenceServerException as error:
            raise protocol.http_error(self._url, error) from None
        except (OSError, aiohttp.ClientError) as error:
            sent = not isinstance(error, aiohttp.ClientConnectorError)
            raise Unreachable(
                f"{self._url}: no server answers there over HTTP ({error})", sent=sent
            ) from None

    async def _ensure_connected(self, seconds: float) -> None:
        """aiohttp would spend all of the first call's deadline on a connection that nobody takes."""
        if self._connected:
            return
        try:
            async with asyncio.timeout(min(self._connect_seconds, seconds)):
                _, writer = await asyncio.open_connection(self._host, self._port)
        except OSError as error:  # TimeoutError is one
            raise Unreachable(
                f"{self._url}: no server answers there over HTTP ({error})", sent=False
            ) from None
        writer.close()
        self._connected = True


class AsyncGrpcClient(AsyncClient):
    """Over gRPC. To be made where an event loop runs; settings are those of serve.protocol.ClientSettings."""

    def _open(self) -> None:
        self._connected = False
        self._client = tritonclient.grpc.aio.InferenceServerClient(
            self._url,
            ssl=self._tls,
            root_certificates=self._certificates,
            channel_args=protocol.CHANNEL,
        )
        self._client.register_plugin(protocol.Key(self._api_key))

    async def close(self) -> None:
        await self._client.close()

    async def _classify(self, tensor: npt.NDArray[np.object_], top: int, seconds: float) -> list[Answer]:
        inputs, outputs = protocol.request(tritonclient.grpc, tensor, top)
        result = await self._call(
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

    async def _server_version(self, seconds: float) -> str:
        metadata = await self._call(
            lambda left: self._client.get_server_metadata(client_timeout=left), seconds
        )
        return str(metadata.version)

    async def _call(self, function: Callable[[float], Awaitable[Result]], seconds: float) -> Result:
        """`function(seconds that are left)`, once there is a connection."""
        patience = Patience(seconds, retries=0)
        await self._ensure_connected(seconds)
        try:
            return await function(patience.seconds)
        except InferenceServerException as error:
            if protocol.deadline_has_passed(error):
                raise self._deadline_exceeded() from None
            raise protocol.grpc_error(self._url, error) from None

    async def _ensure_connected(self, seconds: float) -> None:
        """gRPC connects on the first call, and would spend all of that call's deadline on it."""
        if self._connected:
            return
        try:
            await self._client.is_server_live(client_timeout=min(self._connect_seconds, seconds))
        except InferenceServerException as error:
            raise protocol.no_grpc_connection(self._url, error) from None
        self._connected = True


ASYNC_CLIENTS: dict[str, type[AsyncHttpClient] | type[AsyncGrpcClient]] = {
    "http": AsyncHttpClient,
    "grpc": AsyncGrpcClient,
}

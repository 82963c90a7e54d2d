"""A gateway as a client sees it, and what it logs."""

import http.client
import json
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import tritonclient.http

from deploy.gateway.nginx import Gateway
from deploy.gateway.settings import Settings
from serve.async_client import ASYNC_CLIENTS, AsyncClient
from serve.client import CLIENTS, Client
from serve.protocol import Key
from tests.serve.tools import wait_until

INFER = "/v2/models/classify/infer"
# What a gateway cannot start without; see tests.programs.
NEEDED = ("nginx", "/usr/lib/nginx/modules/ngx_http_js_module.so", "openssl")


@dataclass(frozen=True)
class Reply:
    status: int
    headers: http.client.HTTPMessage
    body: bytes

    @property
    def json(self) -> dict[str, Any]:
        return json.loads(self.body)


@dataclass(frozen=True)
class Door:
    """A gateway that runs, with a key to it."""

    gateway: Gateway
    settings: Settings
    key: str

    @property
    def url(self) -> str:
        return f"https://{self.gateway.address}"

    def client(self, protocol: str, key: str | None = None, **options: Any) -> Client:
        return CLIENTS[protocol](
            self.url,
            api_key=self.key if key is None else key,
            certificates=self.settings.certificate,
            **options,
        )

    def async_client(self, protocol: str) -> AsyncClient:
        return ASYNC_CLIENTS[protocol](self.url, api_key=self.key, certificates=self.settings.certificate)

    def connect(self) -> http.client.HTTPSConnection:
        context = ssl.create_default_context(cafile=self.settings.certificate)
        return http.client.HTTPSConnection(self.gateway.address, timeout=120, context=context)

    def ask(
        self,
        path: str,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        *,
        key: str | None = None,
        method: str = "",
    ) -> Reply:
        """One request on a connection of its own; `key` is this door's unless another, or "" for none, is given."""
        used = self.key if key is None else key
        authorization = {"Authorization": f"Bearer {used}"} if used else {}
        connection = self.connect()
        try:
            connection.request(
                method or ("GET" if body is None else "POST"),
                path,
                body,
                {**authorization, **(headers or {})},
            )
            response = connection.getresponse()
            return Reply(response.status, response.headers, response.read())
        finally:
            connection.close()

    def log(self) -> list[dict[str, Any]]:
        return [
            json.loads(line)
            for line in self.settings.access_log.read_bytes().splitlines(keepends=True)
            if line.endswith(b"\n")
        ]

    def logged(self, reply: Reply, count: int = 1) -> list[dict[str, Any]]:
        """The log's lines about a request: they come a moment after the answer."""
        name = reply.headers["X-Request-ID"]
        wait_until(lambda: sum(line["id"] == name for line in self.log()) >= count)
        return [line for line in self.log() if line["id"] == name]


def question(image: bytes, *outputs: dict[str, Any]) -> tuple[bytes, dict[str, str]]:
    """Body and headers of a request about one image, as a client without a library of Triton's writes them."""
    tensor = len(image).to_bytes(4, "little") + image
    content: dict[str, Any] = {
        "inputs": [
            {
                "name": "encoded",
                "datatype": "BYTES",
                "shape": [1, 1],
                "parameters": {"binary_data_size": len(tensor)},
            }
        ]
    }
    if outputs:
        content["outputs"] = list(outputs)
    head = json.dumps(content).encode()
    return head + tensor, {"Inference-Header-Content-Length": str(len(head))}


def raw_client(module: ModuleType, door: Door) -> Any:
    """Triton's own client, of `tritonclient.http` or `tritonclient.grpc`."""
    certificates = str(door.settings.certificate)
    options = (
        {"ssl_options": {"ca_certs": certificates}}
        if module is tritonclient.http
        else {"root_certificates": certificates}
    )
    client = module.InferenceServerClient(door.gateway.address, ssl=True, **options)
    client.register_plugin(Key(door.key))
    return client

"""What an operator decides about the gateway, and nginx's configuration made of it.

The nginx image can fill in the same template from environment variables (docs/gateway.md): one template, two ways.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from string import Template

from serve.connection import LAST_PORT
from serve.protocol import MAX_REQUEST_BYTES
from slipway.errors import UsageError

HERE = Path(__file__).parent
TEMPLATE = HERE / "nginx.conf.template"

_ADDRESS = re.compile(r"[\w.-]+:(?P<port>[0-9]{1,5})")
# What would end a quoted string of nginx's configuration, or mean something in it.
_UNQUOTABLE = re.compile(r'["$\\\n]')


@dataclass(frozen=True, kw_only=True)
class Upstream:
    """Where a Triton server, or `serve up`, listens: host:port for each protocol."""

    http: str
    grpc: str


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One gateway.

    listen: host:port, for TLS, HTTP/1.1, HTTP/2 and gRPC alike.
    stable: who answers.
    canary: who answers `canary_percent` of the requests in its place, 0..100; each request is drawn anew.
    shadow: who is sent `shadow_percent` of the inference requests besides, 0..100; its answers go nowhere.
    keys: file of deploy.gateway.keys. certificate, certificate_key: PEM.
    requests_per_minute, burst: for each key's name; how many, and how many more at once. Above: 429.
    access_log: where a JSON object for each request goes.
    """

    listen: str
    stable: Upstream
    canary: Upstream | None = None
    canary_percent: float = 0
    shadow: Upstream | None = None
    shadow_percent: float = 0
    keys: Path
    certificate: Path
    certificate_key: Path
    requests_per_minute: int = 3000
    burst: int = 50
    max_request_bytes: int = MAX_REQUEST_BYTES
    access_log: Path = Path("/dev/stdout")

    def __post_init__(self) -> None:
        """Raises UsageError, naming the setting."""
        for name in ("canary", "shadow"):
            percent = getattr(self, f"{name}_percent")
            if not 0 <= percent <= 100:
                raise UsageError(f"gateway: {name}_percent is {percent:g}; must be from 0 to 100")
            if percent and getattr(self, name) is None:
                raise UsageError(f"gateway: {name}_percent is {percent:g}, but no {name} is named")
        for name in ("requests_per_minute", "burst", "max_request_bytes"):
            if (value := getattr(self, name)) < 1:
                raise UsageError(f"gateway: {name} is {value}; must be at least 1")
        for address in self._addresses().values():
            if not (parts := _ADDRESS.fullmatch(address)) or not 1 <= int(parts["port"]) <= LAST_PORT:
                raise UsageError(f"gateway: {address} is no address; expected host:port")

    def render(self, files: Path, scratch: Path) -> str:
        """The text of nginx.conf.

        files: folder of gateway.js and page/. scratch: folder that nginx may write into.
        """
        paths = {
            "FILES": files,
            "SCRATCH": scratch,
            "KEYS": self.keys.absolute(),
            "CERTIFICATE": self.certificate.absolute(),
            "CERTIFICATE_KEY": self.certificate_key.absolute(),
            "ACCESS_LOG": self.access_log.absolute(),
        }
        for path in paths.values():
            if _UNQUOTABLE.search(str(path)):
                raise UsageError(f'{path}: the gateway takes no path with ", $, \\ or a line break in it')
        values = {
            **paths,
            **self._addresses(),
            "CANARY_PERCENT": f"{self.canary_percent:g}",
            "SHADOW_PERCENT": f"{self.shadow_percent:g}",
            "REQUESTS_PER_MINUTE": self.requests_per_minute,
            "BURST": self.burst,
            "MAX_REQUEST_BYTES": self.max_request_bytes,
        }
        template = Template(TEMPLATE.read_text(encoding="utf-8"))
        return template.safe_substitute({f"GATEWAY_{name}": value for name, value in values.items()})

    def _addresses(self) -> dict[str, str]:
        """nginx wants an address for each upstream, also for one that no request goes to."""
        upstreams = {
            "STABLE": self.stable,
            "CANARY": self.canary or self.stable,
            "SHADOW": self.shadow or self.stable,
        }
        addresses = {"LISTEN": self.listen}
        for name, upstream in upstreams.items():
            addresses |= {f"{name}_HTTP": upstream.http, f"{name}_GRPC": upstream.grpc}
        return addresses

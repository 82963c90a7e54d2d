"""Two real Triton servers of two releases, and gateways in front of them."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
from playwright.sync_api import Browser, sync_playwright

from deploy.gateway import certificate, keys
from deploy.gateway.nginx import Gateway
from deploy.gateway.settings import Settings, Upstream
from serve import repository
from serve.release import open_release
from serve.server import LOOPBACK, PortTaken, Server, free_ports, serving
from slipway.bundle import Bundle, open_bundle
from tests.deploy.gateway.tools import NEEDED, Door
from tests.programs import require
from tests.serve.tools import CPUS, Oracle, make_bundle

Start = Callable[..., contextlib.AbstractContextManager[Door]]
ATTEMPTS = 5


@pytest.fixture(scope="session")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Bundle]:
    """Twelve colours each; what stable calls '0', canary calls '11'."""
    folder = tmp_path_factory.mktemp("bundles")
    options: dict[str, tuple[str, ...]] = {"stable": (), "canary": ("--reverse-classes",)}
    return {name: open_bundle(make_bundle(folder / name / "1", *more)) for name, more in options.items()}


@pytest.fixture(scope="session")
def servers(
    bundles: dict[str, Bundle], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Server]]:
    with contextlib.ExitStack() as stack:
        running = {}
        for name, bundle in bundles.items():
            folder = tmp_path_factory.mktemp(f"repository-{name}")
            release = open_release(repository.publish(bundle.directory, folder, "embedded", CPUS))
            running[name] = stack.enter_context(serving(release))
        yield running


@pytest.fixture(scope="session")
def oracle(bundles: dict[str, Bundle]) -> Oracle:
    """What offline evaluation of the stable release says."""
    bundle = bundles["stable"]
    session = onnxruntime.InferenceSession(
        bundle.directory / "model.onnx", providers=["CPUExecutionProvider"]
    )
    return Oracle(session=session, signature=bundle.signature)


@pytest.fixture(scope="session")
def upstreams(servers: dict[str, Server]) -> dict[str, Upstream]:
    return {name: Upstream(http=server.http, grpc=server.grpc) for name, server in servers.items()}


@pytest.fixture(scope="session")
def nobody() -> Upstream:
    """Where no server is."""
    ports = free_ports()
    return Upstream(http=f"{LOOPBACK}:{ports.http}", grpc=f"{LOOPBACK}:{ports.grpc}")


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("certificate")
    paths = {"certificate": folder / "certificate.pem", "certificate_key": folder / "key.pem"}
    certificate.make(paths["certificate"], paths["certificate_key"])
    return paths


@pytest.fixture(scope="session")
def start(certificates: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Start:
    """Start a gateway with the settings that are given, and others that hinder nobody."""
    require(*NEEDED)

    @contextlib.contextmanager
    def run(**settings: Any) -> Iterator[Door]:
        folder = tmp_path_factory.mktemp("gateway")
        file = folder / "keys.conf"
        key = keys.add("alice", file)
        usual = {
            "keys": file,
            "access_log": folder / "access.log",
            "requests_per_minute": 100_000,
            "burst": 10_000,
        }
        gateway, chosen = opened({**usual, **certificates, **settings})
        with gateway:
            yield Door(gateway, chosen, key)

    return run


def opened(settings: dict[str, Any]) -> tuple[Gateway, Settings]:
    """A gateway that runs. A port that we chose may be gone before nginx takes it; then others are tried."""

    def attempt() -> tuple[Gateway, Settings]:
        chosen = Settings(**{"listen": f"{LOOPBACK}:{free_ports().http}", **settings})
        return Gateway(chosen), chosen

    if "listen" not in settings:
        for _ in range(ATTEMPTS - 1):
            with contextlib.suppress(PortTaken):
                return attempt()
    return attempt()


@pytest.fixture(scope="session")
def door(upstreams: dict[str, Upstream], start: Start) -> Iterator[Door]:
    """In front of the stable release alone."""
    with start(stable=upstreams["stable"]) as running:
        yield running


@pytest.fixture(params=["http", "grpc"])
def protocol(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Of one module alone: a browser occupies asyncio, which other tests run."""
    require("chromium")
    with sync_playwright() as started:
        running = started.chromium.launch(executable_path="/usr/bin/chromium")
        yield running
        running.close()

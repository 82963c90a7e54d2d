"""A real bundle, published, and a real Triton server that serves it to all tests of a session."""

import socket
from collections.abc import Iterator

import onnxruntime
import pytest

from serve import repository
from serve.client import CLIENTS, Client
from serve.release import Release, open_release
from serve.server import LOOPBACK, Server, serving
from slipway.bundle import Bundle, open_bundle
from tests.serve.tools import CPUS, SLOW, SLOW_SECONDS, Oracle, edit_text, make_bundle, variant


@pytest.fixture(scope="session")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """Twelve classes '0' to '11'; each is a colour."""
    return open_bundle(make_bundle(tmp_path_factory.mktemp("bundles") / "tiny" / "1"))


@pytest.fixture(scope="session")
def release(bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Release:
    return open_release(
        repository.publish(bundle.directory, tmp_path_factory.mktemp("repository"), "embedded", CPUS)
    )


@pytest.fixture(scope="session")
def fused_release(bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Release:
    """The same bundle, as one model."""
    models = tmp_path_factory.mktemp("fused")
    return open_release(repository.publish(bundle.directory, models, "embedded", CPUS, fused=True))


@pytest.fixture(scope="session")
def reverse_release(tmp_path_factory: pytest.TempPathFactory) -> Release:
    """Version 2, whose classes are in reverse order."""
    folder = tmp_path_factory.mktemp("reverse")
    bundle = make_bundle(folder / "bundles" / "tiny" / "2", "--reverse-classes")
    return open_release(repository.publish(bundle, folder / "models", "embedded", CPUS))


@pytest.fixture(scope="session")
def rounds(request: pytest.FixtureRequest) -> int:
    """How often a service meets each fault."""
    return request.config.getoption("--rounds")


@pytest.fixture(scope="session")
def slow_release(release: Release, tmp_path_factory: pytest.TempPathFactory) -> Release:
    """Preprocessing takes its time over one input, and says in the log when it begins."""
    code = f"""\
    if data == {SLOW!r}:
        import time

        print("slow begins", flush=True)
        time.sleep({SLOW_SECONDS})
"""
    return variant(
        release,
        tmp_path_factory.mktemp("slow") / "release",
        lambda models: edit_text(
            models / "preprocess" / "1" / "slipway" / "preprocessing.py",
            "    image = decode(data, rules)\n",
            f"{code}    image = decode(data, rules)\n",
        ),
    )


@pytest.fixture(scope="session")
def server(release: Release) -> Iterator[Server]:
    with serving(release) as running:
        yield running


@pytest.fixture(scope="session")
def slow_server(slow_release: Release) -> Iterator[Server]:
    with serving(slow_release) as running:
        yield running


@pytest.fixture(params=["http", "grpc"])
def protocol(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def client(protocol: str, server: Server) -> Iterator[Client]:
    with CLIENTS[protocol](server.urls[protocol]) as client:
        yield client


@pytest.fixture(scope="session")
def oracle(bundle: Bundle) -> Oracle:
    """What offline evaluation says: the same preprocessing and model, without a server."""
    session = onnxruntime.InferenceSession(
        bundle.directory / "model.onnx", providers=["CPUExecutionProvider"]
    )
    return Oracle(session=session, signature=bundle.signature)


@pytest.fixture
def blackhole() -> Iterator[str]:
    """A port whose connections are never made: its queue of them is full and nobody takes any."""
    with socket.socket() as listener:
        listener.bind((LOOPBACK, 0))
        listener.listen(0)
        waiting = [socket.socket() for _ in range(4)]
        for one in waiting:
            one.settimeout(0)
            one.connect_ex(listener.getsockname())
        yield f"{LOOPBACK}:{listener.getsockname()[1]}"
        for one in waiting:
            one.close()

"""Fixtures of the tests that start real processes."""

import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.integration.checkout import Checkout
from tests.integration.images import write_odd_folder


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path / "with spaces" / "slip way")


@pytest.fixture
def odd_folder(tmp_path: Path) -> Path:
    return write_odd_folder(tmp_path / "my images")


@pytest.fixture(scope="session")
def odd_images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, for tests that only read it."""
    return write_odd_folder(tmp_path_factory.mktemp("odd") / "my images")


@pytest.fixture
def usual_ports_taken() -> Iterator[None]:
    """Somebody listens on Triton's ports already."""
    with ExitStack() as stack:
        for port in (8000, 8001, 8002):
            listener = stack.enter_context(socket.socket())
            try:
                listener.bind(("127.0.0.1", port))
            except OSError:
                continue  # taken by somebody else: just as good
            listener.listen()
        yield

"""A container engine for all tests of a session."""

import os
from collections.abc import Iterator
from contextlib import ExitStack

import docker
import pytest

from deploy import engine
from deploy.engine import NoEngine


@pytest.fixture(scope="session")
def docker_host() -> Iterator[str]:
    """The address of an engine, as DOCKER_HOST wants it. Skips, saying why, where there can be none; fails in CI."""
    with ExitStack() as stack:
        try:
            host = stack.enter_context(engine.running())
        except NoEngine as error:
            if os.environ.get("CI"):
                pytest.fail(str(error))
            pytest.skip(str(error))
        yield host


@pytest.fixture(scope="session")
def docker_client(docker_host: str) -> Iterator[docker.DockerClient]:
    with engine.client(docker_host) as client:
        yield client

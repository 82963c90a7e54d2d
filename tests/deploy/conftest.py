"""A container engine for all tests of a session, our images in it, and a release to serve."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import docker
import pytest

from deploy import bases, engine, images
from deploy.bases import Base
from deploy.engine import NoEngine
from serve import releases, repository
from serve.release import Release, open_release
from tests.programs import cannot_run, require
from tests.serve.tools import CPUS, make_bundle


@pytest.fixture(scope="session")
def docker_host() -> Iterator[str]:
    """The address of an engine, as DOCKER_HOST wants it. Skips, saying why, where there can be none; fails in CI."""
    with ExitStack() as stack:
        try:
            host = stack.enter_context(engine.running())
        except NoEngine as error:
            cannot_run(str(error))
        yield host


@pytest.fixture(scope="session")
def docker_client(docker_host: str) -> Iterator[docker.DockerClient]:
    with engine.client(docker_host) as client:
        yield client


@pytest.fixture(scope="session")
def serve_image(docker_host: str, docker_client: docker.DockerClient) -> Iterator[tuple[str, Base]]:
    """The serving image, and the stand-in that it stands on, on every machine: so that all test the same."""
    require("debootstrap", "docker")
    with images.made(docker_client, docker_host, "serve", bases.STAND_IN) as made:
        yield made


@pytest.fixture(scope="session")
def gateway_image(docker_host: str, docker_client: docker.DockerClient) -> Iterator[tuple[str, Base]]:
    """The same of the gateway's."""
    require("nginx", "envsubst", "busybox", "docker")
    with images.made(docker_client, docker_host, "gateway", bases.STAND_IN) as made:
        yield made


@pytest.fixture(scope="session")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve classes '0' to '11'; each is a colour."""
    return make_bundle(tmp_path_factory.mktemp("bundles") / "tiny" / "2")


@pytest.fixture
def release(bundle: Path, tmp_path: Path) -> Release:
    """For the Triton of the stand-in; it is current in a repository of its own."""
    release = open_release(repository.publish(bundle, tmp_path / "repository", "embedded", CPUS))
    releases.move_current(release.directory)
    return release

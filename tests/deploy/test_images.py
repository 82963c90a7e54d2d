"""What is in our image, on the STAND-IN for NVIDIA's, and what a container of it does under limits."""

import dataclasses
import os
import subprocess
import sys

import docker
import pytest

from deploy import bases, images
from deploy.bases import Base, NoBase
from deploy.images import BuildFailed
from deploy.service import served
from serve import health
from serve.client import HttpClient
from serve.protocol import ServingError
from serve.release import Release
from serve.smoke import SmokeTestFailed
from slipway import compatibility
from slipway.errors import UsageError
from slipway.paths import PROJECT_ROOT

# Whichever comes first makes the images.
pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(1800)]

Image = tuple[str, Base]
MEGABYTE = 2**20
# On the stand-in; NVIDIA's image is an order of magnitude larger by itself.
LARGEST_MEGABYTES = 900
MOST_THREADS = 8
COUNT_THREADS = """
import psutil
print(*[one.num_threads() for one in psutil.process_iter(["name"]) if one.info["name"].startswith("triton_python")])
"""


def inside(client: docker.DockerClient, image: str, *command: str) -> str:
    output = client.containers.run(image, list(command), remove=True, network_mode="none")
    return output.decode()


def test_image_says_what_it_is_made_from(docker_client: docker.DockerClient, serve_image: Image) -> None:
    tag, base = serve_image
    assert tag.endswith("-on-stand-in")
    config = docker_client.images.get(tag).attrs["Config"]
    assert config["User"] == "1000:1000"
    assert config["Healthcheck"]["Test"] == ["CMD", "python3", "-m", "serve", "health"]
    assert config["Labels"] == {
        "org.opencontainers.image.title": "slipway serve",
        "org.opencontainers.image.version": images.version(),
        "org.opencontainers.image.revision": images.commit(),
        "org.opencontainers.image.base.name": base.image,
    }
    assert "stand-in" in base.image


def test_image_is_small_and_holds_nothing_of_training(
    docker_client: docker.DockerClient, serve_image: Image
) -> None:
    tag, _ = serve_image
    assert docker_client.images.get(tag).attrs["Size"] < LARGEST_MEGABYTES * 1_000_000
    assert inside(docker_client, tag, "ls", "/app").split() == ["bundles", "model_repository", "serve", "src"]
    packages = inside(docker_client, tag, "ls", "/opt/packages").split()
    assert "onnxruntime" in packages
    assert not {"torch", "pytest", "docker"} & set(packages)


def test_gateway_s_image_says_what_it_is_and_holds_the_gateway(
    docker_client: docker.DockerClient, gateway_image: Image
) -> None:
    """That it answers, as a user whom it does not know, tests/deploy/test_stack_of_stand_ins.py shows."""
    tag, base = gateway_image
    config = docker_client.images.get(tag).attrs["Config"]
    assert config["User"] == "1000:1000"
    assert config["StopSignal"] == "SIGQUIT"
    assert config["Labels"]["org.opencontainers.image.revision"] == images.commit()
    assert config["Labels"]["org.opencontainers.image.base.name"] == base.image
    assert base.description.startswith("a STAND-IN for nginx:")
    held = inside(
        docker_client, tag, "ls", "/etc/nginx/templates", "/etc/nginx/slipway", "/etc/nginx/slipway/page"
    )
    assert {"nginx.conf.template", "gateway.js", "index.html", "page.css", "page.js"} <= set(held.split())


@pytest.mark.parametrize("target", ["serve", "gateway"])
def test_make_image_names_the_image_that_it_built(
    docker_host: str, serve_image: Image, gateway_image: Image, target: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "deploy", "image", "--target", target, "--base", "stand-in"],
        cwd=PROJECT_ROOT,
        env={**os.environ, "DOCKER_HOST": docker_host},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == {"serve": serve_image, "gateway": gateway_image}[target][0]
    assert "stands on a STAND-IN for" in done.stderr


def test_base_that_nothing_stands_in_for_is_named(docker_host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", docker_host)
    with pytest.raises(UsageError, match="nothing stands in for the base of train"):
        images.main(["--target", "train", "--base", "stand-in"])


def test_digest_of_a_release_build_is_part_of_the_name_of_the_base(docker_host: str) -> None:
    """A right one cannot be asked for without a registry; but a wrong one makes no name."""
    arguments = {"TRITON_IMAGE": "localhost:1/triton:1", "TRITON_DIGEST": "nonsense"}
    with pytest.raises(BuildFailed, match="invalid reference format"):
        images.build(docker_host, "serve", "slipway-test:never", arguments)


def test_digest_is_not_taken_for_that_of_a_stand_in(
    docker_host: str, docker_client: docker.DockerClient, serve_image: Image
) -> None:
    with pytest.raises(UsageError, match="--digest is one of the original image"):
        images.make(docker_client, docker_host, "serve", bases.STAND_IN, f"sha256:{'0' * 64}")


def test_nvidias_image_is_replaced_by_a_stand_in_only_if_it_was_not_asked_for(
    docker_client: docker.DockerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = compatibility.load()
    container = dataclasses.replace(table.triton.container, image="localhost:1/triton:1")
    triton = dataclasses.replace(table.triton, container=container)
    monkeypatch.setattr(compatibility, "load", lambda: dataclasses.replace(table, triton=triton))
    monkeypatch.setattr("deploy.stand_in.ensure", lambda client: "a stand-in")
    found = bases.find(docker_client, "serve", "auto")
    assert (found.image, found.kind) == ("a stand-in", "stand-in")
    with pytest.raises(NoBase, match="localhost:1/triton:1: cannot be pulled"):
        bases.find(docker_client, "serve", "original")


def test_release_that_was_changed_is_not_served(
    docker_client: docker.DockerClient, serve_image: Image, release: Release
) -> None:
    labels = release.models / "classify" / "labels.txt"
    labels.chmod(0o644)
    labels.write_text("cat\n")
    with (
        served(docker_client, serve_image[0], release, restart_policy={}) as service,
        pytest.raises(SmokeTestFailed, match=r"(?s)ended by itself.*labels\.txt"),
    ):
        service.wait_until_it_answers()


def test_too_little_shared_memory_is_named_and_refuses_only_what_does_not_fit(
    docker_client: docker.DockerClient, serve_image: Image, release: Release
) -> None:
    """Case D06."""
    with served(docker_client, serve_image[0], release, shm_size=16 * MEGABYTE) as service:
        service.wait_until_it_answers()
        needed = -(-2 * release.largest_batch_bytes // MEGABYTE)
        assert f"--shm-size={needed}m" in service.log()
        with HttpClient(service.urls["http"]) as client:
            with pytest.raises(ServingError):
                client.classify([release.golden[0].image.ljust(30 * MEGABYTE, b"\0")])
            health.check(client, release)


def test_one_cpu_of_many_is_enough_and_threads_are_counted(
    docker_client: docker.DockerClient, serve_image: Image, release: Release
) -> None:
    """Case D10: a release that was published for two CPUs, on one; each instance computes in one thread of its own."""
    with served(docker_client, serve_image[0], release, cpuset_cpus="0") as service:
        service.wait_until_it_answers()
        _, output = service.run("python3", "-c", COUNT_THREADS)
        counts = [int(count) for count in output.split()]
        assert len(counts) == 4
        assert max(counts) <= MOST_THREADS

"""The smoke test passes on a good image and a good release, on the STAND-IN for NVIDIA's image, and on nothing else."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import docker
import numpy as np
import onnxruntime
import pytest

from deploy import smoke
from deploy.bases import Base
from serve import releases, repository
from serve.release import Release
from serve.smoke import SmokeTestFailed
from slipway.paths import PROJECT_ROOT
from tests.serve.tools import CPUS, edit_text, make_bundle, variant

# Whichever comes first makes the images.
pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(1800)]

Image = tuple[str, Base]
STD = (0.25, 0.3, 0.2)  # of tests/tiny_bundle.py, which only training's environment can import


def deploy_smoke(*options: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "deploy", "smoke", *options],
        cwd=PROJECT_ROOT,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
    )


@contextmanager
def untagged(client: docker.DockerClient, tag: str) -> Iterator[None]:
    """An image without its name, as before it was built, but kept."""
    image, kept = client.images.get(tag), "slipway-test:kept"
    image.tag(kept)
    client.images.remove(tag, noprune=True)
    try:
        yield
    finally:
        image.tag(tag)
        client.images.remove(kept)


def left_by_smoke(client: docker.DockerClient) -> list[str]:
    made = [one.name for one in [*client.containers.list(all=True), *client.networks.list()]]
    return [name for name in made if name.startswith("slipway-smoke-")]


def served_instead(release: Release, edit: Callable[[Path], None]) -> None:
    """Let `current` lead to a release that is sealed as it should be, and differs in what `edit(its models)` does."""
    releases.move_current(variant(release, release.directory.with_name("other"), edit).directory)


def test_smoke_test_passes_on_the_stand_in_and_leaves_nothing_behind(
    docker_host: str, docker_client: docker.DockerClient, serve_image: Image, bundle: Path
) -> None:
    before = left_by_smoke(docker_client)
    with untagged(docker_client, serve_image[0]):
        done = deploy_smoke("--bundle", str(bundle), "--base", "stand-in", DOCKER_HOST=docker_host)
        assert not docker_client.images.list(serve_image[0])
    assert done.returncode == 0, done.stderr
    rows = [line for line in done.stderr.splitlines() if line.startswith("stand-in  ")]
    assert "STAND-IN for nvcr.io" in rows[0]
    assert [row.split("  ")[1].strip() for row in rows] == [
        "image",
        "ready",
        "hardened",
        "golden, http",
        "golden, grpc",
        "bad input",
        "sizes",
        "metrics",
        "dead model",
        "killed",
        "stopped",
        "log",
        "passed",
    ]
    assert left_by_smoke(docker_client) == before


def test_broken_label_file_turns_it_red(
    docker_client: docker.DockerClient, serve_image: Image, release: Release
) -> None:
    """The golden image that readiness asks for has the right label still."""
    broken = release.golden[-1]
    assert broken.label != release.golden[0].label

    def break_label(models: Path) -> None:
        for model in ("classifier", "classify"):
            edit_text(models / model / "labels.txt", f"\n{broken.label}\n", "\nsomething else\n")

    served_instead(release, break_label)
    with pytest.raises(SmokeTestFailed) as caught:
        smoke.try_release(docker_client, *serve_image, release)
    assert str(caught.value) == (
        f"{broken.path.name}: over http, in a batch of 1, the server answered 'something else'; offline evaluation "
        f"predicted {broken.label!r}"
    )


def test_stale_release_turns_it_red(
    docker_client: docker.DockerClient, serve_image: Image, release: Release, tmp_path: Path
) -> None:
    """Case D13: `current` still leads to the release from before."""
    stale = make_bundle(tmp_path / "tiny" / "1", "--max-batch", "4")
    releases.move_current(repository.publish(stale, release.directory.parents[1], "embedded", CPUS))
    with pytest.raises(SmokeTestFailed, match=f"answers with release tiny/1@.*, not with {release.identity}"):
        smoke.try_release(docker_client, *serve_image, release)


def test_wrong_normalisation_turns_it_red(
    docker_client: docker.DockerClient, serve_image: Image, release: Release
) -> None:
    """Scaled in the wrong order of channels, and content with itself."""

    def scale_wrongly(models: Path) -> None:
        version = models / "classifier" / "2"
        scale = 1 / (255 * np.array(STD, np.float32))
        model = (version / "model.onnx").read_bytes()
        assert scale.tobytes() in model
        (version / "model.onnx").write_bytes(model.replace(scale.tobytes(), scale[::-1].tobytes()))
        session = onnxruntime.InferenceSession(version / "model.onnx", providers=["CPUExecutionProvider"])
        (logits,) = session.run(["logits"], {"image": np.load(version / "golden_pixels.npy")})
        np.save(version / "golden_logits.npy", logits)

    served_instead(release, scale_wrongly)
    with pytest.raises(SmokeTestFailed, match=r"the golden image was answered .* with probabilities off by"):
        smoke.try_release(docker_client, *serve_image, release)


def test_bundle_that_is_not_there_is_wrong_usage(tmp_path: Path) -> None:
    done = deploy_smoke("--bundle", str(tmp_path / "none"))
    assert done.returncode == 2
    assert "is no bundle; `make export` makes one" in done.stderr

"""Build our images.

    python -m deploy image --target serve

They are built by Docker's own command line, in whatever engine deploy.engine finds, with labels that say what they were
made from. Where NVIDIA's image cannot be had, `serve` is built on a stand-in, and its name says so.
"""

import argparse
import logging
import os
import shutil
import subprocess
import tomllib
from dataclasses import dataclass
from typing import Literal

import docker

from deploy import engine, stand_in
from scripts import programs
from slipway import compatibility
from slipway.errors import SlipwayError, UsageError
from slipway.paths import PROJECT_ROOT

TARGETS = ("serve", "train")
STAND_IN = "stand-in"
NVIDIA = "nvidia"
Choice = Literal["auto", "nvidia", "stand-in"]
LOG_TAIL_LINES = 15

logger = logging.getLogger(__name__)


class BuildFailed(SlipwayError):
    """An image was not built: the message ends with what the builder said."""


@dataclass(frozen=True, kw_only=True)
class Base:
    """What `serve` is built on. kind: `nvidia` or `stand-in`, for names and reports."""

    image: str
    kind: str

    @property
    def description(self) -> str:
        if self.kind == NVIDIA:
            return self.image
        triton = compatibility.load().triton
        return (
            f"a STAND-IN for {triton.container.image}: Triton {triton.embedded.version} from a wheel, with the Python "
            "backend only"
        )


def triton_base(client: docker.DockerClient, choice: Choice) -> Base:
    """NVIDIA's image, if it can be had or was asked for by name; else the stand-in.

    Raises:
        BuildFailed: NVIDIA's image was asked for and cannot be had.
        NoStandIn: neither can be had.
    """
    wanted = Base(image=compatibility.load().triton.container.image, kind=NVIDIA)
    if choice != STAND_IN:
        try:
            if not client.images.list(wanted.image):
                logger.info("pulling %s, which takes a while", wanted.image)
                client.images.pull(wanted.image)
        except docker.errors.DockerException as error:
            if choice == NVIDIA:
                raise BuildFailed(f"{wanted.image}: cannot be pulled: {error}") from error
            logger.info("%s cannot be pulled (%s); taking a stand-in", wanted.image, error)
        else:
            return wanted
    return Base(image=stand_in.ensure(client), kind=STAND_IN)


def build(host: str, target: str, tag: str, arguments: dict[str, str]) -> None:
    """Build a target of the Dockerfile in the engine at `host`. arguments: values of its ARGs, beside the labels'.

    Raises BuildFailed.
    """
    program = shutil.which("docker", path=programs.SEARCHED)
    if program is None:
        raise BuildFailed("docker, the command line that builds images, was not found")
    values = {"VERSION": version(), "COMMIT": commit(), **arguments}
    options = [option for name, value in values.items() for option in ("--build-arg", f"{name}={value}")]
    logger.info("building %s", tag)
    done = subprocess.run(
        # In the network of the host, because the engine's own may lead nowhere.
        [
            program,
            "build",
            "--network=host",
            f"--target={target}",
            f"--tag={tag}",
            *options,
            str(PROJECT_ROOT),
        ],
        env={**os.environ, "DOCKER_HOST": host},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode:
        tail = "\n".join(done.stdout.splitlines()[-LOG_TAIL_LINES:])
        raise BuildFailed(f"{tag}: was not built; the builder said last:\n{tail}")


def build_serve(client: docker.DockerClient, host: str, choice: Choice, digest: str = "") -> tuple[str, Base]:
    """The name of the serving image and what it was built on. digest: of NVIDIA's image, `sha256:...`."""
    base = triton_base(client, choice)
    if digest and base.kind == STAND_IN:
        raise UsageError(
            "command line: --digest is one of NVIDIA's image, and this would be built on a stand-in"
        )
    suffix = "-on-stand-in" if base.kind == STAND_IN else ""
    tag = f"{name('serve')}{suffix}"
    build(host, "serve", tag, {"TRITON_IMAGE": base.image, "TRITON_DIGEST": digest})
    return tag, base


def name(target: str) -> str:
    """Such as `slipway-serve:0.1.0-9f86d081884c`."""
    return (
        f"slipway-{target}:{version()}-{commit()[:12]}{'-changed' if commit().endswith('-changed') else ''}"
    )


def version() -> str:
    project = tomllib.loads((PROJECT_ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return str(project["project"]["version"])


def commit() -> str:
    """The commit of this checkout, with `-changed` behind it if files differ from it; `unknown` outside of git."""
    git = ["git", "-C", str(PROJECT_ROOT)]
    head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    if head.returncode:
        return "unknown"
    changed = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True, check=False)
    return head.stdout.strip() + ("-changed" if changed.stdout else "")


def main(arguments: list[str]) -> str:
    parser = argparse.ArgumentParser(
        prog="python -m deploy image", description="Build an image; print its name."
    )
    parser.add_argument(
        "--target", choices=TARGETS, default="serve", help="of the Dockerfile (default: serve)"
    )
    add_base_option(parser)
    parser.add_argument("--digest", default="", help="of the base image, sha256:...; a release build sets it")
    options = parser.parse_args(arguments)
    if (host := engine.existing()) is None:
        raise UsageError(
            "no container engine runs here that would keep the image; start Docker or set DOCKER_HOST"
        )
    with engine.client(host) as client:
        if options.target == "serve":
            tag, base = build_serve(client, host, options.base, options.digest)
            logger.info("%s stands on %s", tag, base.description)
        else:
            tag = name(options.target)
            build(host, options.target, tag, {"PYTHON_DIGEST": options.digest})
        size = client.images.get(tag).attrs["Size"]
        logger.info("%s: %d MB", tag, size // 1_000_000)
    return tag


def add_base_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--base",
        choices=["auto", NVIDIA, STAND_IN],
        default="auto",
        help="what to build `serve` on: NVIDIA's image, a stand-in, or (auto, the default) a stand-in only if NVIDIA's "
        "image cannot be had",
    )

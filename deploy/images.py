"""Build our images.

    python -m deploy image --target serve

They are built by Docker's own command line, in whatever engine deploy.engine finds, with labels that say what they were
made from. Where the base of one cannot be had it is built on a stand-in, and its name says so.
"""

import argparse
import logging
import os
import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager

import docker

from deploy import bases, engine
from deploy.bases import STAND_IN, Base, Choice
from scripts import programs
from slipway.errors import SlipwayError, UsageError
from slipway.paths import PROJECT_ROOT

# Target of the Dockerfile -> how the arguments are called that say what it is built on.
TARGETS = {"serve": "TRITON", "train": "PYTHON", "gateway": "NGINX"}
LOG_TAIL_LINES = 15

logger = logging.getLogger(__name__)


class BuildFailed(SlipwayError):
    """An image was not built: the message ends with what the builder said."""


def make(
    client: docker.DockerClient, host: str, target: str, choice: Choice, digest: str = ""
) -> tuple[str, Base]:
    """Build a target; returns the image's name and what it was built on.

    digest: `sha256:...`, of the image of the table; the builder itself pulls it.
    """
    if digest and choice == STAND_IN:
        raise UsageError("command line: --digest is one of the original image, and not of a stand-in")
    base = bases.original(target) if digest else bases.find(client, target, choice)
    tag = f"{name(target)}{'-on-stand-in' if base.kind == STAND_IN else ''}"
    prefix = TARGETS[target]
    build(host, target, tag, {f"{prefix}_IMAGE": base.image, f"{prefix}_DIGEST": digest})
    return tag, base


@contextmanager
def made(client: docker.DockerClient, host: str, target: str, choice: Choice) -> Iterator[tuple[str, Base]]:
    """`make`, for as long as a `with` block lasts. An image that was there before stays, and so do cached layers."""
    known = {tag for image in client.images.list() for tag in image.tags}
    tag, base = make(client, host, target, choice)
    try:
        yield tag, base
    finally:
        if tag not in known:
            client.images.remove(tag, noprune=True)


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
            "--file=-",
            "--network=host",
            f"--target={target}",
            f"--tag={tag}",
            *options,
            str(PROJECT_ROOT),
        ],
        env={**os.environ, "DOCKER_HOST": host},
        input=stages_of(target),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode:
        tail = "\n".join(done.stdout.splitlines()[-LOG_TAIL_LINES:])
        raise BuildFailed(f"{tag}: was not built; the builder said last:\n{tail}")


def stages_of(target: str) -> str:
    """The Dockerfile, with only those stages that a target is made of: the classic builder would make others, too."""
    text = (PROJECT_ROOT / "Dockerfile").read_text(encoding="utf-8")
    head, *stages = re.split(r"^(?=FROM )", text, flags=re.MULTILINE)
    own = re.compile(rf"FROM \S+ AS {target}(-\w+)?\n")
    return "".join([head, *(stage for stage in stages if own.match(stage))])


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
        "--target", choices=list(TARGETS), default="serve", help="of the Dockerfile (default: serve)"
    )
    bases.add_option(parser)
    parser.add_argument("--digest", default="", help="of the base image, sha256:...; a release build sets it")
    options = parser.parse_args(arguments)
    if (host := engine.existing()) is None:
        raise UsageError(
            "no container engine runs here that would keep the image; start Docker or set DOCKER_HOST"
        )
    if options.base == STAND_IN and options.target not in bases.STAND_INS:
        raise UsageError(f"command line: nothing stands in for the base of {options.target}")
    with engine.client(host) as client:
        tag, base = make(client, host, options.target, options.base, options.digest)
        logger.info("%s stands on %s", tag, base.description)
        size = client.images.get(tag).attrs["Size"]
        logger.info("%s: %d MB", tag, size // 1_000_000)
    return tag

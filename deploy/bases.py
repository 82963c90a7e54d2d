"""What our images are built on: the images of the table of versions, or a stand-in for one that cannot be had."""

import argparse
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

import docker

from deploy import stand_in, stand_in_nginx
from slipway import compatibility
from slipway.errors import SlipwayError

STAND_IN: Final = "stand-in"
ORIGINAL: Final = "original"
Choice = Literal["auto", "original", "stand-in"]

logger = logging.getLogger(__name__)


class NoBase(SlipwayError):
    """The image that ours is to be built on cannot be had: the message says why."""


@dataclass(frozen=True, kw_only=True)
class Base:
    """What an image is built on. kind: `original` or `stand-in`, for names and reports; description: what it is."""

    image: str
    kind: str
    description: str


def find(client: docker.DockerClient, target: str, choice: Choice) -> Base:
    """The image of the table that a target is built on, if it can be had or was asked for; else a stand-in.

    Raises:
        NoBase: the image was asked for, or nothing stands in for it, and it cannot be had.
        NoStandIn, NoProgram: neither can be had.
    """
    wanted = original(target)
    make_stand_in = STAND_INS.get(target)
    if choice != STAND_IN or make_stand_in is None:
        try:
            if not client.images.list(wanted.image):
                logger.info("pulling %s, which takes a while", wanted.image)
                client.images.pull(wanted.image)
        except docker.errors.DockerException as error:
            if choice == ORIGINAL or make_stand_in is None:
                raise NoBase(f"{wanted.image}: cannot be pulled: {error}") from error
            logger.info("%s cannot be pulled (%s); taking a stand-in", wanted.image, error)
        else:
            return wanted
    return make_stand_in(client)


def original(target: str) -> Base:
    table = compatibility.load()
    image = {
        "serve": table.triton.container.image,
        "train": table.docker.python_image,
        "gateway": table.docker.nginx_image,
    }[target]
    return Base(image=image, kind=ORIGINAL, description=image)


def _triton(client: docker.DockerClient) -> Base:
    triton = compatibility.load().triton
    return Base(
        image=stand_in.ensure(client),
        kind=STAND_IN,
        description=f"a STAND-IN for {triton.container.image}: Triton {triton.embedded.version} from a wheel, with the "
        "Python backend only",
    )


def _nginx(client: docker.DockerClient) -> Base:
    return Base(
        image=stand_in_nginx.ensure(client),
        kind=STAND_IN,
        description=f"a STAND-IN for {original('gateway').image}: nginx {stand_in_nginx.version()} of this machine",
    )


# Target -> what stands in for its base.
STAND_INS: dict[str, Callable[[docker.DockerClient], Base]] = {"serve": _triton, "gateway": _nginx}


def add_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--base",
        choices=["auto", ORIGINAL, STAND_IN],
        default="auto",
        help="what to build on: the image of the table (src/slipway/compatibility.toml), a stand-in, or (auto, the "
        "default) a stand-in only if that image cannot be had",
    )

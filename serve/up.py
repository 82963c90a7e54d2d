"""Serve a release in the foreground until Ctrl-C or SIGTERM."""

import logging
import shlex
from pathlib import Path

from serve import server
from serve.front import Front
from serve.model_config import ENCODED, ENSEMBLE, RELEASE
from serve.release import Release
from serve.server import Ports
from serve.supervisor import Supervisor
from slipway.contract import PROBABILITIES

USUAL_PORTS = Ports(http=8000, grpc=8001, metrics=8002)

logger = logging.getLogger(__name__)


def run(release: Path, ports: Ports | None, probe_seconds: float, traces: str | None) -> None:
    """Serve what `release` is or leads to, also when it leads elsewhere later; return when asked to stop.

    ports: None for the usual ones, or free ones in place of those that are taken. The other arguments are those of
        Supervisor.

    Raises SlipwayError if it cannot be served to begin with, or there.
    """
    try:
        front = Front(ports or choose_ports())
    except KeyboardInterrupt:
        logger.info("stopped before anything was served")
        return
    supervisor = Supervisor(front, release, probe_seconds, traces)
    try:
        supervisor.start()
        logger.info("%s", describe(front, supervisor.server.release))
        supervisor.run()
    except KeyboardInterrupt:
        logger.info("stopping; requests in flight are answered first")
    finally:
        supervisor.stop()
    logger.info("stopped")


def choose_ports() -> Ports:
    """Triton's usual ports, or a free one, and a line about it, in place of each that is taken."""
    free = server.free_ports()
    return Ports(
        http=_this_or(USUAL_PORTS.http, free.http),
        grpc=_this_or(USUAL_PORTS.grpc, free.grpc),
        metrics=_this_or(USUAL_PORTS.metrics, free.metrics),
    )


def _this_or(port: int, other: int) -> int:
    if server.is_free(port):
        return port
    logger.info("port %d is in use; taking %d", port, other)
    return other


def describe(front: Front, release: Release) -> str:
    return f"""
{release.identity} is ready:

  HTTP     http://{front.http}
  gRPC     {front.grpc}
  metrics  http://{front.metrics}/metrics, and of the service http://{front.metrics}/metrics/service
{elsewhere(front)}
Ask it with curl:

{curl_example(front, release)}

Ctrl-C stops it."""


def elsewhere(front: Front) -> str:
    """What commands are to be told that look on the usual ports, where these are others."""
    if front.ports == USUAL_PORTS:
        return ""
    return f"""
These are not the usual ports, so commands have to be told:

  make predict IMAGE=... ARGS="--url {front.http}"
  make gateway ARGS="--stable {front.http} {front.grpc}"
"""


def curl_example(front: Front, release: Release) -> str:
    """A command to paste into a shell: an image from the release as it is, the three best classes by name.

    The body is JSON that asks for names, then the image as one string: its length as 4 bytes, little-endian, and
    its bytes (Triton's binary tensor data extension). JSON alone cannot carry an image.
    """
    request = (
        f'{{"inputs":[{{"name":"{ENCODED}","datatype":"BYTES","shape":[1,1],'
        f'"parameters":{{"binary_data_size":%d}}}}],'
        f'"outputs":[{{"name":"{PROBABILITIES}","parameters":{{"classification":3}}}},{{"name":"{RELEASE}"}}]}}'
    )
    return f"""\
image={shlex.quote(str(release.golden[0].path))}
size=$(wc -c < "$image")
json=$(printf '{request}' $((size + 4)))
length=$(printf '\\\\%03o' $((size & 255)) $((size >> 8 & 255)) $((size >> 16 & 255)) $((size >> 24)))
{{ printf '%s' "$json"; printf "$length"; cat "$image"; }} |
  curl -sS -H "Inference-Header-Content-Length: ${{#json}}" --data-binary @- \\
  http://{front.http}/v2/models/{ENSEMBLE}/infer"""

"""The same work behind other servers, each a small program as its own documentation would have it for this work.

`python -m benchmarks.peers.NAME_server` is told by SLIPWAY_RELEASE and SLIPWAY_PORT what to serve and where, and by
SLIPWAY_CPUS how many CPUs it has. It answers POST /classify with {"probabilities": [...]}.
"""

import http.client
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt
import psutil

from serve.server import LOOPBACK, free_ports
from slipway.paths import PROJECT_ROOT

# Name -> how its program is called, and whether it takes an image as a form's file instead of the whole body.
PEERS = {
    "FastAPI": ("fastapi_server", False),
    "LitServe": ("litserve_server", True),
    "BentoML": ("bentoml_server", False),
}
START_SECONDS, ANSWER_SECONDS = 180, 60
BOUNDARY = "an-image"


class PeerError(Exception):
    """A peer that did not start, or answered with an error."""


class PeerClient:
    """One kept connection to a peer."""

    def __init__(self, name: str, port: int) -> None:
        self._connection = http.client.HTTPConnection(LOOPBACK, port, timeout=ANSWER_SECONDS)
        _, self._form = PEERS[name]

    def probabilities(self, image: bytes) -> npt.NDArray[np.float64]:
        """Raises PeerError, OSError or HTTPException where there is no answer."""
        body, kind = (
            (_as_form(image), f"multipart/form-data; boundary={BOUNDARY}")
            if self._form
            else (image, "image/jpeg")
        )
        self._connection.request("POST", "/classify", body, {"Content-Type": kind})
        response = self._connection.getresponse()
        answer = response.read()
        if response.status != http.client.OK:
            raise PeerError(f"answered {response.status}: {answer[:200]!r}")
        return np.array(json.loads(answer)["probabilities"])

    def close(self) -> None:
        self._connection.close()


@contextmanager
def running(name: str, release: Path, cpus: int, image: bytes) -> Iterator[int]:
    """Start a peer, yield its port once it has answered `image`, and end it and all that it started."""
    program, _ = PEERS[name]
    port = free_ports().http
    told = {"SLIPWAY_RELEASE": str(release), "SLIPWAY_PORT": str(port), "SLIPWAY_CPUS": str(cpus)}
    process = subprocess.Popen(
        [sys.executable, "-m", f"benchmarks.peers.{program}"],
        env={**os.environ, **told, "BENTOML_DO_NOT_TRACK": "true"},
        cwd=PROJECT_ROOT,
        stdout=sys.stderr,
        start_new_session=True,
    )
    try:
        _wait_for(name, process, port, image)
        yield port
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """With all that it started, some of it in process groups of their own."""
    with suppress(psutil.NoSuchProcess):
        for one in [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]:
            with suppress(psutil.NoSuchProcess):
                one.kill()
    process.wait()


def _wait_for(name: str, process: subprocess.Popen[bytes], port: int, image: bytes) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        client = PeerClient(name, port)
        try:
            client.probabilities(image)
            return
        except (PeerError, OSError, http.client.HTTPException) as error:
            if process.poll() is not None or time.monotonic() > deadline:
                raise PeerError(f"{name} did not answer: {error!r}; what it said is above") from error
            time.sleep(0.2)
        finally:
            client.close()


def _as_form(image: bytes) -> bytes:
    head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="request"; filename="image"\r\n\r\n'
    return head.encode() + image + f"\r\n--{BOUNDARY}--\r\n".encode()

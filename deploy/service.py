"""One container that serves a release, started as a careful operator would: nothing is writable, nobody is root."""

import contextlib
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import docker
from docker.models.containers import Container

from serve import health, model_config
from serve.client import CLIENTS
from serve.health import WrongAnswer
from serve.protocol import DeadlineExceeded, ServingError, Unreachable
from serve.release import Release
from serve.server import shown_tail
from serve.smoke import SmokeTestFailed

CPUS = 2
MEMORY_BYTES = 4 * 2**30
# Not the user of the image: it must run as anybody.
USER = 12345
PORTS = {"http": "8000/tcp", "grpc": "8001/tcp", "metrics": "8002/tcp"}
REPOSITORY = "/app/model_repository"
START_SECONDS = 180


class Service:
    """A container that serves a release on ports of the loopback that Docker chose."""

    def __init__(
        self, client: docker.DockerClient, container: Container, image: str, release: Release
    ) -> None:
        self.client = client
        self.container = container
        self.image = image
        self.release = release

    @property
    def urls(self) -> dict[str, str]:
        """Protocol -> host:port; others after every start."""
        return {name: self._address(name) for name in CLIENTS}

    @property
    def metrics(self) -> str:
        return self._address("metrics")

    @property
    def restarts(self) -> int:
        self.container.reload()
        return int(self.container.attrs["RestartCount"])

    def log(self) -> str:
        return str(self.container.logs().decode(errors="replace"))

    def log_tail(self) -> str:
        """The end of a sentence: the end of the log, without the tables that Triton draws."""
        return shown_tail(self.log())

    def run(self, *command: str) -> tuple[int, str]:
        """Exit code and output of a command in the container, as the user of the server."""
        done = self.container.exec_run(list(command))
        return int(done.exit_code), done.output.decode(errors="replace").strip()

    def wait_until_it_answers(self, restarts: int = 0) -> float:
        """Seconds until a golden image was answered over both protocols. restarts: how many there are to be."""
        start = time.monotonic()
        while not self._answers(restarts):
            if time.monotonic() - start > START_SECONDS:
                raise SmokeTestFailed(f"no golden answer within {START_SECONDS} s{self.log_tail()}")
            time.sleep(0.2)
        return time.monotonic() - start

    def _answers(self, restarts: int) -> bool:
        if (found := self.restarts) > restarts or self.container.status == "exited":
            raise SmokeTestFailed(f"the server ended by itself{self.log_tail()}")
        if found < restarts or self.container.status != "running":
            return False
        try:
            health.probe(self.release, self.urls)
        except (Unreachable, DeadlineExceeded, KeyError):
            return False
        except (ServingError, WrongAnswer) as error:
            raise SmokeTestFailed(str(error)) from error
        return True

    def _address(self, name: str) -> str:
        """Raises KeyError while the container does not run."""
        self.container.reload()
        published = self.container.ports[PORTS[name]][0]
        return f"{published['HostIp']}:{published['HostPort']}"


@contextmanager
def served(client: docker.DockerClient, image: str, release: Release, **changes: Any) -> Iterator[Service]:
    """A container that serves what `current` leads to, in the repository of `release`; it is gone afterwards.

    changes: of how it is started, as Docker's client names them.
    """
    name = f"slipway-smoke-{uuid.uuid4().hex[:8]}"
    with contextlib.ExitStack() as stack:
        network = client.networks.create(name)
        stack.callback(network.remove)
        container = client.containers.create(
            image, name=name, network=name, **{**_hardened(release), **changes}
        )
        stack.callback(container.remove, force=True, v=True)
        container.start()
        yield Service(client, container, image, release)


def _hardened(release: Release) -> dict[str, Any]:
    return {
        "ports": dict.fromkeys(PORTS.values(), ("127.0.0.1", None)),
        "volumes": {str(release.directory.parents[1]): {"bind": REPOSITORY, "mode": "ro"}},
        "user": f"{USER}:{USER}",
        "read_only": True,
        "tmpfs": {"/tmp": ""},
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges"],
        "mem_limit": MEMORY_BYTES,
        "nano_cpus": CPUS * 10**9,
        "pids_limit": 512,
        # Each instance keeps the most that it has ever needed.
        "shm_size": model_config.instances(release.models) * release.largest_batch_bytes,
        "restart_policy": {"Name": "on-failure", "MaximumRetryCount": 3},
    }

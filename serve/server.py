"""Run Triton as a child process, on loopback only, for as long as a `with` block lasts.

    with serving(release) as server:
        HttpClient(server.http)

The block starts when a golden image was answered correctly over HTTP and gRPC. It ends with a drained server:
requests in flight are answered, and no process, port, link or shared memory is left behind.
"""

import contextlib
import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from pathlib import Path

import psutil

from serve import health
from serve.client import CLIENTS, Unreachable
from serve.release import Release
from slipway import compatibility
from slipway.errors import SlipwayError
from slipway.paths import PROJECT_ROOT

TRITON = PROJECT_ROOT / ".venv" / "server"
LOOPBACK = "127.0.0.1"
SHARED_MEMORY = Path("/dev/shm")
# Links in the server's private folder.
MODELS = "models"
PROGRAM = "triton"

START_SECONDS = 120
# Requests in flight get this long when the server stops. A client that merely keeps its connection open makes
# Triton wait for all of it, and exit with status 1.
DRAIN_SECONDS = 10
STOP_SECONDS = DRAIN_SECONDS + 5
ATTEMPTS = 5
LOG_TAIL_LINES = 15

logger = logging.getLogger(__name__)


class ServerError(SlipwayError):
    """The server could not be started, or ended by itself."""


class PortTaken(ServerError):
    """Somebody else listens on a port that the server was to use."""


@dataclass(frozen=True, kw_only=True)
class Ports:
    http: int
    grpc: int
    metrics: int


@contextmanager
def serving(
    release: Release,
    *,
    ports: Ports | None = None,
    python: Path = Path(sys.prefix),
    triton: Path = TRITON,
) -> Iterator["Server"]:
    """Start Triton with a release, wait until it answers, and stop it in the end.

    Args:
        ports: where to listen; free ports are chosen if not given.
        python: the environment that runs the models: Triton takes the first Python on its PATH.
        triton: the folder with the unpacked Triton wheel.

    Raises:
        PortTaken: one of the given ports is in use.
        ServerError: something is missing, the server ended, or it did not answer in time.
        WrongAnswer: it answered the golden image wrongly.
    """
    if release.target != "embedded":
        raise ServerError(
            f"{release.directory}: was published for the {release.target}; publish it with --target embedded to "
            "run it here"
        )
    program = find_triton(triton)
    _check_python(python)
    with _private_folder() as folder:
        # Triton hangs for ever, without a word, if a path that it hands to its models contains a space. And its
        # Python writes byte code beside the models whatever PYTHONDONTWRITEBYTECODE says, which would break the
        # seal of the release: so the folders are ours, and only the files in them are links.
        shutil.copytree(release.models, folder / MODELS, copy_function=os.symlink)
        (folder / PROGRAM).symlink_to(program, target_is_directory=True)
        server = _start(folder, python, ports, release)
        try:
            yield server
        finally:
            server.stop()


def _start(folder: Path, python: Path, ports: Ports | None, release: Release) -> "Server":
    """A server that has answered. A port that we chose may be gone before Triton takes it; then others are tried."""
    if ports is not None:
        return _start_on(ports, folder, python, release)
    for _ in range(ATTEMPTS - 1):
        with contextlib.suppress(PortTaken):
            return _start_on(free_ports(), folder, python, release)
    return _start_on(free_ports(), folder, python, release)


def _start_on(ports: Ports, folder: Path, python: Path, release: Release) -> "Server":
    server = Server(folder, python, ports)
    try:
        server.wait_until_it_answers(release)
    except BaseException:
        server.stop()
        raise
    return server


class Server:
    """One tritonserver process and the model processes below it, run from a folder with links to what it needs.

    http, grpc, metrics: host:port. log: what Triton wrote; it goes when the server does.
    """

    def __init__(self, folder: Path, python: Path, ports: Ports) -> None:
        self._folder = folder
        self.ports = ports
        self.http = f"{LOOPBACK}:{ports.http}"
        self.grpc = f"{LOOPBACK}:{ports.grpc}"
        self.metrics = f"{LOOPBACK}:{ports.metrics}"
        self.log = folder / "triton.log"
        self.id = f"slipway-{uuid.uuid4().hex[:12]}"
        for port in astuple(ports):
            if not is_free(port):
                raise PortTaken(
                    f"port {port} is in use on {LOOPBACK}; stop what listens there or give another one"
                )
        with self.log.open("wb") as output:
            self._process = subprocess.Popen(
                [str(folder / PROGRAM / "bin" / "tritonserver"), *self._arguments()],
                env=_environment(python),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                # A group of its own: Ctrl-C reaches only us, and in the end nobody of the group is forgotten.
                start_new_session=True,
            )

    @property
    def urls(self) -> dict[str, str]:
        """Protocol -> host:port."""
        return {"http": self.http, "grpc": self.grpc}

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_until_it_answers(self, release: Release) -> None:
        """Ready means: a golden image was answered correctly over both protocols, by this very process."""
        deadline = time.monotonic() + START_SECONDS
        while not self._answers(release):
            self.raise_if_ended()
            if time.monotonic() > deadline:
                raise ServerError(f"Triton did not answer within {START_SECONDS} s{self._log_tail()}")
            time.sleep(0.1)

    def raise_if_ended(self) -> None:
        """Raises PortTaken or ServerError, with the reason from the log, if the server is not running any more."""
        status = self._process.poll()
        if status is None:
            return
        text = self.log.read_text(errors="replace")
        if taken := _PORT_IN_USE.search(text):
            raise PortTaken(f"port {taken['port']} was taken by another process while Triton started")
        if failed := _LOAD_FAILURE.search(text):
            raise ServerError(f"Triton could not load model {failed['model']}: {failed['reason']}")
        raise ServerError(f"Triton ended by itself with status {status}{self._log_tail()}")

    def stop(self) -> None:
        """Let requests in flight finish, then end. What has not ended by then is killed."""
        try:
            if self._process.poll() is None:
                self._process.send_signal(signal.SIGTERM)
                self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            logger.warning("WARNING: Triton did not stop within %g s; killing it", STOP_SECONDS)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            for leftover in SHARED_MEMORY.glob(f"{self.id}*"):
                leftover.unlink(missing_ok=True)

    def _answers(self, release: Release) -> bool:
        if not self._listens():
            return False
        for protocol, url in self.urls.items():
            with CLIENTS[protocol](url) as client:
                try:
                    health.check(client, release)
                except Unreachable:
                    return False  # it has just ended
        return True

    def _listens(self) -> bool:
        """Whether this very process has taken all its ports, which it does when all models are loaded.

        To be answered on a port proves less: it may be another server's, and ours about to end because of that.
        """
        try:
            connections = psutil.Process(self.pid).net_connections("tcp")
        except psutil.NoSuchProcess:
            return False
        listening = {one.laddr.port for one in connections if one.status == psutil.CONN_LISTEN}
        return listening.issuperset(astuple(self.ports))

    def _arguments(self) -> list[str]:
        return [
            f"--id={self.id}",
            f"--model-repository={self._folder / MODELS}",
            f"--backend-directory={self._folder / PROGRAM / 'backends'}",
            "--model-control-mode=none",
            # What a model takes and gives is what the release says, not what Triton finds out by itself.
            "--disable-auto-complete-config",
            f"--http-address={LOOPBACK}",
            f"--http-port={self.ports.http}",
            f"--grpc-address={LOOPBACK}",
            f"--grpc-port={self.ports.grpc}",
            f"--metrics-address={LOOPBACK}",
            f"--metrics-port={self.ports.metrics}",
            f"--exit-timeout-secs={DRAIN_SECONDS}",
            # By its name, shared memory that a killed server leaves behind is known to be ours.
            f"--backend-config=python,shm-region-prefix-name={self.id}",
        ]

    def _log_tail(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
        return "\n".join(["; the end of its log:", *lines])


def find_triton(triton: Path) -> Path:
    """The folder of the server in the unpacked wheel. Raises ServerError naming what is missing there."""
    program = triton / "pytriton" / "tritonserver"
    libpython = f"libpython{compatibility.load().python}.so.1.0"
    needed = {
        program / "bin" / "tritonserver": "the Triton server",
        program / "backends" / "python" / "triton_python_backend_stub": "the stub of Triton's Python backend",
        triton / "nvidia_pytriton.libs" / libpython: "the stub's libpython",
    }
    for path, what in needed.items():
        if not path.exists():
            raise ServerError(f"{path}: {what} is missing; `make setup` puts it there")
    return program


def _check_python(python: Path) -> None:
    """The stub is built for one minor version of Python; with another it does not even start."""
    version = compatibility.load().python
    if not (python / "lib" / f"python{version}").is_dir():
        raise ServerError(f"{python}: is not a Python {version} environment; `make setup` makes .venv/serve")


def free_ports() -> Ports:
    """Three ports that nobody listens on now. Somebody may by the time Triton takes them: see _start."""
    with contextlib.ExitStack() as stack:
        # All three are held until the last is chosen, so they differ.
        sockets = [stack.enter_context(socket.socket()) for _ in range(3)]
        for one in sockets:
            one.bind((LOOPBACK, 0))
        http, grpc, metrics = (one.getsockname()[1] for one in sockets)
    return Ports(http=http, grpc=grpc, metrics=metrics)


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
    return True


_PORT_IN_USE = re.compile(r"(?P<port>\d+)'? already in use")
_LOAD_FAILURE = re.compile(r"failed to load '(?P<model>\w+)' version \d+: (?P<reason>.*)")


@contextmanager
def _private_folder() -> Iterator[Path]:
    """A new directory for this process alone, at a path without spaces whatever TMPDIR says."""
    usual = tempfile.gettempdir()
    with tempfile.TemporaryDirectory(
        prefix="slipway-", dir="/tmp" if re.search(r"\s", usual) else usual
    ) as name:
        yield Path(name)


def _environment(python: Path) -> dict[str, str]:
    """Our environment, with the models' Python first on PATH and nothing that could lead it elsewhere."""
    variables = {
        name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")
    }
    variables["PATH"] = f"{python / 'bin'}{os.pathsep}{variables.get('PATH', os.defpath)}"
    return variables

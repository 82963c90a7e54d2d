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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from pathlib import Path

import psutil

from serve import health, linter, model_config, shared_memory, tether, tracing
from serve.protocol import DeadlineExceeded, Unreachable
from serve.release import Release
from slipway import compatibility
from slipway.errors import SlipwayError
from slipway.paths import PROJECT_ROOT

TRITON = PROJECT_ROOT / ".venv" / "server"
LOOPBACK = "127.0.0.1"
# Links in the server's private folder.
MODELS = "models"
PROGRAM = "triton"

START_SECONDS = 120
# For the golden answers of a server that has loaded its models and warmed them up.
ANSWER_SECONDS = 5
# Requests in flight get this long when the server stops. A client that merely keeps its connection open makes
# Triton wait for all of it, and exit with status 1.
DRAIN_SECONDS = 10
STOP_SECONDS = DRAIN_SECONDS + 5
LAST_THREAD_SECONDS = 5
# A server that fails so often without a reason, before it has answered, is given up.
START_ATTEMPTS = 3
PORT_ATTEMPTS = 5
LOG_TAIL_LINES = 15

logger = logging.getLogger(__name__)


class ServerError(SlipwayError):
    """The server could not be started, or ended by itself."""


class PortTaken(ServerError):
    """Somebody else listens on a port that the server was to use."""


class Unexplained(ServerError):
    """The server ended by itself, or does not answer, and does not say why.

    Another attempt may go well: this Triton does not always start where many want the CPU.
    """


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
    server = _start_and_wait(release, ports, python, triton)
    try:
        yield server
    finally:
        server.stop()


def start(
    release: Release,
    ports: Ports,
    *,
    python: Path = Path(sys.prefix),
    triton: Path = TRITON,
    traces: str | None = None,
) -> "Server":
    """Start Triton, which will answer a while later: see `Server.answers`. Whoever starts it has to stop it.

    It ends when the thread that called this does, whatever becomes of that thread; arguments and errors are those
    of `serving`, as far as they can be known already.

    traces: URL that takes OpenTelemetry's traces, OTLP over HTTP, such as http://127.0.0.1:4318/v1/traces.
    """
    try:
        return _start(release, ports, python, triton, traces)
    except OSError as error:
        raise ServerError(
            f"{release.directory}: Triton could not be started with it: {error}; are the release and room on the "
            f"disk and in {shared_memory.DIRECTORY} still there?"
        ) from error


def _start(release: Release, ports: Ports, python: Path, triton: Path, traces: str | None) -> "Server":
    if release.target != "embedded":
        raise ServerError(
            f"{release.directory}: was published for the {release.target}; publish it with --target embedded to "
            "run it here"
        )
    if mistakes := list(linter.problems(release.models)):
        raise ServerError(f"Triton would not serve this: {'; '.join(mistakes)}")
    program = find_triton(triton)
    _check_python(python)
    for port in astuple(ports):
        if not is_free(port):
            raise PortTaken(
                f"port {port} is in use on {LOOPBACK}; stop what listens there or give another one"
            )
    # Each instance keeps the most that it has ever needed.
    shared_memory.warn_if_less_than(model_config.instances(release.models) * release.largest_batch_bytes)
    with contextlib.ExitStack() as undo:
        folder = folder_of_links(release)
        undo.callback(shutil.rmtree, folder)
        (folder / PROGRAM).symlink_to(program, target_is_directory=True)
        server = Server(release, folder, python, ports, traces)
        undo.pop_all()
    return server


def _start_and_wait(release: Release, ports: Ports | None, python: Path, triton: Path) -> "Server":
    """A server that has answered. One that fails without a reason is started again."""

    def attempt(on: Ports) -> Server:
        server = start(release, on, python=python, triton=triton)
        try:
            server.wait_until_it_answers()
        except BaseException:
            server.stop()
            raise
        return server

    for _ in range(START_ATTEMPTS - 1):
        try:
            return _on_ports(attempt, ports)
        except Unexplained as error:
            logger.warning("WARNING: %s\nstarting it once more", error)
    return _on_ports(attempt, ports)


def _on_ports(attempt: Callable[[Ports], "Server"], ports: Ports | None) -> "Server":
    """On the given ports, or on free ones: those may be gone before Triton takes them, and then others are tried."""
    if ports is not None:
        return attempt(ports)
    for _ in range(PORT_ATTEMPTS - 1):
        with contextlib.suppress(PortTaken):
            return attempt(free_ports())
    return attempt(free_ports())


class Server:
    """One tritonserver process and the model processes below it, run from a folder with links to what it needs.

    http, grpc, metrics: host:port. log: what Triton wrote; it goes when the server does.
    """

    def __init__(
        self, release: Release, folder: Path, python: Path, ports: Ports, traces: str | None
    ) -> None:
        self.release = release
        self._folder = folder
        self._traces = traces
        self.ports = ports
        self.http = f"{LOOPBACK}:{ports.http}"
        self.grpc = f"{LOOPBACK}:{ports.grpc}"
        self.metrics = f"{LOOPBACK}:{ports.metrics}"
        self.log = folder / "triton.log"
        self.id = f"{shared_memory.PREFIX}{uuid.uuid4().hex[:12]}"
        self._models: list[psutil.Process] = []
        shared_memory.remove_abandoned()
        with self.log.open("wb") as output, shared_memory.owned(self.id) as ownership:
            self._process = subprocess.Popen(
                tether.command(folder / PROGRAM / "bin" / "tritonserver", *self._arguments()),
                env=_environment(python),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=(ownership,),
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

    def wait_until_it_answers(self) -> None:
        """Raises what `answers` and `raise_if_ended` raise, and ServerError when it takes too long."""
        deadline = time.monotonic() + START_SECONDS
        while not self.answers():
            if time.monotonic() > deadline:
                raise Unexplained(f"Triton did not answer within {START_SECONDS} s{self.log_tail()}")
            time.sleep(0.1)

    def answers(self) -> bool:
        """Whether it is ready: a golden image was answered correctly over both protocols, by this very process.

        Raises:
            PortTaken, ServerError: it will never be, because it has ended.
            WrongAnswer, ServingError: it answers, but not as the release was proven to.
        """
        self.raise_if_crippled()
        if not self._listens():
            return False
        try:
            self.probe(ANSWER_SECONDS)
            self._models = self._models or psutil.Process(self.pid).children()
        except (Unreachable, DeadlineExceeded, psutil.Error):
            return False  # it has just ended, or the machine is busy; we are asked again
        return True

    def probe(self, deadline_seconds: float) -> None:
        """Ask for a golden image over both protocols. Raises ServingError or WrongAnswer.

        deadline_seconds: for each of the two answers.
        """
        health.probe(self.release, self.urls, deadline_seconds)

    def raise_if_ended(self) -> None:
        """Raises PortTaken or ServerError, with the reason from the log, if the server is not running any more."""
        status = self._process.poll()
        if status is not None:
            raise self._end(f"Triton ended by itself with status {status}")

    def _end(self, what: str) -> ServerError:
        """What it is that the server has ended: as its log explains it, or else `what`."""
        text = read(self.log)
        if taken := _PORT_IN_USE.search(text):
            return PortTaken(f"port {taken['port']} was taken by another process while Triton started")
        if failed := _LOAD_FAILURE.search(text):
            return ServerError(f"Triton could not load model {failed['model']}: {failed['reason']}")
        return Unexplained(f"{what}{self.log_tail()}")

    def raise_if_crippled(self) -> None:
        """Raises ServerError if the server, or one of the processes that run its models, has died or stands still.

        Triton goes on as if nothing had happened when it loses one, and a request that another one answers
        proves nothing about it.
        """
        self.raise_if_ended()
        for process in (psutil.Process(self.pid), *self._models):
            try:
                status = process.status()
            except psutil.NoSuchProcess:
                status = psutil.STATUS_DEAD
            except psutil.Error:
                continue  # it is there and cannot be looked at; what it answers still says how it is
            if status not in (psutil.STATUS_DEAD, psutil.STATUS_ZOMBIE, psutil.STATUS_STOPPED):
                continue
            if process.pid != self.pid:
                raise ServerError(
                    f"a process that runs a model (process {process.pid}) is {status}{self.log_tail()}"
                )
            if status != psutil.STATUS_STOPPED:
                self._wait_for_last_thread()
            raise self._end(f"Triton (process {process.pid}) is {status}")

    def _wait_for_last_thread(self) -> None:
        """When that has gone, a moment after the process looks dead, its status can be had; raises ServerError then."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(LAST_THREAD_SECONDS)
        self.raise_if_ended()

    def log_tail(self) -> str:
        """The end of a sentence: the end of the log."""
        return shown_tail(read(self.log))

    def ask_to_stop(self) -> None:
        """Let requests in flight finish, then end; see `stop`, which must follow."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def stop(self) -> None:
        """Let requests in flight finish, then end. What has not ended by then is killed."""
        try:
            self.ask_to_stop()
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            logger.warning("WARNING: Triton did not stop within %g s; killing it", STOP_SECONDS)
        finally:
            self.kill()

    def kill(self) -> None:
        """End it now, and leave nothing behind."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        shared_memory.remove(self.id)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _listens(self) -> bool:
        """Whether this very process has taken all its ports, which it does when all models are loaded.

        To be answered on a port proves less: it may be another server's, and ours about to end because of that.
        """
        try:
            connections = psutil.Process(self.pid).net_connections("tcp")
        except psutil.Error:
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
            *tracing.options(self._traces),
        ]


def read(log: Path) -> str:
    """What a log says, or why it cannot be read: whatever sweeps the folder of temporary files ends no service."""
    try:
        return log.read_text(errors="replace")
    except OSError as error:
        return f"(its log cannot be read: {error})"


def shown_tail(log: str) -> str:
    """The end of a sentence: the last lines of a log, without the tables that Triton draws."""
    lines = [line for line in log.splitlines() if not line.startswith(("|", "+"))]
    return "\n".join(["; the end of its log:", *lines[-LOG_TAIL_LINES:]])


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
    """Three ports that nobody listens on now. Somebody may by the time Triton takes them: see _start_and_wait."""
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


def folder_of_links(release: Release) -> Path:
    """A new directory for one server alone, with links to the files of its models.

    Triton hangs for ever, without a word, if a path that it hands to its models contains a space: there is none in this
    one, whatever TMPDIR says. And its Python writes byte code beside the models whatever PYTHONDONTWRITEBYTECODE says,
    which would break the seal of the release: so the folders are ours, and only the files in them are links.
    """
    usual = tempfile.gettempdir()
    folder = Path(tempfile.mkdtemp(prefix="slipway-", dir="/tmp" if re.search(r"\s", usual) else usual))
    try:
        shutil.copytree(release.models, folder / MODELS, copy_function=os.symlink)
    except BaseException:
        shutil.rmtree(folder)
        raise
    return folder


def _environment(python: Path) -> dict[str, str]:
    """Our environment, with the models' Python first on PATH and nothing that could lead it elsewhere.

    COVERAGE_PROCESS_...: what coverage.py makes every Python below a measured one measure itself with.
    """
    variables = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "PYTHONHOME") and not name.startswith("COVERAGE_PROCESS_")
    }
    variables["PATH"] = f"{python / 'bin'}{os.pathsep}{variables.get('PATH', os.defpath)}"
    return variables

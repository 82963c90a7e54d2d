"""One nginx process that runs the gateway, in a private folder of its own."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Self

import psutil

from deploy.gateway.settings import HERE, Settings
from scripts import programs
from serve import tether
from serve.server import PortTaken
from slipway.errors import SlipwayError

START_SECONDS = 30
# A little longer than nginx gives requests in flight (worker_shutdown_timeout in the template).
STOP_SECONDS = 15


class GatewayFailure(SlipwayError):
    """nginx is missing, refuses its configuration, or has ended."""


class Gateway:
    """nginx, started; `with` stops it. `address` is host:port.

    Raises:
        PortTaken: somebody else listens where it should.
        GatewayFailure: nginx is missing, or says what it lacks, for example a certificate or the file of keys.
    """

    def __init__(self, settings: Settings) -> None:
        program = shutil.which("nginx", path=programs.SEARCHED)
        if program is None:
            raise GatewayFailure("nginx is missing; `make programs` installs it, on Debian and as root")
        self.address = settings.listen
        self._raise_if_taken()
        # nginx's workers give up root, and have to reach the page whoever may look into our checkout.
        self.folder = Path(tempfile.mkdtemp(prefix="slipway-gateway-"))
        try:
            configuration = self.folder / "nginx.conf"
            shutil.copy(HERE / "gateway.js", self.folder)
            shutil.copytree(HERE / "page", self.folder / "page")
            for path in (self.folder, *self.folder.rglob("*")):
                path.chmod(0o755 if path.is_dir() else 0o644)
            configuration.write_text(settings.render(self.folder, self.folder))
            self._command = [program, "-e", "stderr", "-c", str(configuration), "-g", "daemon off;"]
            self.check()
            # Whatever kills us asks it to end; a kill would end its master alone, and its workers would go on.
            command = tether.command(Path(program), *self._command[1:], signal_number=signal.SIGTERM)
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
            self._wait_until_it_listens()
        except BaseException:
            self.stop()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        return self._process.pid

    def check(self) -> None:
        """Raises GatewayFailure if nginx would not take its configuration, or a file that it names."""
        done = subprocess.run([*self._command, "-t"], capture_output=True, text=True, check=False)
        if done.returncode:
            raise GatewayFailure(f"nginx does not take its configuration:\n{done.stderr.strip()}")

    def reload(self) -> None:
        """Read keys and certificate again, without closing a connection on a request that is being answered."""
        self.check()
        self._process.send_signal(signal.SIGHUP)

    def wait(self) -> None:
        """Until it ends. Raises GatewayFailure then."""
        status = self._process.wait()
        raise GatewayFailure(f"nginx ended by itself with status {status}; what it says stands above")

    def stop(self) -> None:
        """Take no new connection, let requests in flight be answered, and end; leave nothing behind."""
        process = getattr(self, "_process", None)
        try:
            if process is not None:
                process.send_signal(signal.SIGQUIT)
                process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            pass  # it had its time
        finally:
            if process is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            shutil.rmtree(self.folder, ignore_errors=True)

    def _raise_if_taken(self) -> None:
        """nginx itself would try for seconds, and until then whoever listens there would be taken for it."""
        host, port = self.address.rsplit(":", 1)
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, int(port)))
            except OSError as error:
                raise PortTaken(f"the gateway cannot listen on {self.address} ({error.strerror})") from error

    def _wait_until_it_listens(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not self._listens():
            if (status := self._process.poll()) is not None:
                self._raise_if_taken()  # somebody else was faster, after all
                raise GatewayFailure(f"nginx ended with status {status} instead of starting")
            if time.monotonic() > deadline:
                raise GatewayFailure(f"nginx does not listen on {self.address}")
            time.sleep(0.02)

    def _listens(self) -> bool:
        """Whether this very process does: to be answered there proves less."""
        port = int(self.address.rsplit(":", 1)[1])
        try:
            connections = psutil.Process(self.pid).net_connections("tcp")
        except psutil.Error:
            return False
        return any(one.status == psutil.CONN_LISTEN and one.laddr.port == port for one in connections)

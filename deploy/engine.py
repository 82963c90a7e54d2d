"""A container engine for as long as a `with` block lasts: the one that runs here, or a private one.

    with engine.running() as host, engine.client(host) as client:
        ...    # Compose and docker's own command line take `host` as DOCKER_HOST

A private engine is Debian's dockerd in a folder, a mount namespace and a process namespace of its own. With its first
process the kernel ends all others, containers too, and takes back every mount; nothing of it outlives this process,
however that ends. In the network it is alone with what it makes: no rule of the firewall and no bridge is touched. A
container reaches others on a network that was made for it, and is reached on published ports; only
`network_mode="host"`, also of a build, leads out.
"""

import contextlib
import os
import re
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import docker
import psutil

from scripts import programs
from serve import tether
from slipway import files
from slipway.errors import SlipwayError

USUAL_SOCKET = Path("/var/run/docker.sock")
CGROUPS = Path("/sys/fs/cgroup")
CGROUP_DRIVER = "cgroupfs"
PREFIX = "slipway-engine-"
LOCK = "lock"
START_SECONDS = 60
LOG_TAIL_LINES = 5
NEEDED = ("dockerd", "unshare", "ip")


class NoEngine(SlipwayError):
    """There is no container engine here, and none can be started: the message says why."""


@contextmanager
def running() -> Iterator[str]:
    """The address of a container engine, as DOCKER_HOST wants it.

    It is what DOCKER_HOST names, or what listens on Docker's usual socket, or else a private one. What a caller leaves
    behind stays in the first two.

    Raises NoEngine.
    """
    if (host := existing()) is not None:
        yield host
    else:
        with private() as host:
            yield host


def existing() -> str | None:
    """The address of an engine that runs already, if there is one.

    Raises NoEngine if DOCKER_HOST names one that does not answer, or the usual one is for others only.
    """
    if host := os.environ.get("DOCKER_HOST"):
        if (problem := _silence_of(host)) is not None:
            raise NoEngine(f"DOCKER_HOST is {host}, and no container engine answers there: {problem}")
        return host
    if not USUAL_SOCKET.exists():
        return None
    if not os.access(USUAL_SOCKET, os.W_OK):
        raise NoEngine(
            f"{USUAL_SOCKET}: you may not use the container engine that runs here; become a member of the group with "
            f"the id {USUAL_SOCKET.stat().st_gid}"
        )
    usual = f"unix://{USUAL_SOCKET}"
    return usual if _silence_of(usual) is None else None


@contextmanager
def private() -> Iterator[str]:
    """The address of an engine that nobody else uses, and that is gone afterwards with everything in it.

    Raises NoEngine: a program is missing, this is not Linux or not root, or the kernel does not let it.
    """
    programs_found = _programs()
    remove_abandoned()
    # Directly below /tmp, because the path of a socket has at most 107 bytes.
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir="/tmp"))
    with _owned(folder):
        process = _start(folder, *programs_found)
        host = f"unix://{folder / 'socket'}"
        try:
            _wait_until_it_answers(process, host, folder)
            yield host
        finally:
            _stop(process)


def client(host: str) -> contextlib.closing[docker.DockerClient]:
    """Docker's own client for an engine, as a context manager. Raises DockerException if none answers there."""
    return contextlib.closing(docker.DockerClient(base_url=host))


@contextmanager
def _owned(folder: Path) -> Iterator[None]:
    """The folder of an engine is locked for as long as its caller lives, and removed in the end."""
    with files.owned(folder / LOCK):
        try:
            yield
        finally:
            _remove(folder)


def remove_abandoned() -> None:
    """Remove what engines have left on the disk whose callers were killed; the kernel has ended the engines."""
    for lock in files.abandoned(Path("/tmp").glob(f"{PREFIX}*/{LOCK}")):
        with contextlib.suppress(OSError):  # in use after all
            _remove(lock.parent)


def _programs() -> tuple[Path, Path]:
    """Where dockerd and unshare are, if they may be run."""
    found = {name: shutil.which(name, path=programs.SEARCHED) for name in NEEDED}
    if missing := [name for name, path in found.items() if path is None]:
        raise NoEngine(
            f"no container engine runs here, and to start one {', '.join(missing)} was not found; on Debian "
            "`make programs` installs it"
        )
    if os.geteuid() != 0:
        raise NoEngine("no container engine runs here, and only root can start one")
    return Path(str(found["dockerd"])), Path(str(found["unshare"]))


def _start(folder: Path, dockerd: Path, unshare: Path) -> "subprocess.Popen[bytes]":
    namespaces = ["--mount", "--pid", "--fork", "--mount-proc", "--kill-child"]
    options = [
        f"--data-root={folder / 'root'}",
        f"--exec-root={folder / 'exec'}",
        f"--pidfile={folder / 'pid'}",
        f"--host=unix://{folder / 'socket'}",
        "--bridge=none",
        "--iptables=false",
        "--ip6tables=false",
        "--ip-masq=false",
        "--ip-forward=false",
        # What is usual, -500, takes a capability that root need not have.
        "--oom-score-adjust=0",
        f"--exec-opt=native.cgroupdriver={CGROUP_DRIVER}",
        f"--cgroup-parent=/{folder.name}",
    ]
    with (folder / "log").open("wb") as output:
        return subprocess.Popen(
            tether.command(unshare, *namespaces, str(dockerd), *options),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            # Ctrl-C reaches only us.
            start_new_session=True,
        )


def _wait_until_it_answers(process: "subprocess.Popen[bytes]", host: str, folder: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while (problem := _silence_of(host)) is not None:
        ended = process.poll() is not None
        if ended or time.monotonic() > deadline:
            what = "ended by itself" if ended else f"did not answer within {START_SECONDS} s ({problem})"
            tail = "\n".join((folder / "log").read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:])
            raise NoEngine(f"a private container engine was started and {what}; the end of its log:\n{tail}")
        time.sleep(0.1)


def _stop(process: "subprocess.Popen[bytes]") -> None:
    """End it with all that it runs, and return when every process of it has gone."""
    # The first process of the namespace. `unshare` ends after it, and it after all others.
    if process.poll() is None:
        unshare = psutil.Process(process.pid)
        for first in unshare.children() or [unshare]:
            first.kill()
    process.wait()


def _remove(folder: Path) -> None:
    """What lies on the disk, and what the kernel was asked for that belongs to no namespace: groups and bridges."""
    for parent in [CGROUPS / folder.name, *CGROUPS.glob(f"*/{folder.name}")]:
        for group in [*sorted(parent.rglob("*/"), reverse=True), parent]:
            with contextlib.suppress(OSError):
                group.rmdir()
    with contextlib.suppress(OSError):  # it had no time to make any network
        networks = (folder / "root" / "network" / "files" / "local-kv.db").read_bytes()
        for bridge in {name.decode() for name in _BRIDGE.findall(networks)}:
            if (Path("/sys/class/net") / bridge).exists():
                subprocess.run(["ip", "link", "delete", bridge], check=False)
    shutil.rmtree(folder)


_BRIDGE = re.compile(rb"\bbr-[0-9a-f]{12}\b")


def _silence_of(host: str) -> str | None:
    """Why no engine answers at an address; None if one does."""
    try:
        if host.startswith("unix://"):
            # Docker's client would leave a socket open that it cannot connect.
            with contextlib.closing(socket.socket(socket.AF_UNIX)) as probe:
                probe.connect(host.removeprefix("unix://"))
        with client(host) as asking:
            asking.ping()
    except (docker.errors.DockerException, OSError) as error:
        return str(error)
    return None

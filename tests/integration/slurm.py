"""A SLURM cluster of two nodes on this machine, with daemons, keys, ports and folders of its own.

What ends processes on a real cluster, a plugin for cgroups, is replaced by one that follows parents: it also sends
every signal to all processes of a job, where the other one sends it to the launcher alone.
"""

import contextlib
import getpass
import os
import secrets
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil

from scripts import programs
from tests.integration.ports import free_ports

DEADLINE_SECONDS = 480
NODES = ("n1", "n2")
CONFIGURATION = """
ClusterName=slipway
SlurmctldHost=localhost(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={directory}/munge.socket
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool-%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd-%n.pid
SlurmctldPort={controller}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
MpiDefault=none
JobRequeue=1
# By default it gives up on whatever does not answer within seconds.
MessageTimeout=60
TCPTimeout=30
BatchStartTimeout=120
UnkillableStepTimeout=600
NodeName=n1 NodeHostname=localhost NodeAddr=127.0.0.1 Port={first} CPUs=1 State=UNKNOWN
NodeName=n2 NodeHostname=localhost NodeAddr=127.0.0.1 Port={second} CPUs=1 State=UNKNOWN
PartitionName=all Nodes=n[1-2] Default=YES State=UP
"""


class Cluster:
    """Its commands, and what they say."""

    def __init__(self, directory: Path) -> None:
        self.variables = {
            **os.environ,
            "SLURM_CONF": str(directory / "slurm.conf"),
            "PATH": programs.SEARCHED,
        }
        self._pending_since: dict[tuple[str, str], float] = {}

    def submit(
        self, script: Path, options: Sequence[str], variables: Mapping[str, str], *arguments: str
    ) -> str:
        """Put a job into the queue; returns its number."""
        command = ["sbatch", "--parsable", *options, str(script), *arguments]
        return self.ask(*command, variables=variables).strip()

    def job(self, number: str) -> dict[str, str]:
        """What SLURM knows of a job, such as JobState, Restarts, ExitCode."""
        text = self.ask("scontrol", "show", "job", "--oneliner", number)
        return dict(field.partition("=")[::2] for field in text.split() if "=" in field)

    def wait_for_start(self, number: str, restarts: int) -> None:
        """Until a job runs that was started again so many times."""
        wait_until(
            lambda: (
                (job := self._hurried(number))["Restarts"] == str(restarts) and job["JobState"] == "RUNNING"
            ),
            f"job {number} to start again",
        )

    def wait_for_end(self, number: str) -> dict[str, str]:
        """Until a job has ended for good."""
        wait_until(
            lambda: (
                self._hurried(number)["JobState"]
                in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
            ),
            f"job {number} to end",
        )
        return self.job(number)

    def _hurried(self, number: str) -> dict[str, str]:
        """What SLURM knows of a job. It lets one that was requeued wait for two minutes; here it starts in seconds.

        Not at once: nodes tell the credentials of its starts apart by the second.
        """
        job = self.job(number)
        if job["JobState"] == "PENDING" and job["Restarts"] != "0":
            since = self._pending_since.setdefault((number, job["Restarts"]), time.monotonic())
            if time.monotonic() - since > 2:
                # Without a look at the result: it may have started in between.
                self.call("scontrol", "update", f"JobId={number}", "StartTime=now")
        return job

    def ask(self, *command: str, variables: Mapping[str, str] | None = None) -> str:
        done = self.call(*command, variables=variables)
        assert done.returncode == 0, f"{' '.join(command)}: {done.stdout}{done.stderr}"
        return done.stdout

    def call(
        self, *command: str, variables: Mapping[str, str] | None = None
    ) -> "subprocess.CompletedProcess[str]":
        environment = {**self.variables, **(variables or {})}
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False, timeout=DEADLINE_SECONDS
        )


@contextmanager
def running_cluster() -> Iterator[Cluster]:
    """Inside, both nodes are idle; afterwards nothing is left, of jobs neither."""
    # Not pytest's folder: the path of a socket may have 107 characters, and SLURM knows no spaces.
    directory = Path(tempfile.mkdtemp(prefix="slurm-"))
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, directory)
        cluster = Cluster(directory)
        daemons: list[subprocess.Popen[bytes]] = []
        stack.callback(_end_all, directory, daemons)
        _configure(directory)
        daemons.append(_start(cluster, directory, "munged", *_munge_options(directory)))
        wait_until((directory / "munge.socket").exists, "munged to start", _log(directory))
        daemons.append(_start(cluster, directory, "slurmctld", "-D"))
        daemons += [_start(cluster, directory, "slurmd", "-D", "-N", node) for node in NODES]
        wait_until(lambda: _idle_nodes(cluster) == len(NODES), "both nodes to be idle", _log(directory))
        yield cluster


def wait_until(condition: Callable[[], bool], what: str, explain: Callable[[], str] = str) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}\n{explain()}"
        time.sleep(0.1)


def _configure(directory: Path) -> None:
    (directory / "munge.key").write_bytes(secrets.token_bytes(128))
    (directory / "munge.key").chmod(0o400)
    for folder in ("state", *(f"spool-{node}" for node in NODES)):
        (directory / folder).mkdir()
    controller, first, second = free_ports(3)
    text = CONFIGURATION.format(
        user=getpass.getuser(), directory=directory, controller=controller, first=first, second=second
    )
    (directory / "slurm.conf").write_text(text, encoding="utf-8")


def _munge_options(directory: Path) -> list[str]:
    # By force, because anybody may write into the folder above ours.
    files = {"socket": "socket", "key-file": "key", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
    paths = [f"--{option}={directory}/munge.{suffix}" for option, suffix in files.items()]
    return ["--foreground", "--force", "--num-threads=1", *paths]


def _start(cluster: Cluster, directory: Path, *command: str) -> "subprocess.Popen[bytes]":
    with (directory / "daemons.out").open("a") as log:
        return subprocess.Popen(
            command,
            env=cluster.variables,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def _idle_nodes(cluster: Cluster) -> int:
    return cluster.call("sinfo", "--noheader", "--Node", "--format=%T").stdout.split().count("idle")


def _log(directory: Path) -> Callable[[], str]:
    return (directory / "daemons.out").read_text


def _end_all(directory: Path, daemons: "list[subprocess.Popen[bytes]]") -> None:
    """Kill every daemon, step and task."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while ours := list(_processes_of(directory)):
        assert time.monotonic() < deadline, f"{ours} cannot be killed"
        for process in ours:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        for daemon in daemons:
            daemon.wait()


def _processes_of(directory: Path) -> Iterator[psutil.Process]:
    """All have inherited where the configuration is; but a step writes its title over that, and listens here."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            sockets = process.net_connections("unix")
            if process.environ().get("SLURM_CONF") == str(directory / "slurm.conf") or any(
                str(each.laddr).startswith(f"{directory}/") for each in sockets
            ):
                yield process

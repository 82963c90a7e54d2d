"""What may happen to the machine that a service runs on: network, memory, disk and clock, under steady load.

    make chaos-serve    five rounds of each, with the times of recovery asserted

The service has a machine of its own, as far as the kernel can give it one: a network in which packets are lost, a small
/dev/shm, a small disk for temporary files, and a clock that jumps. It needs root.
"""

import itertools
import re
import signal
import struct
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from serve import shared_memory
from serve.client import CLIENTS
from serve.protocol import ServerFailure
from serve.release import Release
from tests import images
from tests.programs import cannot_run, require
from tests.serve.chaos import Disturbed, fault, probe_seconds, wait_until_steady
from tests.serve.line import Line
from tests.serve.load import Load
from tests.serve.service import up
from tests.serve.tools import PATIENCE, variant, wait_until

pytestmark = [pytest.mark.integration, pytest.mark.timeout(3600)]

LOSS = 0.05
DELAY_SECONDS = 0.1
# Shorter than what HAProxy waits for the rest of a request.
INTERRUPTION_SECONDS = 2
JUMP_SECONDS = 24 * 3600
CLOCK = Path(__file__).with_name("clock.c")
# As much shared memory as Docker gives. The disk has few inodes, so that they can be used up, too.
MACHINE = """
ip link set lo up
mount -t tmpfs -o size=64m tmpfs /dev/shm
mount -t tmpfs -o size=8m,nr_inodes=2000 tmpfs "$TMPDIR"
exec "$@"
"""
NEW_MACHINE = ["unshare", "--net", "--mount"]


class Machine(Disturbed):
    """A service that has it to itself."""

    @property
    def temporary(self) -> Path:
        return self._there(self.log.with_name("temporary"))

    @property
    def shared_memory(self) -> Path:
        return self._there(shared_memory.DIRECTORY)

    @property
    def ahead(self) -> Path:
        """Says by how much its clock is ahead of ours."""
        return self.log.with_name("ahead")

    def line(self, name: str, delay_seconds: float = 0.0) -> Line:
        return Line(self.urls[name], delay_seconds=delay_seconds, network=self.process.pid)

    def _there(self, path: Path) -> Path:
        """What is mounted there at a path, seen from here."""
        return Path(f"/proc/{self.process.pid}/root") / path.relative_to("/")


@pytest.fixture(scope="module")
def machine(release: Release, rounds: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    tried = subprocess.run([*NEW_MACHINE, "true"], check=False, capture_output=True, text=True)
    if tried.returncode != 0:
        cannot_run(f"a network and mounts of one's own cannot be had here: {tried.stderr.strip()}")
    require("cc", "ip", "iptables")
    folder = tmp_path_factory.mktemp("machine")
    variant(release, folder / "releases" / "tiny-1", lambda _: None)
    (folder / "current").symlink_to(folder / "releases" / "tiny-1")
    (folder / "temporary").mkdir()
    set_clock(folder / "ahead", 0)
    clock = folder / "clock.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", "-o", clock, CLOCK], check=True)
    variables = [f"TMPDIR={folder / 'temporary'}", f"LD_PRELOAD={clock}", f"AHEAD={folder / 'ahead'}"]
    within = ["env", *variables, *NEW_MACHINE, "sh", "-ec", MACHINE, "sh"]
    with up(folder, folder / "log", probe_seconds(rounds), within) as service, ExitStack() as stack:
        lines = {name: Line(service.urls[name], network=service.process.pid) for name in CLIENTS}
        urls = {name: stack.enter_context(line).url for name, line in lines.items()}
        load = stack.enter_context(Load(urls, labels(release)))
        yield Machine(**vars(service), load=load, rounds=rounds)
        assert not load.wrong


def labels(release: Release) -> dict[str, list[str]]:
    return {release.identity: [str(k) for k in range(len(images.COLOURS))]}


def set_clock(file: Path, seconds: int) -> None:
    """Let the machine's clock be so far ahead of ours. The file stays the same: everybody has mapped it."""
    with file.open("wb" if not file.exists() else "r+b", buffering=0) as content:
        content.write(struct.pack("=q", seconds))


@contextmanager
def losing_packets(machine: Machine, share: float = 1.0) -> Iterator[None]:
    """Between clients and the service, in both directions."""
    rules = ["nsenter", "--target", str(machine.process.pid), "--net", "iptables"]
    ports = ",".join(machine.urls[name].split(":")[1] for name in CLIENTS)
    which = ["-p", "tcp", "-m", "multiport", "--ports", ports]
    at_random = ["-m", "statistic", "--mode", "random", "--probability", str(share)] if share < 1 else []
    subprocess.run([*rules, "-A", "INPUT", *which, *at_random, "-j", "DROP"], check=True)
    try:
        yield
    finally:
        subprocess.run([*rules, "-F", "INPUT"], check=True)


@contextmanager
def no_room_in(folder: Path, *, names: bool = False) -> Iterator[None]:
    """Not for a byte; nor, with `names`, for an empty file."""
    filler = folder / "filler"
    filler.mkdir()
    try:
        with suppress(OSError), (filler / "bytes").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(2**12))
        with suppress(OSError):
            for k in itertools.count() if names else ():
                (filler / str(k)).touch()
        yield
    finally:
        for path in filler.iterdir():
            path.unlink()
        filler.rmdir()


def test_packets_are_lost_and_no_answer_is(machine: Machine) -> None:
    """Objective: no error where one packet in twenty is lost."""
    for _ in range(machine.rounds):
        with fault(machine, "packets lost", errors_allowed=False), losing_packets(machine, LOSS):
            start = time.monotonic()
            wait_until(lambda: machine.load.all_well_since(start))  # noqa: B023


def test_an_interrupted_network_delays_answers_and_loses_none(machine: Machine) -> None:
    """Objective: no error over two seconds without a network."""
    for _ in range(machine.rounds):
        with fault(machine, "network interrupted", errors_allowed=False), losing_packets(machine):
            time.sleep(INTERRUPTION_SECONDS)


def test_clients_that_are_far_away_are_answered_like_others(machine: Machine, release: Release) -> None:
    """Objective: no error with 100 ms each way."""
    with ExitStack() as stack, fault(machine, "far away", errors_allowed=False):
        urls = {name: stack.enter_context(machine.line(name, DELAY_SECONDS)).url for name in CLIENTS}
        distant = stack.enter_context(Load(urls, labels(release)))
        wait_until(lambda: distant.all_well_since(0, answers=4 * machine.rounds))
        assert not distant.errors_since(0)
        assert not distant.wrong


def test_without_shared_memory_nobody_but_who_needs_more_gets_an_error(machine: Machine) -> None:
    """Case D06. Objective: no error for requests like those before; more than ever is refused in words."""
    large = [images.encode(images.noise(k, 1000, 1000), compress_level=1) for k in range(8)]
    for _ in range(machine.rounds):
        with (
            fault(machine, "no shared memory", errors_allowed=False),
            no_room_in(machine.shared_memory),
        ):
            start = time.monotonic()
            for name in CLIENTS:
                with (
                    machine.line(name) as line,
                    CLIENTS[name](line.url, deadline_seconds=PATIENCE) as client,
                    pytest.raises(ServerFailure, match="--shm-size"),
                ):
                    client.classify(large)
            wait_until(lambda: machine.load.all_well_since(start))  # noqa: B023


def test_a_server_that_dies_when_there_is_no_room_is_replaced_when_there_is(machine: Machine) -> None:
    """Objective: typed errors until there is room again, and then as after any death."""
    for _ in range(machine.rounds):
        wait_until_steady(machine)
        with (
            fault(machine, "SIGKILL without disk", errors_allowed=True, lasts=True),
            no_room_in(machine.temporary, names=True),
        ):
            before = machine.replacements
            psutil.Process(machine.server).send_signal(signal.SIGKILL)
            wait_until(lambda: machine.replacements > before + 1)  # noqa: B023
        if machine.strict:
            wait_until_steady(machine)
            with (
                fault(machine, "SIGKILL without shared memory", errors_allowed=True, lasts=True),
                no_room_in(machine.shared_memory),
            ):
                before = machine.replacements
                psutil.Process(machine.server).send_signal(signal.SIGKILL)
                # Not that the next start fails, too: what the dead one leaves may be room enough.
                wait_until(lambda: machine.replacements > before)  # noqa: B023


def test_a_clock_that_jumps_changes_nothing(machine: Machine) -> None:
    """Objective: no error, and nothing is taken for dead, a day ahead and back again."""
    for process in machine.processes():
        assert "clock.so" in Path(f"/proc/{process.pid}/maps").read_text(), process
    before = machine.replacements
    for _ in range(machine.rounds):
        for seconds in (JUMP_SECONDS, 0):
            with fault(machine, f"clock {seconds:+} s", errors_allowed=False):
                set_clock(machine.ahead, seconds)
                wait_until(lambda: abs(ahead(machine) - seconds) < JUMP_SECONDS / 2)  # noqa: B023
    assert machine.replacements == before


def ahead(machine: Machine) -> float:
    """How many seconds the clock was ahead of ours when a golden image was last answered well."""
    with (
        machine.line("metrics") as line,
        urllib.request.urlopen(f"http://{line.url}/metrics/service", timeout=PATIENCE) as response,
    ):
        text = response.read().decode()
    assert "slipway_golden_probe_good 1" in text
    probed = re.search(r"^slipway_golden_probe_timestamp_seconds (\S+)", text, re.MULTILINE)
    assert probed
    return float(probed[1]) - time.time()

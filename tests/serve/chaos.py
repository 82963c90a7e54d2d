"""Faults that a service under load gets over, and what is asserted of each: the tests of chaos share it."""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import psutil

from serve.supervisor import STEADY_SECONDS
from tests.serve.load import Load
from tests.serve.service import Service
from tests.serve.tools import wait_until

# Where times are asserted, and where a machine may be too busy with other things to answer within one.
STRICT_PROBE_SECONDS = 2.0
PROBE_SECONDS = 10.0
# How long clients may see errors, at most, where times are asserted: two to find out, the rest to start a server.
RECOVERY_PERIODS = 5


def probe_seconds(rounds: int) -> float:
    return STRICT_PROBE_SECONDS if rounds > 1 else PROBE_SECONDS


@dataclass
class Disturbed(Service):
    """A service, and the load on it. rounds: how often it meets each fault."""

    load: Load
    rounds: int

    @property
    def strict(self) -> bool:
        """Whether times are asserted."""
        return self.rounds > 1


@contextmanager
def fault(service: Disturbed, name: str, *, errors_allowed: bool, lasts: bool = False) -> Iterator[None]:
    """Something that the service gets over: in the end every client is answered again.

    lasts: until the block ends; the time to recover begins then.
    """
    wait_until(lambda: service.settled and service.load.all_well_since(0))
    start = time.monotonic()
    yield
    done = time.monotonic()
    wait_until(lambda: service.load.all_well_since(done))
    seen = service.load.errors_since(start)
    seconds = service.load.seconds_of_errors(done if lasts else start)
    print(f"\n{name}: errors for {seconds:.1f} s, {dict(seen) or 'none'}", end="")
    assert not service.load.wrong
    assert errors_allowed or not seen
    assert not service.strict or seconds <= RECOVERY_PERIODS * service.probe_seconds


def wait_until_steady(service: Disturbed) -> None:
    """Where times are asserted: a server that dies sooner is in a crash loop, and the next one is to come later."""
    well = time.monotonic()
    wait_until(lambda: not service.strict or time.monotonic() > well + STEADY_SECONDS)


def found_after(service: Disturbed, victim: psutil.Process, kind: signal.Signals) -> float:
    """Send a signal; return the seconds until the supervisor has noticed, when the server has been replaced."""
    replaced, before = service.server, service.replacements
    start = time.monotonic()
    victim.send_signal(kind)
    wait_until(lambda: service.replacements > before)
    seconds = time.monotonic() - start
    wait_until(lambda: service.server != replaced)
    return seconds

"""Being told to stop: by a scheduler that takes the machine back, or by a person.

SIGTERM or SIGUSR1 to any rank makes all ranks save after the step they are in and exit with code 75, which means
"run me again": the next start continues exactly there. A second SIGTERM ends the process at once; SIGUSR1 may come any
number of times, since a scheduler may send it to the ranks and to their launcher, which passes it on (train.torchrun).
"""

import math
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from slipway.errors import SlipwayError

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class Preempted(SlipwayError):
    """Training was asked to stop and has saved its state."""

    exit_code = os.EX_TEMPFAIL


class StopRequest:
    """Whether this rank was asked to stop, and when. Ranks agree on it by summing over all of them."""

    def __init__(self) -> None:
        self.received: int | None = None
        self._since = math.inf

    def receive(self, number: int, _frame: FrameType | None) -> None:
        if number == self.received == signal.SIGTERM:
            os._exit(128 + number)
        self.received = number
        self._since = min(self._since, time.monotonic())

    @property
    def seconds_ago(self) -> float:
        """How long it is since this rank was asked first; 0 if it was not."""
        return max(0.0, time.monotonic() - self._since)


@contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Inside, a wish to stop is only noted down."""
    request = StopRequest()
    before = {number: signal.signal(number, request.receive) for number in SIGNALS}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def leave_process_group() -> None:
    """For loader workers: a signal to the whole group must not end them before the step that needs them.

    They do not ignore it, because it is also how the trainer ends them.
    """
    os.setpgid(0, 0)

"""Being told to stop: by a scheduler that takes the machine back, or by a person.

SIGTERM or SIGUSR1 to any rank makes all ranks save after the step they are in and exit with code 75, which means
"run me again": the next start continues exactly there. Outside of training there is nothing to save, and what was under
way is given up. A second SIGTERM ends the process at once; SIGUSR1 may come any number of times, since a scheduler may
send it to the ranks and to their launcher, which passes it on (train.torchrun).
"""

import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from slipway.errors import SlipwayError

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class Preempted(SlipwayError):
    """This process was asked to stop, and has saved what there was to save."""

    exit_code = os.EX_TEMPFAIL


class _Unwound(BaseException):
    """Not an Exception, which libraries catch to go on without what failed."""


class StopRequest:
    """Whether this rank was asked to stop, and when. Ranks agree on it by summing over all of them."""

    def __init__(self) -> None:
        self.received: int | None = None
        self._terminated = False
        self._since = math.inf

    def receive(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGTERM:
            if self._terminated:
                os._exit(128 + number)
            self._terminated = True
        self.received = number
        self._since = min(self._since, time.monotonic())

    @property
    def seconds_ago(self) -> float:
        """How long it is since this rank was asked first; 0 if it was not."""
        return max(0.0, time.monotonic() - self._since)


class _EndRequest(StopRequest):
    """The first one ends what the process is doing."""

    def receive(self, number: int, frame: FrameType | None) -> None:
        is_first = self.received is None
        super().receive(number, frame)
        if is_first:
            raise _Unwound


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Inside, a wish to stop ends everything but training, which notes it down. Raises Preempted."""
    try:
        with _handled_by(_EndRequest().receive):
            yield
    except _Unwound:
        raise Preempted("stopped by a signal; run it again") from None


@contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Inside, a wish to stop is only noted down."""
    request = StopRequest()
    with _handled_by(request.receive):
        yield request


@contextmanager
def ended_at_once() -> Iterator[None]:
    """Inside, a signal ends the process with a code of its own: while PyTorch waits, Python hears of none."""
    with _handled_by(signal.SIG_DFL):
        yield


@contextmanager
def _handled_by(handler: Callable[[int, FrameType | None], None] | signal.Handlers) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number in SIGNALS}
    try:
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)


def obey_the_trainer_alone() -> None:
    """For loader workers: a signal to all processes must not end them before the step that needs them.

    They do not ignore SIGTERM, because it is also how the trainer ends them; from others it does nothing.
    """
    os.setpgid(0, 0)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(target=_end_with_the_trainer, args=[os.getppid()], daemon=True).start()


def _end_with_the_trainer(trainer: int) -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != trainer:
        pass
    os._exit(os.EX_OK)

"""Ask a server about golden images: as fast as it answers, or at a given rate whether it answers or not."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Barrier, BrokenBarrierError
from typing import Any

import numpy as np
import numpy.typing as npt

from serve.release import Release

# An encoded image -> its probabilities, [classes].
Ask = Callable[[bytes], npt.NDArray[Any]]
# Opens a connection of its own, for one thread.
Connect = Callable[[], AbstractContextManager[Ask]]

# Of an open loop: enough that requests do not wait for one another on our side at any rate below the capacity.
CONNECTIONS = 64


@dataclass(frozen=True, kw_only=True)
class Tail:
    """Latencies in milliseconds, each from the moment at which its request was due, at `rate` requests a second."""

    rate: float
    p50: float
    p99: float


def closed_loop(connect: Connect, release: Release, clients: int, seconds: float) -> float:
    """Images a second, answered rightly, to clients of which each asks again as soon as it was answered.

    Each counts for as long as it really took: what many clients still wait for at the end is much of all that they ask.
    """

    def client(_number: int) -> float:
        count, start = 0, time.perf_counter()
        with connect() as ask:
            while time.perf_counter() < start + seconds:
                ask_about(ask, release, count)
                count += 1
        return count / (time.perf_counter() - start)

    with ThreadPoolExecutor(clients) as threads:
        return sum(threads.map(client, range(clients)))


def open_loop(connect: Connect, release: Release, rate: float, seconds: float) -> Tail:
    """`rate` requests a second for so many seconds, evenly spread, whether those before were answered or not.

    None of them has to connect: each client has been answered once before.
    """
    due: SimpleQueue[float | None] = SimpleQueue()

    def begin() -> None:
        start = time.perf_counter()
        for number in range(max(2, int(rate * seconds))):
            due.put(start + number / rate)
        for _ in range(CONNECTIONS):
            due.put(None)

    connected = Barrier(CONNECTIONS, begin)

    def client(number: int) -> list[float]:
        latencies: list[float] = []
        with connect() as ask:
            try:
                ask_about(ask, release, number)
            except BaseException:
                connected.abort()  # or the others would wait for us
                raise
            try:
                connected.wait()
            except BrokenBarrierError:
                return latencies  # one of the others has ended the benchmark, and says why
            while (moment := due.get()) is not None:
                time.sleep(max(0.0, moment - time.perf_counter()))
                ask_about(ask, release, number + len(latencies))
                latencies.append(1000 * (time.perf_counter() - moment))
        return latencies

    with ThreadPoolExecutor(CONNECTIONS) as threads:
        parts: Sequence[list[float]] = list(threads.map(client, range(CONNECTIONS)))
    latencies = np.concatenate([np.array(part) for part in parts])
    p50, p99 = np.percentile(latencies, [50, 99])
    return Tail(rate=rate, p50=float(p50), p99=float(p99))


def ask_about(ask: Ask, release: Release, number: int) -> None:
    """Ends the benchmark if an answer is wrong: nothing is worth measuring then."""
    golden = release.golden[number % len(release.golden)]
    difference = np.abs(ask(golden.image) - golden.probabilities).max()
    if not difference <= release.tolerance:
        raise SystemExit(f"a golden image was answered wrongly: probabilities differ by {difference:.2g}")

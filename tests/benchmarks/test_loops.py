"""What a benchmark counts, by a clock that only stands still or is moved on."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from benchmarks import loops
from benchmarks.loops import Ask
from serve.release import GoldenAnswer, Release
from slipway.contract import Preprocessing, Signature

ANSWER_SECONDS = 1.0


class Clock:
    """In place of the module `time`."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Server:
    """Answers after a second, and notes what it was asked, each time on the connection that was made first."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.asked: list[bytes] = []
        self.open_connections = 0
        self.wrong = False

    def connect(self) -> AbstractContextManager[Ask]:
        @contextmanager
        def connection() -> Iterator[Ask]:
            self.open_connections += 1
            yield self._answer
            self.open_connections -= 1

        return connection()

    def _answer(self, image: bytes) -> npt.NDArray[np.float64]:
        self._clock.sleep(ANSWER_SECONDS)
        self.asked.append(image)
        right = probabilities(image)
        return right[::-1] if self.wrong else right


def probabilities(image: bytes) -> npt.NDArray[np.float64]:
    return np.array([0.25, 0.75]) if image == b"a" else np.array([0.9, 0.1])


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(loops, "time", clock)
    monkeypatch.setattr(loops, "CONNECTIONS", 1)
    return clock


@pytest.fixture
def server(clock: Clock) -> Server:
    return Server(clock)


@pytest.fixture(scope="module")
def release() -> Release:
    """Of two golden images, a and b."""
    rules = Preprocessing(image_size=32, resize_size=36)
    return Release(
        directory=Path("releases/tiny-1"),
        name="tiny-1",
        identity="tiny/1@0123",
        version=1,
        target="embedded",
        artefact="onnx",
        tolerance=1e-4,
        bundle="",
        signature=Signature(
            name="tiny",
            classes=("x", "y"),
            preprocessing=rules,
            mean=(0.5, 0.5, 0.5),
            std=(0.2, 0.2, 0.2),
            max_batch=1,
        ),
        golden=tuple(
            GoldenAnswer(
                path=Path(name), image=name.encode(), label="x", probabilities=probabilities(name.encode())
            )
            for name in ("a", "b")
        ),
    )


def test_closed_loop_asks_about_all_images_in_turn_for_as_long_as_it_should(
    server: Server, release: Release
) -> None:
    """The answer to the last question comes late, and the rate is that of all."""
    seconds = 4.5 * ANSWER_SECONDS
    assert loops.closed_loop(server.connect, release, clients=1, seconds=seconds) == 1 / ANSWER_SECONDS
    assert server.asked == [b"a", b"b", b"a", b"b", b"a"]
    assert server.open_connections == 0


def test_latency_counts_from_when_a_request_was_due_not_from_when_it_was_sent(
    server: Server, release: Release
) -> None:
    """Two requests a second are due and one is answered: each waits half a second longer than the one before."""
    tail = loops.open_loop(server.connect, release, rate=2, seconds=2)
    latencies = [1000, 1500, 2000, 2500]
    assert len(server.asked) == 1 + len(latencies)  # the first connects
    assert (tail.rate, tail.p50, tail.p99) == (2, *np.percentile(latencies, [50, 99]))


def test_wrong_answer_ends_the_benchmark(server: Server, release: Release) -> None:
    server.wrong = True
    with pytest.raises(SystemExit, match=r"was answered wrongly: probabilities differ by 0\.5"):
        loops.closed_loop(server.connect, release, clients=1, seconds=5)
    assert len(server.asked) == 1


def test_wrong_answer_ends_the_open_loop_for_all_of_its_clients(
    server: Server, release: Release, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that are connected wait for the others."""
    monkeypatch.setattr(loops, "CONNECTIONS", 3)
    server.wrong = True
    with pytest.raises(SystemExit, match="was answered wrongly"):
        loops.open_loop(server.connect, release, rate=2, seconds=2)

"""Whatever happens to the server, another one takes its place, behind the same address."""

import os
import re
import signal
import time
from collections.abc import Callable, Iterator

import pytest

from serve import health
from serve import server as servers
from serve import supervisor as supervisors
from serve.client import CLIENTS, DeadlineExceeded, Overloaded
from serve.front import Front
from serve.health import WrongAnswer
from serve.release import Release
from serve.server import Server, ServerError, free_ports
from serve.supervisor import FAILED_PROBES, Serving, Supervisor, pause_before
from tests import images
from tests.serve.tools import model_processes, still_running, wait_until

pytestmark = pytest.mark.integration

# Far more than anything here takes, in seconds.
PATIENCE = 120
# So long that no probe comes by itself.
PROBE_SECONDS = 600.0


def step_until(supervisor: Supervisor, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        supervisor.step()
        time.sleep(0.02)


def label_of_5(front: Front) -> set[str]:
    """Over both protocols."""
    labels = set()
    for protocol in CLIENTS:
        with CLIENTS[protocol](getattr(front, protocol)) as client:
            labels.add(client.classify([images.flat(5)])[0].label)
    return labels


@pytest.fixture(scope="module")
def everything(release: Release) -> Iterator[tuple[Supervisor, Front]]:
    """One supervisor for all tests here; each leaves it with a server that is well."""
    front = Front(free_ports())
    supervisor = Supervisor(front, release.directory, PROBE_SECONDS)
    try:
        supervisor.start()
        yield supervisor, front
    finally:
        supervisor.stop()


@pytest.fixture
def supervisor(everything: tuple[Supervisor, Front]) -> Supervisor:
    supervisor, _ = everything
    supervisor._replacements_in_a_row = 0
    return supervisor


@pytest.fixture
def front(everything: tuple[Supervisor, Front]) -> Front:
    return everything[1]


def probe_now(supervisor: Supervisor) -> Serving:
    assert supervisor._serving is not None
    supervisor._serving.next_probe = 0
    return supervisor._serving


def test_a_server_that_stands_still_is_replaced_and_killed(
    supervisor: Supervisor, front: Front, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Cases D03 and D14. It cannot obey SIGTERM. `make chaos-serve` does the same to the processes of models."""
    monkeypatch.setattr(servers, "STOP_SECONDS", 0.5)
    sick = supervisor.server
    processes = [sick.pid, *model_processes(sick)]
    os.kill(sick.pid, signal.SIGSTOP)
    step_until(supervisor, lambda: supervisor.server is not sick)
    assert label_of_5(front) == {"5"}
    reason = next(text for text in caplog.messages if "replacement 1 in a row" in text)
    assert f"Triton (process {sick.pid}) is stopped; the end of its log:\n" in reason
    step_until(supervisor, lambda: not any(still_running(pid) for pid in processes))


def test_front_that_dies_is_started_again_on_the_same_ports(supervisor: Supervisor, front: Front) -> None:
    front._process.kill()
    front._process.wait()
    supervisor.step()
    assert label_of_5(front) == {"5"}


def test_wrong_answers_are_stopped_at_once(
    supervisor: Supervisor, front: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No request reaches a server that is known to answer wrongly, be there another one yet or not."""

    def lie(server: Server, deadline_seconds: float) -> None:
        raise WrongAnswer("the golden image was answered 'x'")

    liar = supervisor.server
    with monkeypatch.context() as patch:
        patch.setattr(Server, "probe", lie)
        probe_now(supervisor)
        supervisor.step()
    with CLIENTS["http"](front.http) as client, pytest.raises(Overloaded, match="no server is ready"):
        client.classify([images.flat(5)])
    step_until(supervisor, lambda: supervisor.server is not liar)
    assert label_of_5(front) == {"5"}


def test_a_busy_server_is_late_and_goes_on_and_a_wedged_one_does_not(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case D03: both miss the deadline of every probe, but only one of them answers other requests meanwhile."""
    answered = 1_000_000

    def late(server: Server, deadline_seconds: float) -> None:
        raise DeadlineExceeded("no answer")

    server = supervisor.server
    with monkeypatch.context() as patch:
        patch.setattr(Server, "probe", late)
        patch.setattr(health, "answered", lambda *_: answered)
        for _ in range(2 * FAILED_PROBES):
            answered += 1
            probe_now(supervisor)
            supervisor.step()
        assert not probe_now(supervisor).sick
        for _ in range(FAILED_PROBES):
            probe_now(supervisor)
            supervisor.step()
        assert probe_now(supervisor).sick
    step_until(supervisor, lambda: supervisor.server is not server)


def test_images_answered_are_counted(server: Server) -> None:
    before = health.answered(server.metrics, 30)
    with CLIENTS["grpc"](server.grpc) as client:
        client.classify([images.flat(1)] * 3)
    # Triton counts after it has answered.
    wait_until(lambda: health.answered(server.metrics, 30) >= before + 3)


def test_a_crash_loop_backs_off_says_why_each_time_and_never_gives_up(
    supervisor: Supervisor, front: Front, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> Server:
        raise ServerError("no memory is left")

    monkeypatch.setattr(supervisors, "FIRST_PAUSE_SECONDS", 0.01)
    dead = supervisor.server
    with monkeypatch.context() as patch:
        patch.setattr(servers, "start", fail)
        os.kill(dead.pid, signal.SIGKILL)
        step_until(supervisor, lambda: caplog.text.count("no memory is left") == 5)
    pauses = re.findall(r"starting another server in (\S+) s \(replacement (\d)", caplog.text)
    assert pauses == [("0", "1"), ("0.01", "2"), ("0.02", "3"), ("0.04", "4"), ("0.08", "5"), ("0.16", "6")]
    step_until(supervisor, lambda: supervisor.server is not dead)
    assert label_of_5(front) == {"5"}


@pytest.mark.parametrize(("replacement", "seconds"), [(1, 0), (2, 1), (3, 2), (7, 32), (8, 60), (10_000, 60)])
def test_pause_doubles_up_to_a_minute(replacement: int, seconds: float) -> None:
    assert pause_before(replacement) == seconds

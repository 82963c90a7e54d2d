"""Whatever happens to the server, another one takes its place, behind the same address."""

import errno
import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from serve import front as fronts
from serve import health, repository
from serve import server as servers
from serve import supervisor as supervisors
from serve.client import CLIENTS
from serve.front import Front, FrontFailure
from serve.health import Load, WrongAnswer
from serve.protocol import DeadlineExceeded, Overloaded, ServerFailure, Unreachable
from serve.release import KIND, Release
from serve.server import LOOPBACK, START_ATTEMPTS, Server, ServerError, free_ports
from serve.supervisor import FAILED_PROBES, STEADY_SECONDS, Candidate, Serving, Supervisor, pause_before
from slipway import sealed
from tests import images
from tests.serve.tools import (
    CPUS,
    PATIENCE,
    edit_text,
    make_bundle,
    model_processes,
    still_running,
    variant,
    wait_until,
)

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1800)]

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
def link(release: Release, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What is to be served."""
    path = tmp_path_factory.mktemp("repository") / "current"
    path.symlink_to(release.directory)
    return path


def lead_to(link: Path, directory: Path) -> None:
    fresh = link.with_name("fresh")
    fresh.symlink_to(directory)
    fresh.replace(link)


@pytest.fixture(scope="module")
def everything(link: Path) -> Iterator[tuple[Supervisor, Front]]:
    """One supervisor for all tests here; each leaves it with a server that is well."""
    front = Front(free_ports())
    supervisor = Supervisor(front, link, PROBE_SECONDS)
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


def logged(caplog: pytest.LogCaptureFixture, pattern: re.Pattern[str]) -> bool:
    return pattern.search(caplog.text) is not None


def metric(front: Front, name: str, **labels: str) -> float:
    value = front.service_metrics.registry.get_sample_value(f"slipway_{name}", labels)
    assert value is not None
    return value


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
    died, takeovers = (
        metric(front, "server_failures_total", reason="died"),
        metric(front, "server_takeovers_total"),
    )
    processes = [sick.pid, *model_processes(sick)]
    os.kill(sick.pid, signal.SIGSTOP)
    step_until(supervisor, lambda: supervisor.server is not sick)
    assert label_of_5(front) == {"5"}
    reason = next(text for text in caplog.messages if "replacement 1 in a row" in text)
    assert f"Triton (process {sick.pid}) is stopped; the end of its log:\n" in reason
    assert metric(front, "server_failures_total", reason="died") == died + 1
    assert metric(front, "server_takeovers_total") == takeovers + 1
    step_until(supervisor, lambda: not any(still_running(pid) for pid in processes))


def test_front_that_dies_is_started_again_on_the_same_ports(supervisor: Supervisor, front: Front) -> None:
    restarts = metric(front, "front_restarts_total")
    front._process.kill()
    front._process.wait()
    supervisor.step()
    assert label_of_5(front) == {"5"}
    assert metric(front, "front_restarts_total") == restarts + 1


def test_front_that_stands_still_is_started_again(
    supervisor: Supervisor, front: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process looks as if nothing had happened, and connections to it are even made."""
    monkeypatch.setattr(fronts, "COMMAND_SECONDS", 1)
    stopped = front._process
    stopped.send_signal(signal.SIGSTOP)
    supervisor._next_front_probe = 0
    step_until(supervisor, lambda: stopped.poll() is not None and supervisor._front_failures_in_a_row == 0)
    assert label_of_5(front) == {"5"}


def test_front_that_does_not_start_again_is_tried_until_it_does_and_the_server_goes_on(
    supervisor: Supervisor, front: Front, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_: Front) -> None:
        raise FrontFailure("the port is taken")

    monkeypatch.setattr(supervisors, "FIRST_PAUSE_SECONDS", 0.01)
    server = supervisor.server
    with monkeypatch.context() as patch:
        patch.setattr(Front, "restart", fail)
        front._process.kill()
        front._process.wait()
        step_until(supervisor, lambda: caplog.text.count("the port is taken") == 3)
    assert re.findall(r"starting it again in (\S+) s", caplog.text) == ["0", "0.01", "0.02", "0.04"]
    step_until(supervisor, lambda: supervisor._front_failures_in_a_row == 0)
    assert supervisor.server is server
    assert label_of_5(front) == {"5"}


def test_a_full_disk_ends_no_service(
    supervisor: Supervisor, front: Front, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither when the server is to be replaced, nor when HAProxy is to be started again."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(supervisors, "FIRST_PAUSE_SECONDS", 0.01)
    dead = supervisor.server
    with monkeypatch.context() as patch:
        patch.setattr(servers, "folder_of_links", full)
        os.kill(dead.pid, signal.SIGKILL)
        step_until(supervisor, lambda: "Triton could not be started" in caplog.text)
        patch.setattr(Path, "write_text", full)
        front._process.kill()
        front._process.wait()
        step_until(supervisor, lambda: "HAProxy could not be started" in caplog.text)
    step_until(supervisor, lambda: supervisor.server is not dead)
    assert label_of_5(front) == {"5"}


def test_who_sweeps_the_folders_of_temporary_files_ends_no_service(
    supervisor: Supervisor, front: Front, caplog: pytest.LogCaptureFixture
) -> None:
    swept = supervisor.server
    shutil.rmtree(swept.log.parent)
    shutil.rmtree(front._folder.name)
    supervisor._next_front_probe = 0
    os.kill(swept.pid, signal.SIGKILL)
    step_until(supervisor, lambda: supervisor.server is not swept)
    assert label_of_5(front) == {"5"}
    assert "its log cannot be read" in caplog.text


def test_wrong_answers_are_stopped_at_once(
    supervisor: Supervisor, front: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No request reaches a server that is known to answer wrongly, be there another one yet or not."""

    def lie(server: Server, deadline_seconds: float) -> None:
        raise WrongAnswer("the golden image was answered 'x'")

    liar = supervisor.server
    with monkeypatch.context() as patch:
        patch.setattr(Server, "probe", lie)
        wrong = metric(front, "server_failures_total", reason="wrong")
        probe_now(supervisor)
        supervisor.step()
    assert metric(front, "server_failures_total", reason="wrong") == wrong + 1
    assert metric(front, "golden_probe_good") == 0
    for _ in range(2):
        with CLIENTS["http"](front.http) as client, pytest.raises(Overloaded, match="no server is ready"):
            client.classify([images.flat(5)])
        front._process.kill()  # a new HAProxy does not lead to it either
        front._process.wait()
        supervisor.step()
    step_until(supervisor, lambda: supervisor.server is not liar)
    assert label_of_5(front) == {"5"}
    assert metric(front, "golden_probe_good") == 1


@pytest.mark.parametrize(
    ("answered", "waiting", "well"),
    [
        pytest.param([1, 2, 3, 4, 5, 6], 7, True, id="has more to do than it can"),
        pytest.param([1, 1, 1, 1, 1, 1], 7, False, id="does nothing"),
        pytest.param([1, 2, 3, 4, 5, 6], 0, False, id="answers others, but not us"),
    ],
)
def test_a_busy_server_is_late_and_goes_on_and_a_wedged_one_does_not(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch, answered: list[int], waiting: int, well: bool
) -> None:
    """Case D03: all miss the deadline of every probe."""

    def late(server: Server, deadline_seconds: float) -> None:
        raise DeadlineExceeded("no answer")

    server, counts = supervisor.server, iter(answered)
    with monkeypatch.context() as patch:
        patch.setattr(Server, "probe", late)
        patch.setattr(health, "load", lambda *_: Load(answered=next(counts), waiting=waiting))
        for _ in range(FAILED_PROBES):
            assert not probe_now(supervisor).sick
            supervisor.step()
        assert probe_now(supervisor).sick != well
    if not well:
        step_until(supervisor, lambda: supervisor.server is not server)


def test_what_a_server_has_done_and_has_to_do_is_in_its_metrics(server: Server) -> None:
    before = health.load(server.metrics, 30).answered
    with CLIENTS["grpc"](server.grpc) as client:
        client.classify([images.flat(1)] * 3)
    # Triton counts after it has answered.
    wait_until(lambda: health.load(server.metrics, 30) == Load(answered=before + 3, waiting=0))
    with pytest.raises(Unreachable, match="no metrics can be read there"):
        health.load(f"{LOOPBACK}:{free_ports().metrics}", 30)


def test_a_crash_loop_backs_off_says_why_each_time_and_never_gives_up(
    supervisor: Supervisor, front: Front, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object, **__: object) -> Server:
        raise ServerError("no memory is left")

    monkeypatch.setattr(supervisors, "FIRST_PAUSE_SECONDS", 0.01)
    dead = supervisor.server
    assert supervisor._serving is not None
    supervisor._serving.since -= (
        2 * STEADY_SECONDS
    )  # it had been well for long, which ends no row of failures
    with monkeypatch.context() as patch:
        patch.setattr(servers, "start", fail)
        os.kill(dead.pid, signal.SIGKILL)
        step_until(supervisor, lambda: caplog.text.count("no memory is left") == 5)
    pauses = re.findall(r"starting another server in (\S+) s \(replacement (\d)", caplog.text)
    assert pauses == [("0", "1"), ("0.01", "2"), ("0.02", "3"), ("0.04", "4"), ("0.08", "5"), ("0.16", "6")]
    step_until(supervisor, lambda: supervisor.server is not dead)
    assert label_of_5(front) == {"5"}


def test_another_release_takes_over_and_a_rollback_finds_the_one_before_still_running(
    supervisor: Supervisor, front: Front, link: Path, release: Release, tmp_path: Path
) -> None:
    """Cases D04 and D13."""
    reversed_classes = make_bundle(tmp_path / "bundles" / "tiny" / "2", "--reverse-classes")
    other = repository.publish(reversed_classes, tmp_path / "repository", "embedded", CPUS)
    before = supervisor.server
    lead_to(link, other)
    step_until(supervisor, lambda: supervisor.server is not before)
    assert label_of_5(front) == {"6"}
    lead_to(link, release.directory)
    step_until(supervisor, lambda: supervisor.server is before)
    assert label_of_5(front) == {"5"}


def test_a_server_that_stood_by_and_is_not_well_any_more_is_not_taken_back(
    supervisor: Supervisor, front: Front, link: Path, release: Release, tmp_path: Path
) -> None:
    other = variant(release, tmp_path / "other", lambda _: None)
    before = supervisor.server
    lead_to(link, other.directory)
    step_until(supervisor, lambda: supervisor.server is not before)
    os.kill(next(iter(model_processes(before))), signal.SIGKILL)
    lead_to(link, release.directory)
    step_until(supervisor, lambda: supervisor.server.release.directory == release.directory)
    assert supervisor.server is not before
    assert label_of_5(front) == {"5"}


def test_an_input_that_kills_its_worker_is_an_error_for_its_sender_and_goes_to_no_other_worker(
    supervisor: Supervisor, front: Front, link: Path, release: Release, tmp_path: Path
) -> None:
    """Case D14. A client that repeats what it may does not repeat this."""
    crash = '    if data == b"crash":\n        import os\n\n        os.kill(os.getpid(), 11)\n'
    fragile = variant(
        release,
        tmp_path / "fragile",
        lambda models: edit_text(
            models / "preprocess" / "1" / "slipway" / "preprocessing.py",
            "    image = decode(data, rules)\n",
            f"{crash}    image = decode(data, rules)\n",
        ),
    )
    lead_to(link, fragile.directory)
    step_until(supervisor, lambda: supervisor.server.release.directory == fragile.directory)
    before = supervisor.server
    workers = model_processes(before)
    with CLIENTS["http"](front.http, retries=5) as client, pytest.raises(ServerFailure):
        client.classify([b"crash"])
    assert len([pid for pid in workers if not still_running(pid)]) == 1
    step_until(supervisor, lambda: supervisor.server is not before)
    assert label_of_5(front) == {"5"}
    lead_to(link, release.directory)
    step_until(supervisor, lambda: supervisor.server.release.directory == release.directory)


def brought_up(supervisor: Supervisor, link: Path, release: Release) -> Candidate:
    """The candidate, when the link has just been led to a release."""
    lead_to(link, release.directory)
    supervisor.step()
    assert supervisor._candidate is not None
    return supervisor._candidate


def test_a_release_that_is_no_longer_wanted_is_given_up(
    supervisor: Supervisor, front: Front, link: Path, release: Release, tmp_path: Path
) -> None:
    before = supervisor.server
    candidate = brought_up(supervisor, link, variant(release, tmp_path / "other", lambda _: None))
    lead_to(link, release.directory)
    supervisor.step()
    assert candidate.server.ended
    assert supervisor.server is before
    assert label_of_5(front) == {"5"}


def test_a_release_that_cannot_be_opened_is_refused_and_the_one_wanted_before_it_given_up(
    supervisor: Supervisor,
    front: Front,
    link: Path,
    release: Release,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Whole by its seal, but of a make that nobody here reads: a fork's, say."""
    before = supervisor.server
    candidate = brought_up(supervisor, link, variant(release, tmp_path / "other", lambda _: None))
    with sealed.stage(tmp_path / "odd", kind=KIND) as staging:
        (staging / "release.json").write_text('{"format": "slipway-release/2"}')
    lead_to(link, tmp_path / "odd")
    supervisor.step()
    assert candidate.server.ended
    assert "odd is refused: " in caplog.text
    assert (
        "release.json: cannot be read as a release (KeyError('version')); publish its bundle again"
        in caplog.text
    )
    assert supervisor.server is before
    assert label_of_5(front) == {"5"}
    lead_to(link, release.directory)
    supervisor.step()


@pytest.mark.parametrize(
    "target", [pytest.param("current", id="to itself"), pytest.param("x" * 256, id="nowhere that could be")]
)
def test_a_link_that_cannot_be_followed_for_a_while_ends_no_service(
    supervisor: Supervisor,
    front: Front,
    link: Path,
    release: Release,
    caplog: pytest.LogCaptureFixture,
    target: str,
) -> None:
    """The file system gives errors then, as when the repository's does not answer or may not be read."""
    before = supervisor.server
    lead_to(link, Path(target))
    for _ in range(3):
        supervisor.step()
    assert caplog.text.count(f"{link} is refused: {link}: cannot be followed to a release") == 1
    lead_to(link, release.directory)
    supervisor.step()
    assert supervisor.server is before
    assert label_of_5(front) == {"5"}


def test_a_refused_release_is_tried_again_when_its_link_is_made_anew_and_not_before(
    supervisor: Supervisor,
    front: Front,
    link: Path,
    release: Release,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It could not be read for a while, say: `promote` makes the link anew."""

    def refusals() -> int:
        return caplog.text.count("other is refused: ")

    before, other = supervisor.server, variant(release, tmp_path / "other", lambda _: None)
    manifest, away = other.directory / "manifest.json", tmp_path / "away"
    manifest.rename(away)
    for promoted in (1, 2):
        lead_to(link, other.directory)
        for _ in range(3):
            supervisor.step()
        assert refusals() == promoted
    away.rename(manifest)
    supervisor.step()
    assert supervisor._candidate is None
    assert supervisor.server is before
    candidate = brought_up(supervisor, link, other)
    lead_to(link, other.directory)
    step_until(supervisor, lambda: supervisor.server is candidate.server)
    assert refusals() == 2
    assert label_of_5(front) == {"5"}
    lead_to(link, release.directory)
    step_until(supervisor, lambda: supervisor.server is before)


def test_a_release_whose_server_crashes_before_it_answers_is_started_again_and_in_the_end_refused(
    supervisor: Supervisor,
    front: Front,
    link: Path,
    release: Release,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Triton does not always start on a machine that is busy with other things: a rollback must not fail over that."""

    def crash() -> None:
        crashing = supervisor._candidate
        assert crashing is not None
        os.kill(crashing.server.pid, signal.SIGABRT)
        step_until(supervisor, lambda: supervisor._candidate is not crashing)

    before = supervisor.server
    lead_to(link, variant(release, tmp_path / "fragile", lambda _: None).directory)
    supervisor.step()
    for _ in range(START_ATTEMPTS):
        assert "is refused" not in caplog.text
        crash()
    assert "fragile is refused: Triton ended by itself with status -6" in caplog.text
    assert caplog.text.count("starting it once more") == START_ATTEMPTS - 1
    assert supervisor.server is before
    lead_to(link, variant(release, tmp_path / "recovers", lambda _: None).directory)
    supervisor.step()
    crash()
    step_until(supervisor, lambda: supervisor.server.release.directory.name == "recovers")
    assert label_of_5(front) == {"5"}
    lead_to(link, release.directory)
    step_until(supervisor, lambda: supervisor.server is before)


def test_a_broken_release_never_replaces_a_good_one(
    supervisor: Supervisor,
    front: Front,
    link: Path,
    release: Release,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Case D04. Damaged on disk; with labels of another model, which Triton does not notice; with a broken model."""

    def swap_labels(models: Path) -> None:
        labels = models / "classify" / "labels.txt"
        labels.write_text("".join(reversed(labels.read_text().splitlines(keepends=True))))

    damaged = variant(release, tmp_path / "damaged", lambda _: None).directory
    (damaged / "models" / "classifier" / "1" / "model.onnx").chmod(0o644)
    (damaged / "models" / "classifier" / "1" / "model.onnx").write_bytes(b"no model")
    mislabelled = variant(release, tmp_path / "mislabelled", swap_labels).directory
    broken = variant(
        release, tmp_path / "broken", lambda models: (models / "classifier" / "1" / "model.onnx").unlink()
    ).directory
    before, refusals = supervisor.server, metric(front, "releases_refused_total")
    for directory, words in (
        (damaged, r"model\.onnx: differs from the manifest"),
        (mislabelled, "the golden image was answered '9'"),
        (broken, "Triton could not load model classifier"),
    ):
        lead_to(link, directory)
        refusal = re.compile(f"{directory} is refused: .*{words}")
        step_until(supervisor, partial(logged, caplog, refusal))
        assert supervisor.server is before
        assert label_of_5(front) == {"5"}
    assert caplog.text.count(f"still serving {release.directory.name}") == 3
    assert metric(front, "releases_refused_total") == refusals + 3
    lead_to(link, release.directory)


@pytest.mark.parametrize(("replacement", "seconds"), [(1, 0), (2, 1), (3, 2), (7, 32), (8, 60), (10_000, 60)])
def test_pause_doubles_up_to_a_minute(replacement: int, seconds: float) -> None:
    assert pause_before(replacement) == seconds

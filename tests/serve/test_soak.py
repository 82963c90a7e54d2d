"""Ordinary work for a long time, while releases are switched: nothing grows, and every answer is right.

    make soak    30 minutes at 70 % of what the service can do here; memory has to stay within 2 %

As part of all tests it is one minute without that limit: the parts of a service that has just started still grow.

The first part of a long soak brings up a new server with every switch, because the one from before has stopped by then:
what a reload leaks, the service keeps. In the rest, traffic moves to and fro between two servers that stay: what a
request leaks, they keep.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from serve.release import Release, open_release
from serve.supervisor import STANDBY_SECONDS
from tests import images
from tests.serve.chaos import PROBE_SECONDS
from tests.serve.holdings import Holdings, Watch, least_memory
from tests.serve.load import FLAT, Load, Question, labels_of
from tests.serve.service import Service, up
from tests.serve.tools import variant, wait_until

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(4 * 3600)]

SHARE_OF_CAPACITY = 0.7
CAPACITY_SECONDS = 5.0
# Of a soak that is long enough for it, the part in which every switch brings up a new server.
RELOADING_SHARE = 0.6
LONG_SECONDS = 10 * 60
# When the server from before has stopped, and long enough after that for some samples of the one alone.
RELOAD_SECONDS = STANDBY_SECONDS + 20
SWITCH_SECONDS = 15
WINDOW_SECONDS = 60
# The first windows of each part are those in which what was never used before is used for the first time.
WARM_UP_WINDOWS = 2
MOST_GROWTH = 0.02
# Some that happen to be open at that moment; thousands of requests would leak thousands.
SPARE_DESCRIPTORS = 8

# All that clients send: small and large, one and several, and what is to be refused.
QUESTIONS = [
    *FLAT,
    *(Question([images.flat(k, "JPEG")], [k]) for k in range(4)),
    Question([images.flat(k) for k in range(8)], list(range(8))),
    Question([images.large_flat(5)], [5]),
    *(Question([bad], []) for bad in (*images.BAD.values(), images.truncated())),
]


@dataclass(frozen=True)
class Window:
    part: str
    end: float
    seen: list[Holdings]


@pytest.fixture(scope="module")
def both(
    release: Release, reverse_release: Release, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Release, Release]:
    """Two releases in one repository."""
    releases = tmp_path_factory.mktemp("soak") / "releases"
    one, two = (
        variant(published, releases / name, lambda _: None)
        for published, name in ((release, "tiny-1"), (reverse_release, "tiny-2"))
    )
    return one, two


@pytest.fixture
def temporary(tmp_path: Path) -> Path:
    """Where the service has its temporary files, and nobody else."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    return folder


@pytest.fixture
def service(both: tuple[Release, Release], temporary: Path, tmp_path: Path) -> Iterator[Service]:
    models = both[0].directory.parents[1]
    (models / "current").symlink_to(both[0].directory)
    with up(models, tmp_path / "log", PROBE_SECONDS, within=["env", f"TMPDIR={temporary}"]) as service:
        yield service


def test_nothing_grows_and_every_answer_is_right(
    service: Service,
    both: tuple[Release, Release],
    temporary: Path,
    request: pytest.FixtureRequest,
) -> None:
    """Case D19. Objective: no error, no wrong answer, and in the end as much is held as in the beginning."""
    seconds = 60 * request.config.getoption("--soak-minutes")
    labels = labels_of(*both)
    interval = len(Load(service.urls, labels).clients) / (SHARE_OF_CAPACITY * capacity(service, labels))
    with Watch(service, temporary) as watch:
        first = service.server
        assert service.serve("promote", "tiny-2") == 0
        wait_until(lambda: service.server != first)
        before = at_rest(watch)
        start = time.monotonic()
        with Load(
            service.urls, labels, questions=QUESTIONS, pause_seconds=0, interval_seconds=interval
        ) as load:
            windows = list(soak(service, load, watch, seconds))
        rate = load.answers / (time.monotonic() - start)
        print(f"\n{load.answers} answers, {rate:.0f} a second of {len(load.clients) / interval:.0f}")
        report(windows, start)
        assert not load.wrong
        assert not load.errors_since(0)
        wait_until(lambda: holds_no_more(at_rest(watch), before))
    if seconds >= LONG_SECONDS:
        assert not service.replacements
        for part in ("reloading", "staying"):
            memory = [least_memory(window.seen) for window in windows if window.part == part]
            settled = memory[WARM_UP_WINDOWS:]
            assert max(settled) <= (1 + MOST_GROWTH) * min(settled), part


def capacity(service: Service, labels: dict[str, list[str]]) -> float:
    """Answers a second, as fast as the clients can ask. What they need of the machine is part of it."""
    with Load(service.urls, labels, questions=QUESTIONS, pause_seconds=0) as load:
        wait_until(lambda: load.all_well_since(0))
        before, start = load.answers, time.monotonic()
        time.sleep(CAPACITY_SECONDS)
        rate = (load.answers - before) / (time.monotonic() - start)
    assert not load.wrong
    print(f"\n{rate:.0f} answers a second at most", end="")
    return rate


def soak(service: Service, load: Load, watch: Watch, seconds: float) -> Iterator[Window]:
    """Switch from one release to the other, again and again, and yield what was seen meanwhile."""
    end = time.monotonic() + seconds
    if seconds >= LONG_SECONDS:
        end_of_reloads = time.monotonic() + RELOADING_SHARE * seconds
        while (start := time.monotonic()) < end_of_reloads:
            switch(service, load)
            time.sleep(RELOAD_SECONDS)
            yield Window("reloading", time.monotonic(), watch.between(start, time.monotonic(), servers=1))
        switch(service, load)
    while (start := time.monotonic()) < end:
        while time.monotonic() < min(end, start + WINDOW_SECONDS):
            time.sleep(SWITCH_SECONDS)
            switch(service, load)
        yield Window("staying", time.monotonic(), watch.between(start, time.monotonic(), servers=2))


def switch(service: Service, load: Load) -> None:
    """Serve the other release, and wait until it answers everybody."""
    assert service.serve("rollback") == 0
    current = open_release(service.models / "current").identity
    wait_until(lambda: load.only_answered_by(current))


def at_rest(watch: Watch) -> Holdings:
    """What is held while nobody asks, by both servers."""
    found: list[Holdings] = []

    def seen() -> bool:
        holdings = watch.look()
        if holdings is None or holdings.servers != 2:
            return False
        found.append(holdings)
        return True

    wait_until(seen)
    return found[-1]


def holds_no_more(now: Holdings, before: Holdings) -> bool:
    """But for memory, which is looked at over time."""
    return (
        now.processes == before.processes
        and now.regions <= before.regions
        and now.folders == before.folders
        and now.descriptors <= before.descriptors + SPARE_DESCRIPTORS
    )


def report(windows: list[Window], start: float) -> None:
    for window in windows:
        about = f"{window.part:9} {window.end - start:5.0f} s"
        assert window.seen, f"{about}  not once seen with as many servers as there should be"
        last = window.seen[-1]
        print(
            f"{about}  {least_memory(window.seen) / 2**20:7.2f} MB  "
            f"{last.descriptors} descriptors  {last.processes} processes  {last.regions} regions"
        )

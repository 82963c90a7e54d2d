"""Keep a release served: behind one address, whatever happens to the server, and whichever release is wanted.

Everything happens in one loop of one thread, in small steps: watch what serves, watch which release is wanted,
bring a candidate up, move the traffic, let the one before finish. A candidate is a server that gets no request yet:
the replacement of one that is not well, or the first of another release. It takes over when it has answered a golden
image over both protocols, and not before, so nothing that cannot answer ever replaces something that can.
"""

import logging
import time
from dataclasses import dataclass
from pathlib import Path

from serve import health
from serve import server as servers
from serve.front import Front, FrontFailure
from serve.health import WrongAnswer
from serve.protocol import ServingError
from serve.release import Release, followed, open_release
from serve.server import START_ATTEMPTS, PortTaken, Server, ServerError, Unexplained
from slipway.errors import SlipwayError

TICK_SECONDS = 0.1
# Two in a row, because one may have met a machine that was busy with something else.
FAILED_PROBES = 2
# The first replacement comes at once, the next ones in a row after 1, 2, 4, ... seconds. A server that has been
# well for long enough ends the row.
FIRST_PAUSE_SECONDS = 1.0
LONGEST_PAUSE_SECONDS = 60.0
STEADY_SECONDS = 30.0
# Requests that a server still has when another one takes over get this long.
RETIRE_SECONDS = 30
# After that the server is kept as it is, so that a rollback finds it running.
STANDBY_SECONDS = 60

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Wish:
    """Which release a link asks for. One that was refused is asked for again when the link is made anew.

    made: tells the link from another one that leads to the same release; None if it cannot be followed.
    """

    directory: Path
    made: tuple[int, int] | None


@dataclass(kw_only=True)
class Serving:
    """The server that gets the requests.

    sick: it is to be replaced. wrong: it answers wrongly, and gets no request any more. failed_probes: in a row.
    """

    server: Server
    since: float
    next_probe: float
    sick: bool = False
    wrong: bool = False
    failed_probes: int = 0


@dataclass(kw_only=True)
class Candidate:
    """A server that takes over as soon as it answers, which it should before `give_up_at`.

    standby: it has served before.
    """

    server: Server
    give_up_at: float
    standby: bool = False


@dataclass(kw_only=True)
class Retired:
    """A server that gets no new requests: it stops after `keep_until`, when it has answered those it still has.

    It stops all the same RETIRE_SECONDS later. standby: it was well, and may serve again. kill_at: set when it was
    asked to stop.
    """

    server: Server
    standby: bool
    keep_until: float
    kill_at: float | None = None


def wish_of(link: Path) -> Wish:
    """What `link` asks for now."""
    try:
        directory, itself = followed(link), link.lstat()
    except (OSError, SlipwayError):  # open_release says so, too, and if it does not any more, all is well
        return Wish(directory=link, made=None)
    return Wish(directory=directory, made=(itself.st_ino, itself.st_mtime_ns))


def pause_before(replacement: int) -> float:
    """Seconds to wait before the n-th replacement in a row, counted from 1."""
    if replacement == 1:
        return 0.0
    # The exponent is bounded, because a number of replacements is not.
    return min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2.0 ** min(replacement - 2, 32))


class Supervisor:
    """Serves what `link` leads to, behind `front`: `start`, `run` until interrupted, and `stop` in any case.

    Args:
        link: a release, or a link to one that may be moved to another while we run.
        probe_seconds: how often the server is asked for a golden image over both protocols, and HAProxy whether it
            is there.
        traces: see serve.server.start.
    """

    def __init__(self, front: Front, link: Path, probe_seconds: float, traces: str | None = None) -> None:
        self._front = front
        self._metrics = front.service_metrics
        self._link = link
        self._probe_seconds = probe_seconds
        self._traces = traces
        self._serving: Serving | None = None
        self._candidate: Candidate | None = None
        self._retired: list[Retired] = []
        # What the link asked for when we last looked; it may have been refused since.
        self._wish: Wish | None = None
        # How often its server has failed without a reason before it had answered.
        self._failed_starts = 0
        self._replacements_in_a_row = 0
        self._replace_at = 0.0
        self._front_failures_in_a_row = 0
        self._restart_front_at = 0.0
        self._next_front_probe = 0.0

    @property
    def server(self) -> Server:
        """The one that gets the requests. Only after `start`."""
        assert self._serving is not None
        return self._serving.server

    def start(self) -> None:
        """Serve. Raises SlipwayError if the release cannot be served."""
        while self._serving is None:
            self.step()
            time.sleep(TICK_SECONDS)

    def run(self) -> None:
        """Go on serving until a signal raises KeyboardInterrupt."""
        while True:
            self.step()
            time.sleep(TICK_SECONDS)

    def stop(self) -> None:
        """Answer the requests in flight, take no others, and leave nothing behind."""
        others = [part.server for part in (self._candidate, *self._retired) if part is not None]
        own = [] if self._serving is None else [self._serving.server]
        try:
            self._front.stop()
            for server in own:
                server.stop()
        finally:  # also when a second signal does not want to wait
            for server in [*own, *others]:
                server.kill()

    def step(self) -> None:
        """Look after everything once, or only after HAProxy if that is not well: nobody is served without it."""
        if self._front_failures_in_a_row == 0:
            try:
                self._watch_front()
                self._watch_link()
                self._watch_server()
                self._advance_candidate()
                self._let_retired_go()
            except FrontFailure as error:
                self._restart_front_later(error)
        if self._front_failures_in_a_row > 0 and time.monotonic() >= self._restart_front_at:
            self._restart_front()

    def _watch_front(self) -> None:
        self._front.raise_if_ended()
        now = time.monotonic()
        if now >= self._next_front_probe:
            self._next_front_probe = now + self._probe_seconds
            self._front.raise_if_silent()

    def _restart_front_later(self, reason: FrontFailure) -> None:
        """At once, or after a pause that grows with every attempt that fails."""
        self._front_failures_in_a_row += 1
        pause = pause_before(self._front_failures_in_a_row)
        self._restart_front_at = time.monotonic() + pause
        logger.warning("WARNING: %s\nstarting it again in %g s", reason, pause)

    def _restart_front(self) -> None:
        self._metrics.front_restarted()
        try:
            self._front.restart()
            if self._serving is not None and not self._serving.wrong:
                self._front.point_at(self._serving.server)
        except FrontFailure as error:
            self._restart_front_later(error)
        else:
            self._front_failures_in_a_row = 0

    def _watch_link(self) -> None:
        wish = wish_of(self._link)
        if wish == self._wish:
            return
        self._wish = wish
        self._failed_starts = 0
        served = None if self._serving is None else self._serving.server.release.directory
        try:
            release = open_release(wish.directory)
        except SlipwayError as error:
            self._drop_candidate(unless_of=served)
            self._refuse(wish.directory, error)
            return
        self._drop_candidate(unless_of=release.directory)
        if self._candidate is None and release.directory != served:
            self._bring_up(release)

    def _drop_candidate(self, *, unless_of: Path | None) -> None:
        if self._candidate is not None and self._candidate.server.release.directory != unless_of:
            logger.info("%s is not wanted any more", self._candidate.server.release.directory.name)
            self._candidate.server.kill()
            self._candidate = None

    def _watch_server(self) -> None:
        """Find out whether the server is well, and start another one in its place if it is not."""
        if self._serving is None:
            return
        now = time.monotonic()
        if self._serving.sick:
            # A candidate of another release is as good a remedy.
            if self._candidate is None and now >= self._replace_at:
                self._bring_up(self._serving.server.release)
            return
        try:
            self._serving.server.raise_if_crippled()
            if now >= self._serving.next_probe:
                self._probe(self._serving)
        except (ServerError, ServingError, WrongAnswer) as error:
            if now - self._serving.since > STEADY_SECONDS:
                self._replacements_in_a_row = 0
            self._metrics.server_failed(error)
            self._serving.sick = True
            self._serving.wrong = isinstance(error, WrongAnswer)
            self._replace_later(error)
            if self._serving.wrong:
                self._front.point_at_nobody()

    def _probe(self, serving: Serving) -> None:
        """Ask for a golden image. Raises WrongAnswer at once, ServingError when it has happened often enough."""
        serving.next_probe = time.monotonic() + self._probe_seconds
        deadline = self._probe_seconds / len(serving.server.urls)
        server = serving.server
        try:
            answers = health.answers_or_is_busy(lambda: server.probe(deadline), server.metrics, deadline)
        except ServingError:
            self._metrics.probed(good=False)
            serving.failed_probes += 1
            if serving.failed_probes >= FAILED_PROBES:
                raise
        else:
            if answers:
                self._metrics.probed(good=True)
            serving.failed_probes = 0

    def _replace_later(self, reason: SlipwayError) -> None:
        """Once more, after a pause that grows with every replacement in a row."""
        assert self._serving is not None
        self._replacements_in_a_row += 1
        pause = pause_before(self._replacements_in_a_row)
        self._replace_at = time.monotonic() + pause
        logger.warning(
            "WARNING: %s: %s\nstarting another server in %g s (replacement %d in a row)",
            self._serving.server.release.identity,
            reason,
            pause,
            self._replacements_in_a_row,
        )

    def _bring_up(self, release: Release) -> None:
        """Make a candidate: the server of before, if it is still there, or a new one."""
        give_up_at = time.monotonic() + servers.START_SECONDS
        for retired in self._retired:
            same = retired.server.release.directory == release.directory
            if same and retired.standby and retired.kill_at is None:
                self._retired.remove(retired)
                self._candidate = Candidate(server=retired.server, give_up_at=give_up_at, standby=True)
                return
        try:
            server = servers.start(release, servers.free_ports(), traces=self._traces)
        except SlipwayError as error:
            self._give_up(release, error)
        else:
            self._candidate = Candidate(server=server, give_up_at=give_up_at)

    def _advance_candidate(self) -> None:
        if self._candidate is None:
            return
        candidate, server = self._candidate, self._candidate.server
        try:
            if server.answers():
                self._candidate = None
                self._take_over(server)
            elif time.monotonic() > candidate.give_up_at:
                raise Unexplained(f"Triton did not answer in time{server.log_tail()}")
        except (ServerError, ServingError, WrongAnswer) as error:
            self._candidate = None
            server.kill()
            if candidate.standby:
                logger.info("%s from before is not well any more: %s", server.release.directory.name, error)
                self._bring_up(server.release)
            else:
                self._give_up(server.release, error)

    def _take_over(self, server: Server) -> None:
        now = time.monotonic()
        before = self._serving
        self._serving = Serving(server=server, since=now, next_probe=now + self._probe_seconds)
        self._replace_at = 0.0
        for older in self._retired:  # one that stands by is enough
            older.keep_until = min(older.keep_until, now)
        if before is not None:
            keep_until = now if before.sick else now + STANDBY_SECONDS
            self._retired.append(
                Retired(server=before.server, standby=not before.sick, keep_until=keep_until)
            )
        self._front.point_at(server)
        self._metrics.took_over()
        logger.info(
            "serving %s (%s) from process %d; its log is %s",
            server.release.identity,
            server.release.directory.name,
            server.pid,
            server.log,
        )

    def _give_up(self, release: Release, reason: SlipwayError) -> None:
        """A candidate has failed. Raises the reason if there is nothing that could go on."""
        if isinstance(reason, PortTaken):
            logger.info("%s; taking others", reason)
            self._bring_up(release)
        elif self._serving is not None and self._serving.server.release.directory == release.directory:
            self._replace_later(reason)
        elif self._may_start_again(reason):
            logger.warning("WARNING: %s: %s\nstarting it once more", release.directory, reason)
            self._bring_up(release)
        else:
            self._refuse(release.directory, reason)

    def _may_start_again(self, reason: SlipwayError) -> bool:
        """Not where a server that is sick waits to be replaced: it has waited for this one to start already."""
        self._failed_starts += 1
        others_wait = self._serving is not None and self._serving.sick
        return isinstance(reason, Unexplained) and self._failed_starts < START_ATTEMPTS and not others_wait

    def _refuse(self, directory: Path, reason: SlipwayError) -> None:
        if self._serving is None:
            raise reason
        self._metrics.release_refused()
        logger.error(
            "ERROR: %s is refused: %s\nstill serving %s",
            directory,
            reason,
            self._serving.server.release.directory.name,
        )

    def _let_retired_go(self) -> None:
        now = time.monotonic()
        for retired in list(self._retired):
            if retired.kill_at is not None:
                if retired.server.ended or now >= retired.kill_at:
                    retired.server.kill()
                    self._retired.remove(retired)
            elif now >= retired.keep_until + RETIRE_SECONDS or (
                now >= retired.keep_until and self._front.in_flight(retired.server) == 0
            ):
                retired.server.ask_to_stop()
                retired.kill_at = now + servers.STOP_SECONDS

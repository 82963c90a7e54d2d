"""Steady load on a service, with every answer checked against what its release has to say."""

import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Self

from serve.client import CLIENTS
from serve.client import Client as Connection
from serve.protocol import RefusedInput, ServingError
from serve.release import Release
from tests import images

PAUSE_SECONDS = 0.02
DEADLINE_SECONDS = 60.0


@dataclass(frozen=True)
class Question:
    """Images of one request, and the colour of each; no colours if the request is to be refused."""

    images: list[bytes]
    colours: list[int]


FLAT = [Question([images.flat(k)], [k]) for k in range(len(images.COLOURS))]


@dataclass
class Client:
    """What one client has seen, in seconds of the monotonic clock. `release`: of its last answer."""

    protocol: str
    fresh: bool
    answered: list[float] = field(default_factory=list)
    errors: list[tuple[float, ServingError]] = field(default_factory=list)
    release: str = ""


def labels_of(straight: Release, reverse: Release) -> dict[str, list[str]]:
    """What two releases call an image of colour 0, of colour 1, ...; the second one has them in reverse order."""
    names = [str(k) for k in range(len(images.COLOURS))]
    return {straight.identity: names, reverse.identity: names[::-1]}


class Load:
    """Loops over both protocols, on kept and on fresh connections, for as long as a `with` block lasts.

    Args:
        urls: protocol -> host:port.
        labels: release -> what it calls an image of colour 0, of colour 1, ...
        questions: what each client asks, again and again.
        pause_seconds: between an answer and the next question.
        interval_seconds: between two questions of a client, at least.

    wrong: a sentence for each answer that is not its release's, and for each failure without a type.
    """

    def __init__(
        self,
        urls: Mapping[str, str],
        labels: Mapping[str, list[str]],
        *,
        questions: Sequence[Question] = FLAT,
        pause_seconds: float = PAUSE_SECONDS,
        interval_seconds: float = 0.0,
    ) -> None:
        self._urls = urls
        self._labels = labels
        self._questions = questions
        self._pause_seconds = pause_seconds
        self._interval_seconds = interval_seconds
        self._stop = threading.Event()
        self.wrong: list[str] = []
        self.clients = [Client(protocol, fresh) for protocol in CLIENTS for fresh in (False, True)]
        self._threads = [threading.Thread(target=self._run, args=(client,)) for client in self.clients]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    @property
    def answers(self) -> int:
        """How many there have been so far, refusals that had to be among them."""
        return sum(len(client.answered) for client in self.clients)

    def all_well_since(self, start: float, answers: int = 20) -> bool:
        """Whether every client has had so many answers in a row, the first of them after `start`."""
        return all(
            len([moment for moment in client.answered if moment > max(start, self._last_error(client))])
            >= answers
            for client in self.clients
        )

    def errors_since(self, start: float) -> "Counter[str]":
        return Counter(
            type(error).__name__
            for client in self.clients
            for moment, error in client.errors
            if moment > start
        )

    def seconds_of_errors(self, start: float) -> float:
        """From `start` until the last error of any client."""
        return max(0.0, max(self._last_error(client) for client in self.clients) - start)

    def only_answered_by(self, release: str) -> bool:
        """Whether the last answer of every client came from this release."""
        return all(client.release == release for client in self.clients)

    @staticmethod
    def _last_error(client: Client) -> float:
        return client.errors[-1][0] if client.errors else 0.0

    def _run(self, client: Client) -> None:
        connect = partial(
            CLIENTS[client.protocol],
            self._urls[client.protocol],
            connect_seconds=DEADLINE_SECONDS,
            deadline_seconds=DEADLINE_SECONDS,
        )
        connection = connect()
        sent = 0
        due = time.monotonic()
        while not self._stop.wait(max(self._pause_seconds, due - time.monotonic())):
            due = max(due, time.monotonic()) + self._interval_seconds
            if client.fresh:
                connection.close()
                connection = connect()
            self._ask(client, connection, self._questions[sent % len(self._questions)])
            sent += 1
        connection.close()

    def _ask(self, client: Client, connection: Connection, question: Question) -> None:
        try:
            answers = connection.classify(question.images)
        except ServingError as error:
            if isinstance(error, RefusedInput) and not question.colours:
                client.answered.append(time.monotonic())
            else:
                client.errors.append((time.monotonic(), error))
        except Exception as error:  # noqa: BLE001 - that is what is looked for
            self.wrong.append(f"{client.protocol}: an error without a type: {error!r}")
        else:
            client.answered.append(time.monotonic())
            client.release = answers[0].release
            found = [(answer.release, answer.label) for answer in answers]
            release = answers[0].release
            expected = [(release, self._labels[release][colour]) for colour in question.colours]
            if found != expected:
                self.wrong.append(f"{client.protocol}: {found} instead of {expected}")

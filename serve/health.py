"""Is it really serving? The only check that sees a dead model process: ask it something and know the answer.

Triton's own health endpoints stay 200 when the process behind a model has died.
"""

import http.client
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from serve.client import CLIENTS, Client
from serve.model_config import ENSEMBLE
from serve.models import PROBE
from serve.protocol import DeadlineExceeded, Overloaded, Unreachable
from serve.release import Release
from slipway.errors import SlipwayError


class WrongAnswer(SlipwayError):
    """The server answers, but not as the release was proven to."""


def check(client: Client, release: Release) -> None:
    """Ask for one golden image through the whole ensemble.

    Raises:
        ServingError: there was no answer.
        WrongAnswer: another release answered, or this one answered something else than when it was exported.
    """
    golden = release.golden[0]
    (answer,) = client.classify([golden.image])
    if answer.release != release.identity:
        raise WrongAnswer(f"the server answers with release {answer.release}, not with {release.identity}")
    difference = np.abs(answer.probabilities - golden.probabilities).max()
    if answer.label != golden.label or not difference <= release.tolerance:  # NaN is within no tolerance
        raise WrongAnswer(
            f"the golden image was answered {answer.label!r} with probabilities off by {difference:.2g}; it is "
            f"{golden.label!r}, and at most {release.tolerance:g} is allowed"
        )


def probe(release: Release, urls: Mapping[str, str], deadline_seconds: float = 5.0) -> None:
    """`check` over every protocol of `urls` (protocol -> host:port). deadline_seconds: for each answer."""
    for protocol, url in urls.items():
        client_type = CLIENTS[protocol]
        with client_type(
            url,
            connect_seconds=deadline_seconds,
            deadline_seconds=deadline_seconds,
            request_id=PROBE,
            priority="probe",
        ) as client:
            check(client, release)


def answers_or_is_busy(ask: Callable[[], None], metrics: str, deadline_seconds: float) -> bool:
    """Whether a golden image is answered well; False if it is not because the server has more to do than it can.

    That one gets on with what waits, and another in its place would be no better off.

    Args:
        ask: the probe. What else it raises than that an answer is late or the queue full, is raised.
        metrics: host:port where the server shows them.
    """
    before = load(metrics, deadline_seconds)
    try:
        ask()
    except (DeadlineExceeded, Overloaded):
        after = load(metrics, deadline_seconds)
        if after.waiting == 0 or after.answered == before.answered:
            raise
        return False
    return True


@dataclass(frozen=True, kw_only=True)
class Load:
    """answered: images answered since the server started. waiting: requests that wait in its queues now."""

    answered: int
    waiting: int


def load(metrics: str, deadline_seconds: float) -> Load:
    """What the server whose metrics are at host:port `metrics` has done and has to do.

    Raises Unreachable if it does not say.
    """
    try:
        connection = http.client.HTTPConnection(metrics, timeout=deadline_seconds)
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
        connection.close()
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise Unreachable(f"{metrics}: no metrics can be read there ({error})") from None
    return Load(
        answered=sum(int(count) for count in _ANSWERED.findall(text)),
        waiting=sum(int(count) for count in _WAITING.findall(text)),
    )


_ANSWERED = re.compile(rf'^nv_inference_count{{model="{ENSEMBLE}",[^}}]*}} (\d+)', re.MULTILINE)
_WAITING = re.compile(r"^nv_inference_pending_request_count{[^}]*} (\d+)", re.MULTILINE)

"""Where requests go: to a canary now and then, to a shadow besides, and what happens when nobody is there."""

import math
from collections import Counter

import pytest
import tritonclient.http

from deploy.gateway.settings import Upstream
from serve.client import Client
from serve.front import Front
from serve.protocol import Overloaded, ServerFailure, Unreachable
from serve.server import Server, free_ports
from tests import images
from tests.deploy.gateway.conftest import Start
from tests.serve.tools import wait_until

pytestmark = pytest.mark.integration

REQUESTS = 400
SHARE = 25
# Of a fair draw, one in ten million is further from its mean.
DEVIATIONS = 5.4


def asked(client: Client, times: int) -> Counter[str]:
    """How often each release answered; each answer has to be right for the release that it names."""
    count: Counter[str] = Counter()
    for _ in range(times):
        (answer,) = client.classify([images.flat(3)])
        release = answer.release.split("/")[0]
        assert answer.label == {"stable": "3", "canary": "8"}[release]
        count[release] += 1
    return count


def test_a_canary_gets_its_share_and_each_answer_names_its_release(
    start: Start, upstreams: dict[str, Upstream], protocol: str
) -> None:
    with (
        start(stable=upstreams["stable"], canary=upstreams["canary"], canary_percent=SHARE) as door,
        door.client(protocol) as client,
    ):
        count = asked(client, REQUESTS)
    p = SHARE / 100
    deviation = math.sqrt(REQUESTS * p * (1 - p))
    assert abs(count["canary"] - REQUESTS * p) < DEVIATIONS * deviation


@pytest.mark.parametrize(("percent", "release"), [(0, "stable"), (100, "canary")])
def test_none_is_none_and_all_is_all(
    start: Start, upstreams: dict[str, Upstream], protocol: str, percent: int, release: str
) -> None:
    with (
        start(stable=upstreams["stable"], canary=upstreams["canary"], canary_percent=percent) as door,
        door.client(protocol) as client,
    ):
        assert asked(client, 20) == {release: 20}


def test_a_canary_that_is_not_there_costs_nobody_an_answer(
    start: Start, upstreams: dict[str, Upstream], nobody: Upstream, protocol: str
) -> None:
    with (
        start(stable=upstreams["stable"], canary=nobody, canary_percent=100) as door,
        door.client(protocol) as client,
    ):
        assert asked(client, 20) == {"stable": 20}


def requests_answered(server: Server) -> int:
    """By the ensemble, since the server started."""
    with tritonclient.http.InferenceServerClient(server.http) as raw:
        (statistics,) = raw.get_inference_statistics("classify")["model_stats"]
    return statistics["inference_stats"]["success"]["count"]


def test_a_shadow_is_asked_the_same_and_its_answers_go_nowhere(
    start: Start, upstreams: dict[str, Upstream], servers: dict[str, Server], protocol: str
) -> None:
    before = requests_answered(servers["canary"])
    with (
        start(stable=upstreams["stable"], shadow=upstreams["canary"], shadow_percent=100) as door,
        door.client(protocol) as client,
    ):
        assert asked(client, 20) == {"stable": 20}
        wait_until(lambda: requests_answered(servers["canary"]) - before == 20)
        wait_until(lambda: sum(line["track"] == "shadow" for line in door.log()) == 20)
        assert all(line["status"] == 200 for line in door.log())


def test_a_shadow_that_is_not_there_is_no_matter(
    start: Start, upstreams: dict[str, Upstream], nobody: Upstream, protocol: str
) -> None:
    with (
        start(stable=upstreams["stable"], shadow=nobody, shadow_percent=100) as door,
        door.client(protocol) as client,
    ):
        assert asked(client, 5) == {"stable": 5}


def test_without_a_server_it_says_so_and_recovers_when_there_is_one(
    start: Start, servers: dict[str, Server], protocol: str
) -> None:
    """`serve up` keeps its ports; whoever listens there next is asked as soon as it does."""
    with (
        Front(free_ports()) as front,
        start(stable=Upstream(http=front.http, grpc=front.grpc)) as door,
        door.client(protocol) as client,
    ):
        with pytest.raises((Overloaded, Unreachable)):
            client.classify([images.flat(3)])
        front.point_at(servers["stable"])
        assert asked(client, 3) == {"stable": 3}
        front._process.kill()
        front._process.wait()
        with pytest.raises((ServerFailure, Unreachable), match="SERVER_LOST: no server is there"):
            client.classify([images.flat(3)])
        front.restart()
        front.point_at(servers["stable"])
        assert asked(client, 3) == {"stable": 3}

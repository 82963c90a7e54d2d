"""The same answers, the same errors and the same deadlines from asyncio, and many requests at once."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import tritonclient.http

from serve.async_client import ASYNC_CLIENTS, AsyncClient
from serve.protocol import DeadlineExceeded, RefusedInput, UnknownModel, Unreachable
from serve.release import Release
from serve.server import LOOPBACK, Server, free_ports
from tests import images
from tests.serve.tools import SLOW, SLOW_SECONDS, wait_until

pytestmark = pytest.mark.integration


@asynccontextmanager
async def connected(protocol: str, server: Server, **settings: Any) -> AsyncIterator[AsyncClient]:
    async with ASYNC_CLIENTS[protocol](server.urls[protocol], **settings) as client:
        yield client


def counts(server: Server) -> dict[str, tuple[int, int]]:
    """Model -> how often it ran, and how many images it was given."""
    with tritonclient.http.InferenceServerClient(server.http) as raw:
        statistics = {name: raw.get_inference_statistics(name) for name in ("preprocess", "classifier")}
    return {
        name: (found["model_stats"][0]["execution_count"], found["model_stats"][0]["inference_count"])
        for name, found in statistics.items()
    }


def test_many_at_once_get_their_own_answers_over_one_client(protocol: str, server: Server) -> None:
    """Case D16: what is asked together is worked on together, whatever its size."""

    async def ask() -> list[str]:
        async with connected(protocol, server) as client:
            sent = [client.classify([images.flat(k % 12)]) for k in range(96)]
            return [answer.label for (answer,) in await asyncio.gather(*sent)]

    def worked_on_together() -> bool:
        """Whether each model took fewer steps than there were requests."""
        before = counts(server)
        assert asyncio.run(ask()) == [str(k % 12) for k in range(96)]
        # Triton counts after it has answered.
        wait_until(lambda: all(counts(server)[name][1] - before[name][1] == 96 for name in before))
        after = counts(server)
        return all(after[name][0] - before[name][0] < 96 for name in before)

    # On a busy machine requests may come more slowly than they are answered; never to batch any is a fault.
    assert any(worked_on_together() for _ in range(20))


def test_answers_and_errors_are_those_of_the_other_client(
    protocol: str, server: Server, release: Release
) -> None:
    async def ask() -> None:
        async with connected(protocol, server) as client:
            first, second = await client.classify([images.flat(4), images.flat(9)], top=3)
            assert (first.label, second.label) == ("4", "9")
            assert (first.release, first.model_version, len(first.top)) == (release.identity, "1", 3)
            assert await client.server_version() == "2.51.0"
            with pytest.raises(RefusedInput, match="DAMAGED: image 1 of the request"):
                await client.classify([images.flat(0), images.truncated()])
        async with connected(protocol, server, version="99") as client:
            with pytest.raises(UnknownModel, match="99"):
                await client.classify([images.flat(0)])

    asyncio.run(ask())


def test_a_slow_answer_ends_at_the_deadline_and_the_next_answer_is_its_own(
    protocol: str, slow_server: Server
) -> None:
    """Case D09."""

    async def ask() -> None:
        async with connected(protocol, slow_server, deadline_seconds=SLOW_SECONDS / 2) as client:
            with pytest.raises(DeadlineExceeded, match=r"no answer within 2 s"):
                await client.classify([SLOW])
            client._deadline_seconds = 60  # the machine may be busy with other things
            assert (await client.classify([images.flat(9)]))[0].label == "9"

    asyncio.run(ask())


def test_no_server_is_unreachable_and_nothing_was_sent(protocol: str) -> None:
    """Case D09."""
    url = f"{LOOPBACK}:{free_ports().http}"

    async def ask() -> None:
        async with ASYNC_CLIENTS[protocol](url) as client:
            await client.classify([b""])

    with pytest.raises(Unreachable, match=f"{url}: no server answers there") as error:
        asyncio.run(ask())
    assert error.value.repeatable


def test_a_port_that_swallows_connections_is_unreachable_within_the_connect_deadline(
    protocol: str, blackhole: str
) -> None:
    """Case D09."""
    start = time.monotonic()

    async def ask() -> None:
        async with ASYNC_CLIENTS[protocol](blackhole, connect_seconds=0.5, deadline_seconds=600) as client:
            await client.classify([b""])

    with pytest.raises(Unreachable):
        asyncio.run(ask())
    assert time.monotonic() - start < 300


def test_a_connection_is_not_waited_for_beyond_the_deadline(protocol: str, blackhole: str) -> None:
    """Case D09."""
    start = time.monotonic()

    async def ask() -> None:
        async with ASYNC_CLIENTS[protocol](blackhole, connect_seconds=600, deadline_seconds=0.5) as client:
            await client.classify([b""])

    with pytest.raises(Unreachable):
        asyncio.run(ask())
    assert time.monotonic() - start < 300

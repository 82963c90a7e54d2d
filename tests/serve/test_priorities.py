"""Who waits for a busy server is served in the order of priorities: probes, then people, then bulk."""

import re
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from tritonclient.grpc.model_config_pb2 import ModelConfig

from serve import health, repository
from serve.client import CLIENTS
from serve.model_config import PRIORITIES, Priority
from serve.protocol import RefusedInput
from serve.release import open_release
from serve.server import START_SECONDS, Server, serving
from slipway.bundle import Bundle
from tests.serve.tools import edit_config, edit_text, variant, wait_until

pytestmark = pytest.mark.integration

# What the server says in its log when it begins to work on what it was sent; about the name of a file it works until
# that file is there. None of them is an image, which is what it answers then.
BEGINS = """\
    if data.isascii():  # which images are not
        print("begins", data.decode().rpartition("/")[2], flush=True)
    if data.startswith(b"/"):
        import pathlib, time

        while not pathlib.Path(data.decode()).exists():
            time.sleep(0.01)
"""


def wait_long(config: ModelConfig) -> None:
    config.dynamic_batching.default_queue_policy.default_timeout_microseconds = START_SECONDS * 1_000_000


@pytest.fixture(scope="module")
def patient_server(bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Has one instance of each model, and works as long as it is told to."""
    folder = tmp_path_factory.mktemp("patient")
    plain = open_release(repository.publish(bundle.directory, folder, "embedded", cpus=1))

    def edit(models: Path) -> None:
        edit_config(models / "preprocess", wait_long)
        line = "    image = decode(data, rules)\n"
        edit_text(models / "preprocess/1/slipway/preprocessing.py", line, f"{BEGINS}{line}")

    with serving(variant(plain, folder / "release", edit)) as server:
        yield server


def test_whatever_waits_is_served_in_the_order_of_priorities(
    patient_server: Server, protocol: str, tmp_path: Path
) -> None:
    """Through the ensemble, which has no queue of its own: what clients ask it for holds for its steps."""
    server, gate = patient_server, tmp_path / f"gate-{protocol}"

    def begun() -> list[str]:
        return re.findall(r"^begins (\S+)", server.log.read_text(), re.MULTILINE)

    def ask(name: str, priority: Priority) -> None:
        with (
            CLIENTS[protocol](
                server.urls[protocol], deadline_seconds=START_SECONDS, priority=priority
            ) as client,
            pytest.raises(RefusedInput, match="NOT_AN_IMAGE"),
        ):
            client.classify([name.encode()])

    def waits(count: int) -> bool:
        return health.load(server.metrics, START_SECONDS).waiting == count

    before = len(begun())
    later: list[Priority] = ["bulk", "bulk", "interactive", "probe", "interactive"]
    with ThreadPoolExecutor(6) as pool:  # all ask at once
        asked: list[Future[None]] = []
        try:
            asked.append(pool.submit(ask, str(gate), "bulk"))
            wait_until(lambda: begun()[before:] == [gate.name])
            for count, priority in enumerate(later, start=1):
                asked.append(pool.submit(ask, f"{priority}-{protocol}", priority))
                wait_until(partial(waits, count))
        finally:
            gate.touch()
        for one in asked:
            one.result()
    order = ["probe", "interactive", "interactive", "bulk", "bulk"]
    assert begun()[before:] == [gate.name, *(f"{priority}-{protocol}" for priority in order)]
    assert sorted(PRIORITIES, key=PRIORITIES.__getitem__) == list(dict.fromkeys(order))

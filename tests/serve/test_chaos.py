"""Everything that may happen to a service happens to it, under steady load, and no answer is ever wrong.

    make chaos-serve    five rounds of each, with the times of recovery asserted

In between, as part of all tests, it is one round: how long things take is printed, and what is asserted is that they
end well. The tests go on with one service, in their order.
"""

import re
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
from tritonclient.grpc.model_config_pb2 import ModelConfig

from serve import shared_memory
from serve.client import CLIENTS
from serve.front import DRAIN_SECONDS
from serve.protocol import Answer, Overloaded, ServingError
from serve.release import Release
from serve.server import STOP_SECONDS
from tests import images
from tests.serve.chaos import (
    RECOVERY_PERIODS,
    Disturbed,
    fault,
    found_after,
    probe_seconds,
    wait_until_steady,
)
from tests.serve.load import Load, labels_of
from tests.serve.service import up
from tests.serve.tools import PATIENCE, command_of, edit_config, variant, wait_until, wait_until_gone

pytestmark = [pytest.mark.integration, pytest.mark.timeout(3600)]

# Short, so that it can be filled.
QUEUE = 8
OVERLOAD = 10


@pytest.fixture(scope="module")
def both(
    release: Release, reverse_release: Release, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Release, Release]:
    """Two releases with short queues in one repository."""

    def short_queue(models: Path) -> None:
        for model in ("preprocess", "classifier"):
            edit_config(models / model, set_queue)

    def set_queue(config: ModelConfig) -> None:
        config.dynamic_batching.default_queue_policy.max_queue_size = QUEUE

    releases = tmp_path_factory.mktemp("chaos") / "releases"
    return variant(release, releases / "tiny-1", short_queue), variant(
        reverse_release, releases / "tiny-2", short_queue
    )


@pytest.fixture(scope="module")
def service(
    both: tuple[Release, Release], rounds: int, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Disturbed]:
    models = both[0].directory.parents[1]
    (models / "current").symlink_to(both[0].directory)
    with up(models, tmp_path_factory.mktemp("up") / "log", probe_seconds(rounds)) as service:
        with Load(service.urls, labels_of(*both)) as load:
            yield Disturbed(**vars(service), load=load, rounds=rounds)
        assert not load.wrong


@pytest.mark.parametrize(
    ("name", "victim", "kind"),
    [
        ("SIGKILL the server", "server", signal.SIGKILL),
        ("SIGKILL a worker", "preprocess", signal.SIGKILL),
        ("SIGSTOP a worker", "classifier", signal.SIGSTOP),
    ],
)
def test_a_dead_or_wedged_process_is_replaced(
    service: Disturbed, name: str, victim: str, kind: signal.Signals
) -> None:
    """Cases D03 and D14. Objective: found within two probe periods, typed errors until it is replaced, then none."""
    for _ in range(service.rounds):
        wait_until_steady(service)
        with fault(service, name, errors_allowed=True):
            process = psutil.Process(service.server) if victim == "server" else service.worker(victim)
            seconds = found_after(service, process, kind)
        print(f", found after {seconds:.1f} s", end="")
        assert not service.strict or seconds <= 2 * service.probe_seconds


def test_a_release_is_switched_and_rolled_back(service: Disturbed, both: tuple[Release, Release]) -> None:
    """Cases D04 and D13. Objective: no error; soon nobody is answered by the release from before."""
    for _ in range(service.rounds):
        with fault(service, "switch the release", errors_allowed=False):
            assert service.serve("promote", "tiny-2") == 0
            wait_until(lambda: service.load.only_answered_by(both[1].identity))
        with fault(service, "roll it back", errors_allowed=False):
            start = time.monotonic()
            assert service.serve("rollback") == 0
            wait_until(lambda: service.load.only_answered_by(both[0].identity))
            print(f"\nrolled back after {time.monotonic() - start:.1f} s", end="")
            assert not service.strict or time.monotonic() - start <= RECOVERY_PERIODS * service.probe_seconds


def test_a_corrupt_release_changes_nothing(service: Disturbed, both: tuple[Release, Release]) -> None:
    """Case D04. Objective: no error, by `promote` and past it."""
    corrupt = variant(both[1], service.models / "releases" / "corrupt", lambda _: None).directory
    labels = corrupt / "models" / "classify" / "labels.txt"
    labels.chmod(0o644)
    labels.write_text("corrupt\n")
    with fault(service, "offer a corrupt release", errors_allowed=False):
        assert service.serve("promote", "corrupt") == 1
        service.lead_to(corrupt)
        wait_until(lambda: f"{corrupt} is refused" in service.log.read_text())
        service.lead_to(both[0].directory)
    assert service.load.only_answered_by(both[0].identity)


def test_ten_times_what_the_queue_holds_is_refused_in_words(service: Disturbed) -> None:
    """Objective: whoever is not answered rightly is told that it is too much; afterwards no error."""
    large = images.encode(images.noise(1, 1000, 1000), compress_level=1)

    def ask(protocol: str) -> Answer | ServingError:
        url = service.urls[protocol]
        with CLIENTS[protocol](url, connect_seconds=PATIENCE, deadline_seconds=PATIENCE) as client:
            try:
                return client.classify([large])[0]
            except ServingError as error:
                return error

    for _ in range(service.rounds):
        with (
            fault(service, "ten times what the queue holds", errors_allowed=True),
            ThreadPoolExecutor(OVERLOAD * QUEUE) as pool,
        ):
            answers = list(pool.map(ask, [*CLIENTS] * (OVERLOAD * QUEUE // len(CLIENTS))))
        labels = {answer.label for answer in answers if isinstance(answer, Answer)}
        refused = [answer for answer in answers if isinstance(answer, ServingError)]
        print(f", {len(refused)} of {len(answers)} refused", end="")
        assert len(labels) == 1
        assert {type(error) for error in refused} <= {Overloaded}
        assert refused or not service.strict  # a slow machine may not send as fast as it answers


def test_half_sent_requests_disturb_nobody(service: Disturbed) -> None:
    """Objective: no error. Some stand still, some trickle."""
    head = b"POST /v2/models/classify/infer HTTP/1.1\r\nHost: slipway\r\nContent-Length: 100000\r\n\r\n"
    host, port = service.urls["http"].split(":")
    for _ in range(service.rounds):
        with ExitStack() as stack, fault(service, "half-sent requests", errors_allowed=False):
            loris = [stack.enter_context(socket.create_connection((host, int(port)))) for _ in range(100)]
            for connection in loris:
                connection.sendall(head)
            for _ in range(20):
                for connection in loris[::2]:
                    connection.sendall(b"x")
                time.sleep(0.05)


def test_sigterm_under_load_ends_well(service: Disturbed) -> None:
    """Objective: exit code 0, nothing but "no server is there" for the clients, and nothing left.

    Case D19: no shared memory either.
    """
    start = time.monotonic()
    wait_until(lambda: service.load.all_well_since(start))
    children = psutil.Process(service.process.pid).children(recursive=True)
    identities = set(re.findall(r"--id=(\S+)", " ".join(map(command_of, children))))
    start = time.monotonic()
    service.process.terminate()
    assert service.process.wait(PATIENCE) == 0
    seconds = time.monotonic() - start
    print(
        f"\nSIGTERM under load: ended after {seconds:.1f} s, {dict(service.load.errors_since(start))}", end=""
    )
    assert not service.load.wrong
    assert not service.strict or service.load.errors_since(start).keys() <= {"Unreachable"}
    wait_until_gone(child.pid for child in children)
    assert not [path for identity in identities for path in shared_memory.DIRECTORY.glob(f"{identity}*")]
    assert not service.strict or seconds <= STOP_SECONDS + DRAIN_SECONDS

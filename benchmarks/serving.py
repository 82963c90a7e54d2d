"""Served requests a second, against the same work in a loop without a server, and behind other servers.

    make benchmark-serving

The limit is a loop in as many processes as there are clients or CPUs, whichever are fewer: decode, resize, run the
model in one thread, one image after the other. Served are the same images, the golden ones of the release, one in a
request, to closed loops of 1, 4 and 16 clients: straight to Triton over HTTP and gRPC, through the HAProxy of
`serve up`, and by the peers of benchmarks/peers, which do the same work with the same code. With --peers-release they
serve another release, say that of the plain ONNX file where ours serves int8.

Clients share the machine with the servers, and what they cost is part of the result. Every answer is checked. Ways
take turns, so that a machine that slows down slows all of them; a result is the median of its repeats. Then each way
is asked at 50 to 120 % of what it reached with 16 clients, whether it has answered or not; a latency counts from the
moment at which the request was due.

Exits 1 if the best way to be served falls short of a target.
"""

import argparse
import signal
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from multiprocessing import get_context
from pathlib import Path

from benchmarks import peers, results
from benchmarks.loops import Ask, Connect, Tail, ask_about, closed_loop, open_loop
from benchmarks.results import Ratio
from benchmarks.work import Work
from serve.client import CLIENTS
from serve.cpus import available_cpus
from serve.front import Front
from serve.protocol import DEADLINE_SECONDS
from serve.release import Release, open_release
from serve.server import free_ports, serving
from slipway.paths import PROJECT_ROOT

# Clients -> the least share of the limit that has to be served.
TARGETS = {1: 0.0, 4: 0.90, 16: 0.90}
LIMIT = "limit"
# Ours against the best peer; where it serves another artefact than they do, it has to be worth it.
PEER_TARGET, OTHER_ARTEFACT_TARGET = 1.0, 2.0
# Shares of what a way reached with the most clients; at one of them, the most that p99 may be of p50.
SHARES = (0.5, 0.7, 0.9, 1.2)
TAIL_SHARE, TAIL_TARGET = 0.7, 3.0

# `run(clients, seconds)` is how many images a second were answered rightly.
Run = Callable[[int, float], float]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="benchmarks/serving.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    current = PROJECT_ROOT / "model_repository" / "current"
    parser.add_argument("--release", type=Path, default=current, help="default: the one that is current")
    parser.add_argument("--peers-release", type=Path, help="what the peers serve (default: the same)")
    parser.add_argument("--peers", nargs="*", choices=peers.PEERS, default=list(peers.PEERS))
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement (default: 5)")
    parser.add_argument("--repeats", type=int, default=5, help="of each measurement (default: 5)")
    results.add_option(parser)
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that nothing that was started stays
    release = open_release(options.release)
    theirs = open_release(options.peers_release or options.release)
    with ExitStack() as stack:
        limit = stack.enter_context(limit_of(release))
        ours = stack.enter_context(ways(release))
        others = {name: stack.enter_context(peer(name, theirs)) for name in options.peers}
        runs: dict[str, Run] = {LIMIT: limit}
        runs |= {name: partial(closed_loop, connect, release) for name, connect in ours.items()}
        runs |= {name: partial(closed_loop, connect, theirs) for name, connect in others.items()}
        rates = measure(runs, options.seconds, options.repeats)
        tails = {
            name: [
                open_loop(connect, served, share * rates[max(TARGETS)][name], options.seconds)
                for share in SHARES
            ]
            for connects, served in ((ours, release), (others, theirs))
            for name, connect in connects.items()
        }
    print(f"{release.identity} ({release.artefact}), {available_cpus()} CPUs, medians of {options.repeats}")
    print(f"peers: {theirs.identity} ({theirs.artefact})\n")
    found = report_rates(rates, list(ours), list(others), other_artefact=release.artefact != theirs.artefact)
    found.append(report_tails(tails, max(ours, key=rates[max(TARGETS)].__getitem__)))
    results.append(options.json, "serving", found)
    return int(any(ratio.missed for ratio in found))


@contextmanager
def limit_of(release: Release) -> Iterator[Run]:
    """The same work in processes of their own, without a server."""
    pool = ProcessPoolExecutor(
        available_cpus(), get_context("spawn"), initializer=load, initargs=(release.directory,)
    )

    def run(clients: int, seconds: float) -> float:
        processes = min(clients, available_cpus())
        return sum(pool.map(work_in_a_loop, [seconds] * processes))

    with pool:
        yield run


@contextmanager
def ways(release: Release) -> Iterator[dict[str, Connect]]:
    """Name -> how to ask our server in that way."""

    @contextmanager
    def connect(protocol: str, url: str) -> Iterator[Ask]:
        with CLIENTS[protocol](url, deadline_seconds=DEADLINE_SECONDS) as client:
            yield lambda image: client.classify([image])[0].probabilities

    with serving(release) as server, Front(free_ports()) as front:
        front.point_at(server)
        yield {
            "Triton, HTTP": partial(connect, "http", server.http),
            "Triton, gRPC": partial(connect, "grpc", server.grpc),
            "HAProxy, HTTP": partial(connect, "http", front.http),
            "HAProxy, gRPC": partial(connect, "grpc", front.grpc),
        }


@contextmanager
def peer(name: str, release: Release) -> Iterator[Connect]:
    """How to ask a peer."""
    with peers.running(name, release.directory, available_cpus(), release.golden[0].image) as port:

        @contextmanager
        def connect() -> Iterator[Ask]:
            client = peers.PeerClient(name, port)
            try:
                yield client.probabilities
            finally:
                client.close()

        yield connect


def measure(runs: Mapping[str, Run], seconds: float, repeats: int) -> dict[int, dict[str, float]]:
    """Clients -> way -> images a second. The first round warms up and does not count."""
    found: dict[int, dict[str, list[float]]] = {clients: defaultdict(list) for clients in TARGETS}
    for repeat in range(repeats + 1):
        for clients in TARGETS:
            for name, run in runs.items():
                rate = run(clients, seconds)
                if repeat > 0:
                    found[clients][name].append(rate)
        print(f"round {repeat} of {repeats}", file=sys.stderr)
    return {
        clients: {name: statistics.median(rates) for name, rates in own.items()}
        for clients, own in found.items()
    }


def report_rates(
    rates: Mapping[int, Mapping[str, float]],
    ours: Sequence[str],
    others: Sequence[str],
    *,
    other_artefact: bool,
) -> list[Ratio]:
    """Print a table; returns what our best way reached of the limit and of the best peer, by number of clients."""
    peer_target = OTHER_ARTEFACT_TARGET if other_artefact else PEER_TARGET
    print(f"{'clients':>7}  {'way':14}  {'images/s':>8}  {'of limit':>8}  our best")
    found = []
    for clients, own in rates.items():
        best, target = max(ours, key=own.__getitem__), TARGETS[clients]
        ratios = [of("the limit", clients, own[best] / own[LIMIT], target or None)]
        if others:
            best_peer = max(own[name] for name in others)
            ratios.append(
                of("the best peer", clients, own[best] / best_peer, peer_target if target else None)
            )
        for name, rate in own.items():
            note = "; ".join(map(described, ratios)) if name == best else ""
            print(f"{clients:7}  {name:14}  {rate:8.1f}  {rate / own[LIMIT]:8.2f}  {note}")
        found += ratios
    return found


def of(what: str, clients: int, value: float, target: float | None) -> Ratio:
    return Ratio(name=f"share of {what}, {clients} clients", value=value, target=target)


def described(ratio: Ratio) -> str:
    wanted = "" if ratio.target is None else f", wanted {ratio.target:.2f}{' FALLS SHORT' * ratio.missed}"
    return f"{ratio.value:.2f} {ratio.name.partition(',')[0]}{wanted}"


def report_tails(tails: Mapping[str, Sequence[Tail]], best: str) -> Ratio:
    """Print a table; returns how long the tail of our best way is."""
    print("\nopen loop: p50 / p99 in ms at a share of what was reached with the most clients")
    print(f"{'way':14}  " + "  ".join(f"{f'{100 * share:.0f} %':>15}" for share in SHARES))
    for name, own in tails.items():
        print(f"{name:14}  " + "  ".join(f"{each.p50:6.0f} / {each.p99:6.0f}" for each in own))
    tail = tails[best][SHARES.index(TAIL_SHARE)]
    ratio = Ratio(
        name=f"p99 over p50 at {100 * TAIL_SHARE:.0f} %, open loop",
        value=tail.p99 / tail.p50,
        better="lower",
        target=TAIL_TARGET,
    )
    print(f"{best}: {described(ratio)}")
    return ratio


def load(release_directory: Path) -> None:
    """In a process of the limit."""
    global _work  # noqa: PLW0603 - a process pool has no other place for it
    _work = Work(release_directory)


def work_in_a_loop(seconds: float) -> float:
    """Images a second that one process of the limit answered."""
    count, start = 0, time.perf_counter()
    while time.perf_counter() < start + seconds:
        ask_about(_work.probabilities, _work.release, count)
        count += 1
    return count / seconds


_work: Work

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

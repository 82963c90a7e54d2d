"""Served requests a second, against the same work in a loop without a server, and behind other servers.

    make benchmark-serving                           bundles of its own: ResNet-18, 224 pixels, JPEGs of 500 x 375
    make benchmark-serving BUNDLE=bundles/digits/1   yours

The limit is a loop in as many processes as there are clients or CPUs, whichever are fewer: decode, resize, run the
model in one thread, one image after the other. Served are the same images, the golden ones of the bundle, one in a
request, to closed loops of 1, 4 and 16 clients: by Triton behind the HAProxy of `serve up`, as an ensemble and as one
fused model, over HTTP and gRPC; and by the peers of benchmarks/peers, which do the same work with the same code. With
--best, ours serves that bundle as well, say one of int8 beside the plain ONNX file that peers serve.

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
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path

from benchmarks import command, peers, results
from benchmarks.loops import Ask, Connect, Tail, ask_about, closed_loop, open_loop
from benchmarks.results import Ratio
from benchmarks.work import Work
from serve.client import CLIENTS
from serve.front import Front
from serve.protocol import DEADLINE_SECONDS
from serve.release import Release, open_release
from serve.repository import publish
from serve.server import free_ports, serving
from slipway.cpus import available_cpus

# Closed loops of so many clients; from CLIENTS_FOR_TARGETS on there are targets.
CLIENTS_OF_LOOPS, CLIENTS_FOR_TARGETS = (1, 4, 16), 4
LIMIT = "limit"
# The same artefact, served: the least share of the limit, and of the best peer. The best bundle has to be worth it.
LIMIT_TARGET, PEER_TARGET, BEST_TARGET = 0.90, 1.0, 2.0
# Shares of what a way reached with the most clients; at one of them, the most that p99 may be of p50.
SHARES = (0.5, 0.7, 0.9, 1.2)
TAIL_SHARE, TAIL_TARGET = 0.7, 3.0
WIDTH = 35  # of a column

# `run(clients, seconds)` is how many images a second were answered rightly.
Run = Callable[[int, float], float]


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A way to be answered. release: what it serves, and what its answers are held to."""

    release: Release
    connect: Connect


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="benchmarks.serving", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("bundle", type=Path, help="what is served, by peers too")
    parser.add_argument("--best", type=Path, help="a bundle that ours serves as well, and peers do not")
    parser.add_argument("--peers", nargs="*", choices=peers.PEERS, default=list(peers.PEERS))
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement (default: 3)")
    parser.add_argument("--repeats", type=int, default=5, help="of each measurement (default: 5)")
    results.add_option(parser)
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that nothing that was started stays
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        release = published(options.bundle, folder)
        ours = stack.enter_context(ways(options.bundle, folder))
        best = stack.enter_context(ways(options.best, folder / "best", "best, ")) if options.best else {}
        others = {name: stack.enter_context(peer(name, release)) for name in options.peers}
        contenders = ours | best | others
        runs: dict[str, Run] = {LIMIT: stack.enter_context(limit_of(release))}
        runs |= {name: partial(closed_loop, one.connect, one.release) for name, one in contenders.items()}
        rates = measure(runs, options.seconds, options.repeats)
        most = rates[max(CLIENTS_OF_LOOPS)]
        tails = {
            name: [
                open_loop(one.connect, one.release, share * most[name], options.seconds) for share in SHARES
            ]
            for name, one in contenders.items()
        }
    print(f"{available_cpus()} CPUs, medians of {options.repeats}; the limit and peers: {release.artefact}\n")
    found = report_rates(rates, ours, best, others)
    found += report_tails(tails, [max(each, key=most.__getitem__) for each in (ours, best) if each])
    results.append(options.json, "serving", found)
    return int(any(ratio.missed for ratio in found))


def published(bundle: Path, repository: Path, *, fused: bool = False) -> Release:
    return open_release(publish(bundle, repository, "embedded", available_cpus(), fused=fused))


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
def ways(bundle: Path, repository: Path, prefix: str = "") -> Iterator[dict[str, Contender]]:
    """Name -> our server, asked in that way. prefix: of the names, where another bundle serves the same artefact."""

    @contextmanager
    def connect(protocol: str, url: str) -> Iterator[Ask]:
        with CLIENTS[protocol](url, deadline_seconds=DEADLINE_SECONDS) as client:
            yield lambda image: client.classify([image])[0].probabilities

    found: dict[str, Contender] = {}
    with ExitStack() as stack:
        for form in ("ensemble", "fused"):
            release = published(bundle, repository, fused=form == "fused")
            front = stack.enter_context(Front(free_ports()))
            front.point_at(stack.enter_context(serving(release)))
            found |= {
                f"{prefix}{release.artefact}, {form}, {protocol}": Contender(
                    release=release, connect=partial(connect, protocol, url)
                )
                for protocol, url in front.urls.items()
            }
        yield found


@contextmanager
def peer(name: str, release: Release) -> Iterator[Contender]:
    with peers.running(name, release.directory, available_cpus(), release.golden[0].image) as port:

        @contextmanager
        def connect() -> Iterator[Ask]:
            client = peers.PeerClient(name, port)
            try:
                yield client.probabilities
            finally:
                client.close()

        yield Contender(release=release, connect=connect)


def measure(runs: Mapping[str, Run], seconds: float, repeats: int) -> dict[int, dict[str, float]]:
    """Clients -> way -> images a second. The first round warms up and does not count."""
    found: dict[int, dict[str, list[float]]] = {clients: defaultdict(list) for clients in CLIENTS_OF_LOOPS}
    for repeat in range(repeats + 1):
        for clients in CLIENTS_OF_LOOPS:
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
    rates: Mapping[int, Mapping[str, float]], ours: Iterable[str], best: Iterable[str], others: Iterable[str]
) -> list[Ratio]:
    """Print a table; returns how the best way of each kind does beside the limit and the best peer."""
    found = []
    print(f"{'clients':>7}  {'way':{WIDTH}}  {'images/s':>8}  {'of limit':>8}")
    for clients, own in rates.items():
        for name, rate in own.items():
            print(f"{clients:7}  {name:{WIDTH}}  {rate:8.1f}  {rate / own[LIMIT]:8.2f}")
        served, better, peer = (
            max((own[name] for name in names), default=0) for names in (ours, best, others)
        )
        quotients = [("ours / limit", served, own[LIMIT], LIMIT_TARGET)]
        if peer:
            quotients.append(("ours / best peer", served, peer, PEER_TARGET))
        if peer and better:
            quotients.append(("our best bundle / best peer", better, peer, BEST_TARGET))
        for name, one, other, target in quotients:
            found.append(
                Ratio(
                    name=f"{name}, {clients} clients",
                    value=one / other,
                    target=target if clients >= CLIENTS_FOR_TARGETS else None,
                )
            )
            print(f"         {described(found[-1])}")
    return found


def described(ratio: Ratio) -> str:
    wanted = "no target" if ratio.target is None else f"target {ratio.target:.2f}{', MISSED' * ratio.missed}"
    return f"{ratio.name}: {ratio.value:.2f} ({wanted})"


def report_tails(tails: Mapping[str, Sequence[Tail]], judged: Iterable[str]) -> list[Ratio]:
    """Print a table; returns how long the tails are of the ways that are judged."""
    print("\nopen loop: p50 / p99 in ms at a share of what was reached with the most clients")
    print(f"{'way':{WIDTH}}  " + "  ".join(f"{f'{100 * share:.0f} %':>15}" for share in SHARES))
    for name, own in tails.items():
        print(f"{name:{WIDTH}}  " + "  ".join(f"{each.p50:6.0f} / {each.p99:6.0f}" for each in own))
    found = []
    for name in judged:
        tail = tails[name][SHARES.index(TAIL_SHARE)]
        found.append(
            Ratio(
                name=f"p99 / p50 at {100 * TAIL_SHARE:.0f} %, {name}",
                value=tail.p99 / tail.p50,
                better="lower",
                target=TAIL_TARGET,
            )
        )
        print(described(found[-1]))
    return found


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
    return count / (time.perf_counter() - start)


_work: Work

if __name__ == "__main__":
    command.run(main)

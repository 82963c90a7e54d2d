"""Served requests a second, against the same work in a loop without a server.

    make benchmark-serving

The limit is a loop in as many processes as there are clients or CPUs, whichever are fewer: decode, resize, run the
model in one thread, one image after the other. Served are the same images, the golden ones of the release, one in a
request, to closed loops of 1, 4 and 16 clients: straight to Triton over HTTP and gRPC, and through the HAProxy of
`serve up`. Clients share the machine with the server, and what they cost is part of the result. Every answer is
checked. Ways take turns, so that a machine that slows down slows all of them; a result is the median of its repeats.

Exits 1 if the best way to be served falls short of a target.
"""

import argparse
import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks import results
from benchmarks.results import Ratio
from serve.client import CLIENTS
from serve.cpus import available_cpus
from serve.front import Front
from serve.model_config import CLASSIFIER
from serve.models import runtime
from serve.protocol import DEADLINE_SECONDS
from serve.release import GoldenAnswer, Release, open_release
from serve.server import free_ports, serving
from slipway.paths import PROJECT_ROOT
from slipway.preprocessing import preprocess

# Clients -> the least share of the limit that has to be served.
TARGETS = {1: 0.0, 4: 0.90, 16: 0.90}
LIMIT = "limit"

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
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement (default: 5)")
    parser.add_argument("--repeats", type=int, default=5, help="of each measurement (default: 5)")
    results.add_option(parser)
    options = parser.parse_args(arguments)
    release = open_release(options.release)
    with ways(release) as runs:
        rates = measure(runs, options.seconds, options.repeats)
    print(
        f"{release.identity}, {available_cpus()} CPUs, {len(release.golden)} images, medians of {options.repeats}\n"
    )
    found = report(rates)
    results.append(options.json, "serving", found)
    return int(any(ratio.missed for ratio in found))


@contextmanager
def ways(release: Release) -> Iterator[dict[str, Run]]:
    """Name -> how to have images answered in that way."""
    pool = ProcessPoolExecutor(
        available_cpus(), get_context("spawn"), initializer=load, initargs=(release.directory,)
    )
    with pool, serving(release) as server, Front(free_ports()) as front:
        front.point_at(server)

        def loop(clients: int, seconds: float) -> float:
            processes = min(clients, available_cpus())
            return sum(pool.map(answer_in_a_loop, [seconds] * processes)) / seconds

        def served(protocol: str, url: str) -> Run:
            def run(clients: int, seconds: float) -> float:
                with ThreadPoolExecutor(clients) as threads:
                    asked = [
                        threads.submit(ask_in_a_loop, release, protocol, url, seconds) for _ in range(clients)
                    ]
                    return sum(one.result() for one in asked) / seconds

            return run

        yield {
            LIMIT: loop,
            "Triton, HTTP": served("http", server.http),
            "Triton, gRPC": served("grpc", server.grpc),
            "HAProxy, HTTP": served("http", front.http),
            "HAProxy, gRPC": served("grpc", front.grpc),
        }


def measure(runs: dict[str, Run], seconds: float, repeats: int) -> dict[int, dict[str, float]]:
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


def report(rates: dict[int, dict[str, float]]) -> list[Ratio]:
    """Print a table; returns what share of the limit the best way reached, for each number of clients."""
    print(f"{'clients':>7}  {'way':14}  {'images/s':>8}  {'of limit':>8}  target of the best")
    found = []
    for clients, own in rates.items():
        best = max((name for name in own if name != LIMIT), key=own.__getitem__)
        share_of_best = Ratio(
            name=f"share of the limit, {clients} clients",
            value=own[best] / own[LIMIT],
            target=TARGETS[clients] or None,
        )
        found.append(share_of_best)
        for name, rate in own.items():
            share, note = rate / own[LIMIT], ""
            if name == best and share_of_best.target:
                note = f"  {share_of_best.target:.2f}{'  falls short' if share_of_best.missed else ''}"
            print(f"{clients:7}  {name:14}  {rate:8.0f}  {share:8.2f}{note}")
    return found


def ask_in_a_loop(release: Release, protocol: str, url: str, seconds: float) -> int:
    """How many images one client got the right answer to."""
    count, end = 0, time.perf_counter() + seconds
    with CLIENTS[protocol](url, deadline_seconds=DEADLINE_SECONDS) as client:
        while time.perf_counter() < end:
            golden = release.golden[count % len(release.golden)]
            (answer,) = client.classify([golden.image])
            check(answer.probabilities, golden, release)
            count += 1
    return count


def load(release_directory: Path) -> None:
    """In a process of the limit: what a server keeps between requests."""
    global _release, _model  # noqa: PLW0603 - a process pool has no other place for it
    _release = open_release(release_directory)
    directory = _release.models / CLASSIFIER / str(_release.version)
    artefact = json.loads((directory / "serving.json").read_bytes())["artefact"]
    _model = runtime.load(artefact["runtime"], directory / artefact["file"], artefact["settings"], threads=1)


def answer_in_a_loop(seconds: float) -> int:
    """How many images one process of the limit got the right answer to."""
    count, end = 0, time.perf_counter() + seconds
    while time.perf_counter() < end:
        golden = _release.golden[count % len(_release.golden)]
        pixels = preprocess(golden.image, _release.signature.preprocessing)
        _, probabilities = _model(pixels[None])
        check(probabilities[0], golden, _release)
        count += 1
    return count


def check(found: npt.NDArray[np.float32], golden: GoldenAnswer, release: Release) -> None:
    """Ends the benchmark if an answer is wrong: nothing is worth measuring then."""
    difference = np.abs(found - golden.probabilities).max()
    if not difference <= release.tolerance:
        raise SystemExit(f"a golden image was answered wrongly: probabilities differ by {difference:.2g}")


_release: Release
_model: runtime.Run

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

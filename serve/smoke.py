"""The smoke test: every test image through a real server, and every answer equal to offline evaluation's.

What the artefact that the release serves was found to answer offline stands in `predictions.jsonl`, one line an image:

    {"file": "7/0012.png", "sha256": ..., "label": "7", "predicted": "7", "probabilities": [...]}
"""

import json
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from serve import health, server
from serve.client import CLIENTS, Client
from serve.protocol import DEADLINE_SECONDS, MAX_REQUEST_BYTES, Answer, RefusedInput, ServingError
from serve.release import Release, open_release
from serve.server import Server
from slipway import hashing, sealed
from slipway.bundle import KIND as BUNDLE
from slipway.bundle import SERVED_PREDICTIONS
from slipway.errors import SlipwayError, UsageError
from slipway.sealed import SealError

WORKERS = 4
PREDICTIONS = "predictions.jsonl"
DISAGREEMENTS_SHOWN = 20
# How each protocol says that the request, not the server, is at fault.
CLIENT_ERROR = {"http": "400", "grpc": "INVALID_ARGUMENT"}

Item = TypeVar("Item")
Result = TypeVar("Result")

logger = logging.getLogger(__name__)


class SmokeTestFailed(SlipwayError):
    """The server does not do what the release promises."""


@dataclass(frozen=True, kw_only=True)
class Expected:
    """One image and what offline evaluation says about it. `probabilities`: float64 [classes]."""

    path: Path
    file: str
    label: str
    probabilities: npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How one image was answered in one request. `problem` is empty if it agrees with offline evaluation."""

    file: str
    protocol: str
    batch: int
    difference: float
    seconds: float
    problem: str


@dataclass(frozen=True, kw_only=True)
class ProtocolResult:
    """agreeing: images whose every answer over this protocol agreed, alone and in a batch."""

    images: int
    agreeing: int
    max_probability_difference: float
    requests_per_second: float
    p50_ms: float
    p99_ms: float


def predictions_of(release: Release, bundle: Path, evaluation: Path) -> Path:
    """The file that says what the artefact of a bundle that is served was found to answer offline.

    It is the evaluation's own, but where another artefact than the plain ONNX file is served: export has measured that.

    Raises:
        UsageError: `bundle` is none, or not the one that the release was made of.
        SealError: it is damaged.
    """
    try:
        seal = sealed.read_manifest(bundle).seal
    except SealError as error:
        raise UsageError(f"{error}; expected the bundle that {release.directory} was made of") from None
    if seal != release.bundle:
        raise UsageError(f"{bundle}: is not the bundle that {release.directory} was made of")
    sealed.verify(bundle, BUNDLE)
    of_served = bundle / SERVED_PREDICTIONS
    return of_served if of_served.exists() else evaluation / PREDICTIONS


def run(release_directory: Path, images: Path, predictions: Path, output: Path) -> Path:
    """Start a server, compare all its answers, write the result to `output` and return that path.

    Raises:
        UsageError: there is no file of predictions.
        SmokeTestFailed: something disagrees.
        ServerError, SealError, ServingError: there was no server to compare with, or it broke down.

    The result is written in all cases but the first.
    """
    if not predictions.is_file():
        raise UsageError(f"{predictions}: is not a file; `make evaluate` writes it")
    result: dict[str, Any] = {
        "verdict": "failed",
        "problem": "",
        "server": "",
        "release": "",
        "protocols": {},
        "bad_inputs": [],
        "disagreements": [],
    }
    try:
        release = open_release(release_directory)
        result["release"] = release.identity
        expected = read_predictions(predictions, images)
        with server.serving(release) as running:
            problems = _test(running, release, expected, result)
        if problems:
            raise SmokeTestFailed(f"{problems[0]} (problems in all: {len(problems)}; see {output})")
        result["verdict"] = "passed"
    except SlipwayError as error:
        result["problem"] = str(error)
        raise
    finally:
        output.parent.mkdir(parents=True, exist_ok=True)
        sealed.write_json(output, result)
    return output


def read_predictions(predictions: Path, images: Path) -> list[Expected]:
    """Raises SmokeTestFailed if there are none, or an image is not the one that was evaluated."""
    with predictions.open(encoding="utf-8") as lines:
        expected = [
            _read_prediction(line, images, f"{predictions}:{number}")
            for number, line in enumerate(lines, start=1)
        ]
    if not expected:
        raise SmokeTestFailed(f"{predictions}: holds no predictions")
    return expected


def _read_prediction(line: str, images: Path, where: str) -> Expected:
    try:
        entry = json.loads(line)
        image = Expected(
            path=images / entry["file"],
            file=entry["file"],
            label=entry["predicted"],
            probabilities=np.array(entry["probabilities"], dtype=np.float64),
        )
        sha256 = entry["sha256"]
    except (ValueError, KeyError, TypeError) as error:
        raise SmokeTestFailed(f"{where}: is not a prediction ({error!r})") from error
    if not image.path.is_file():
        raise SmokeTestFailed(f"{where}: {image.path} does not exist")
    if hashing.of_file(image.path) != sha256:
        raise SmokeTestFailed(f"{image.path}: is not the file that was evaluated (SHA-256 in {where})")
    return image


def _test(running: Server, release: Release, expected: list[Expected], result: dict[str, Any]) -> list[str]:
    """Fill in `result`; return a sentence for each problem."""
    with CLIENTS["http"](running.http) as client:
        result["server"] = f"Triton {client.server_version()}"
    outcomes: list[Outcome] = []
    result["protocols"] = {}
    for protocol, url in running.urls.items():
        summary, own = compare_all(protocol, url, expected, release)
        result["protocols"][protocol] = asdict(summary)
        outcomes += own
        logger.info(
            "%s: %d of %d images agree with offline evaluation", protocol, summary.agreeing, summary.images
        )
    disagreeing = [outcome for outcome in outcomes if outcome.problem]
    result["disagreements"] = [asdict(outcome) for outcome in disagreeing[:DISAGREEMENTS_SHOWN]]
    result["bad_inputs"] = send_bad_inputs(running.urls, expected)
    _check_alive(running, release)
    return [
        f"{outcome.file}: over {outcome.protocol}, in a batch of {outcome.batch}, {outcome.problem}"
        for outcome in disagreeing
    ] + [
        f"{bad['name']}: was answered {bad['http']!r} over HTTP and {bad['grpc']!r} over gRPC; a client error was "
        "expected, and right answers for the requests sent with it"
        for bad in result["bad_inputs"]
        if not bad["passed"]
    ]


def compare_all(
    protocol: str, url: str, expected: Sequence[Expected], release: Release
) -> tuple[ProtocolResult, list[Outcome]]:
    """Each image alone, which is what is timed, and then all in full batches."""

    def ask(client: Client, batch: Sequence[Expected]) -> list[Outcome]:
        return _compare(protocol, client, batch, release.tolerance)

    # The first requests of a connection pay for setting it up.
    _in_parallel(protocol, url, [[image] for image in expected[:WORKERS]], ask)
    start = time.perf_counter()
    singles = _in_parallel(protocol, url, [[image] for image in expected], ask)
    seconds = time.perf_counter() - start
    batches = list(_batches(expected, release.signature.max_batch))
    outcomes = [
        outcome for answers in [*singles, *_in_parallel(protocol, url, batches, ask)] for outcome in answers
    ]
    disagreeing = {outcome.file for outcome in outcomes if outcome.problem}
    latencies = sorted(outcome.seconds for (outcome,) in singles)
    summary = ProtocolResult(
        images=len(expected),
        agreeing=len(expected) - len(disagreeing),
        max_probability_difference=max(outcome.difference for outcome in outcomes),
        requests_per_second=len(expected) / seconds,
        p50_ms=1000 * percentile(latencies, 50),
        p99_ms=1000 * percentile(latencies, 99),
    )
    return summary, outcomes


def _batches(images: Sequence[Expected], most: int) -> Iterator[list[Expected]]:
    """As many as the model takes at once, or fewer where they are too large for one request."""
    batch: list[Expected] = []
    size = 0
    for image in images:
        own = image.path.stat().st_size
        if batch and (len(batch) == most or size + own > MAX_REQUEST_BYTES):
            yield batch
            batch, size = [], 0
        batch.append(image)
        size += own
    yield batch


def _compare(protocol: str, client: Client, batch: Sequence[Expected], tolerance: float) -> list[Outcome]:
    images = [image.path.read_bytes() for image in batch]
    start = time.perf_counter()
    try:
        answers: Sequence[Answer | RefusedInput] = client.classify(images)
    except RefusedInput as error:
        answers = [error] * len(batch)
    seconds = time.perf_counter() - start
    return [
        _outcome(image, answer, tolerance=tolerance, protocol=protocol, batch=len(batch), seconds=seconds)
        for image, answer in zip(batch, answers, strict=True)
    ]


def _outcome(
    image: Expected,
    answer: Answer | RefusedInput,
    *,
    tolerance: float,
    protocol: str,
    batch: int,
    seconds: float,
) -> Outcome:
    difference, problem = 1.0, ""
    if isinstance(answer, RefusedInput):
        problem = f"the image was refused: {answer}"
    elif answer.probabilities.shape != image.probabilities.shape:
        problem = (
            f"the server knows {answer.probabilities.size} classes, the evaluation {image.probabilities.size}"
        )
    else:
        difference = float(np.abs(answer.probabilities - image.probabilities).max())
        if answer.label != image.label:
            problem = f"the server answered {answer.label!r}; offline evaluation predicted {image.label!r}"
        elif not difference <= tolerance:  # NaN is within no tolerance
            problem = f"probabilities differ by {difference:.2g}; at most {tolerance:g} is allowed"
    return Outcome(
        file=image.file,
        protocol=protocol,
        batch=batch,
        difference=difference if math.isfinite(difference) else 1.0,
        seconds=seconds,
        problem=problem,
    )


def send_bad_inputs(urls: Mapping[str, str], expected: Sequence[Expected]) -> list[dict[str, Any]]:
    """Each bad input together with good ones, which are to be answered as if nothing had happened."""
    image = expected[0].path.read_bytes()
    bad_inputs = {
        "truncated image": image[: len(image) // 2],
        "empty body": b"",
        "HTML file": b"<!doctype html><title>404 Not Found</title>",
    }
    results = []
    for name, data in bad_inputs.items():
        answers = {protocol: _answer_to_bad(protocol, url, data, expected) for protocol, url in urls.items()}
        passed = all(answers[protocol].startswith(CLIENT_ERROR[protocol]) for protocol in answers)
        results.append({"name": name, **answers, "passed": passed})
    return results


def _answer_to_bad(protocol: str, url: str, data: bytes, expected: Sequence[Expected]) -> str:
    """The status and code that the bad input got, or what went wrong with it or with those sent beside it."""
    together = threading.Barrier(WORKERS, timeout=DEADLINE_SECONDS)
    mates = [expected[index % len(expected)] for index in range(WORKERS - 1)]

    def ask(client: Client, mate: Expected | None) -> str:
        image = data if mate is None else mate.path.read_bytes()
        together.wait()
        try:
            (answer,) = client.classify([image])
        except RefusedInput as error:
            return (
                f"{error.status} {error.code}"
                if mate is None
                else f"{mate.file} was refused beside it: {error}"
            )
        except ServingError as error:
            return f"failed: {error}"
        if mate is None:
            return f"answered {answer.label!r}"
        return "" if answer.label == mate.label else f"{mate.file} was answered {answer.label!r} beside it"

    to_bad, *to_mates = _in_parallel(protocol, url, [None, *mates], ask)
    return next((problem for problem in to_mates if problem), to_bad)


def _check_alive(running: Server, release: Release) -> None:
    running.raise_if_ended()
    for protocol, url in running.urls.items():
        with CLIENTS[protocol](url) as client:
            health.check(client, release)


def _in_parallel(
    protocol: str, url: str, items: Sequence[Item], ask: Callable[[Client, Item], Result]
) -> list[Result]:
    """`ask` about every item with a few concurrent clients, one for each thread; results in the order of items."""

    def work(worker: int) -> Iterator[Result]:
        # What the model's own limit is, the server knows.
        with CLIENTS[protocol](url, max_image_bytes=MAX_REQUEST_BYTES) as client:
            return iter([ask(client, item) for item in items[worker::WORKERS]])

    with ThreadPoolExecutor(WORKERS) as pool:
        results = list(pool.map(work, range(WORKERS)))
    return [next(results[index % WORKERS]) for index in range(len(items))]


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Nearest rank: the smallest value that at least `percent` % of all values do not exceed."""
    return ordered[max(1, math.ceil(len(ordered) * percent / 100)) - 1]

"""Which artefact to run on this machine, and which to serve: all that passed the gate, measured side by side."""

import logging
import platform
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from slipway.artefact import SERVABLE, Artefact, instructions
from train.accuracy import Judgement
from train.parity import Pixels
from train.runtime import Runtime, running

RECOMMENDATION = "recommendation.json"
LARGE_BATCH = 8
ROUNDS = 15
REPEAT = 3
FOR_GPUS = "on a CPU, ONNX Runtime computes float16 in float32, between casts"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """ms: median latency of one batch by its size. start_ms: until a new process could answer. bytes: of all files."""

    artefact: str
    runtime: str
    ms: Mapping[int, float]
    start_ms: float
    bytes: int


def measure(
    directory: Path, artefacts: Sequence[Artefact], pixels: Pixels, *, max_batch: int, threads: int
) -> list[Measured]:
    """Latency inside each runtime, all of them loaded at once, taking turns: what slows the machine slows them alike.

    pixels: uint8 [n, 3, size, size], repeated to fill a batch. At batch 1, and at 8 or the largest there is.
    """
    batches = sorted({1, min(LARGE_BATCH, max_batch)})
    with ExitStack() as stack:
        runtimes = [stack.enter_context(running(directory, each, threads)) for each in artefacts]
        times = {batch: _take_turns(runtimes, _filled(pixels, batch)) for batch in batches}
        return [
            Measured(
                artefact=runtime.artefact.name,
                runtime=runtime.artefact.runtime,
                ms={batch: median(times[batch][index]) for batch in batches},
                start_ms=runtime.loaded_ms,
                bytes=sum((directory / name).stat().st_size for name in runtime.artefact.files),
            )
            for index, runtime in enumerate(runtimes)
        ]


def recommend(
    measured: Sequence[Measured],
    judged: Mapping[str, Judgement],
    for_gpus: Sequence[str],
    threads: int,
) -> dict[str, Any]:
    """The fastest at batch 1 of those within the accuracy limit, and everything that says so, for the bundle.

    judged: of every artefact measured, by name; all of them passed. for_gpus: names of those that were not measured,
    and are neither recommended nor served here.
    """
    table = [
        {
            **asdict(each),
            "ms": {str(batch): ms for batch, ms in each.ms.items()},
            "accuracy": judged[each.artefact].accuracy,
        }
        for each in measured
    ]
    fastest = min(measured, key=lambda each: each.ms[1])
    servable = min((each for each in measured if each.runtime in SERVABLE), key=lambda each: each.ms[1])
    for line in lines(table):
        logger.info("%s", line)
    logger.info("recommended on this machine: %s, the fastest at batch 1", fastest.artefact)
    logger.info("served will be %s, the fastest that servers can run", servable.artefact)
    for name in for_gpus:
        logger.info("not measured, for GPUs only: %s: %s", name, FOR_GPUS)
    return {
        "recommended": fastest.artefact,
        "served": servable.artefact,
        "by": f"median latency at batch 1 of {ROUNDS} rounds of {REPEAT}, taking turns",
        "hardware": {
            "machine": platform.machine(),
            "cpu": _cpu_name(),
            "instructions": instructions(),
            "threads": threads,
        },
        "measured": table,
        "not_measured": dict.fromkeys(for_gpus, FOR_GPUS),
    }


def lines(table: Sequence[Mapping[str, Any]]) -> list[str]:
    """The table for a terminal."""
    headings = " ".join(f"batch {batch}, ms".rjust(12) for batch in table[0]["ms"])
    rows = [f"{'artefact':14} {'accuracy':>8} {headings} {'MB':>6} {'start, s':>8}"]
    for row in table:
        latencies = " ".join(f"{ms:12.2f}" for ms in row["ms"].values())
        size, start = row["bytes"] / 1e6, row["start_ms"] / 1000
        rows.append(f"{row['artefact']:14} {row['accuracy']:8.4f} {latencies} {size:6.1f} {start:8.1f}")
    return rows


def _take_turns(runtimes: Sequence[Runtime], pixels: Pixels) -> list[list[float]]:
    """Milliseconds by runtime, without those of a first turn, in which they warm up."""
    turns = [[runtime.milliseconds(pixels, REPEAT) for runtime in runtimes] for _ in range(ROUNDS + 1)]
    return [[ms for turn in turns[1:] for ms in turn[index]] for index in range(len(runtimes))]


def _filled(pixels: Pixels, batch: int) -> Pixels:
    return np.take(pixels, range(batch), axis=0, mode="wrap")


def _cpu_name() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:  # not Linux
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")]
    return names[0] if names else platform.processor()

"""A slow look into training steps: where the time goes."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from train.config import DebugConfig
from train.runs import Run

# Steps that are let pass, and then recorded, by the profiler.
PASSED, RECORDED = 3, 5
ROWS = 15

logger = logging.getLogger(__name__)


@contextmanager
def profiling(config: DebugConfig, run: Run) -> Iterator["torch.profiler.profile | None"]:
    """Inside, if it is wanted, a profiler waits to be told of each step."""
    if not config.profile:
        yield None
        return
    schedule = torch.profiler.schedule(wait=PASSED - 1, warmup=1, active=RECORDED, repeat=1)

    def write(profile: "torch.profiler.profile") -> None:
        trace = run.directory / "profile.json"
        profile.export_chrome_trace(str(trace))
        table = profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=ROWS)
        logger.info("%d steps, also in %s (for ui.perfetto.dev):\n%s", RECORDED, trace, table)

    with torch.profiler.profile(schedule=schedule, on_trace_ready=write, profile_memory=True) as profile:
        yield profile

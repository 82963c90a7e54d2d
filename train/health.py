"""What to do about a step that went wrong.

Everything here follows from numbers that are equal on every rank, so all ranks decide alike.
"""

import json
import logging
import math
from dataclasses import asdict, dataclass
from typing import Literal

from slipway.errors import SlipwayError
from slipway.files import write_whole, writing
from train.config import TrainingConfig
from train.runs import Run

Answer = Literal["stop", "skip", "rollback"]

BAD_STEPS = "bad_steps.jsonl"
# A spike is held against an average over about this many steps.
AVERAGED_STEPS = 50
# More than so many bad steps in a run are no accident of the data.
MOST_BAD_STEPS = 20
# From 65536, a loss scale gets here by as many halvings in a row: no scale is small enough for such gradients.
LEAST_LOSS_SCALE = 1.0

logger = logging.getLogger(__name__)


class DivergedError(SlipwayError):
    """The loss or the gradient went wrong, and training is not to go on. Decided by all ranks together."""


@dataclass(frozen=True, kw_only=True)
class BadStep:
    """A window of samples whose step was not taken.

    step: optimiser steps before it. cursor: its end in the data, which names it. files: what it held.
    """

    step: int
    epoch: int
    cursor: int
    reason: str
    answer: Answer
    files: tuple[str, ...]


def problem_with(
    loss: float, norm: float, average: float | None, config: TrainingConfig, *, scaled: bool
) -> str | None:
    """What is wrong with a step, in words, or None. A scaled gradient may overflow: its scaler takes care of that."""
    if not math.isfinite(loss) or not (math.isfinite(norm) or scaled):
        return f"the loss is {loss} and the gradient norm {norm}"
    if average is not None and config.spike_factor is not None and loss > config.spike_factor * average:
        return f"the loss is {loss:.4g}, more than {config.spike_factor:g} times its recent average {average:.4g}"
    return None


def averaged(average: float | None, loss: float, step: int) -> float:
    """The moving average after one more step; `step` counts from 0. Plain floats: exact in JSON, equal on resume."""
    weight = max(1 / AVERAGED_STEPS, 1 / (step + 1))
    return loss if average is None else average + weight * (loss - average)


def record(run: Run, bad: BadStep) -> None:
    """Write a bad step down in `bad_steps.jsonl`, once, before anything is done about it.

    The few lines there are, are written anew and put in place whole: no kill can leave half of one. Raises SlipwayError
    where they cannot be written.
    """
    known = bad_steps(run)
    if bad.cursor in {other.cursor for other in known}:
        return
    lines = (json.dumps(asdict(each), ensure_ascii=False) + "\n" for each in [*known, bad])
    path = run.directory / BAD_STEPS
    with writing(path):
        write_whole(path, "".join(lines))


def bad_steps(run: Run) -> list[BadStep]:
    """Every bad step of a run so far. For one rank to read and to tell the others."""
    path = run.directory / BAD_STEPS
    lines = path.read_text(encoding="utf-8").split("\n") if path.exists() else []
    contents = [json.loads(line) for line in lines if line]
    return [BadStep(**{**content, "files": tuple(content["files"])}) for content in contents]


def avoided(run: Run) -> frozenset[int]:
    """The windows that training passes over, because it was rolled back for each of them."""
    return frozenset(bad.cursor for bad in bad_steps(run) if bad.answer == "rollback")

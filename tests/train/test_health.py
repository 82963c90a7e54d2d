import math
from pathlib import Path

import pytest

from slipway.errors import SlipwayError
from tests.train.conftest import full_disk
from train.config import TrainingConfig
from train.health import (
    AVERAGED_STEPS,
    BadStep,
    averaged,
    avoided,
    bad_steps,
    problem_with,
    record,
)
from train.runs import Run

PLAIN, WATCHFUL = TrainingConfig(), TrainingConfig(spike_factor=3.0)


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_loss_that_is_no_number_is_bad_whatever_is_scaled(loss: float) -> None:
    assert problem_with(loss, 1.0, None, PLAIN, scaled=True)


def test_gradient_may_overflow_only_where_a_scaler_takes_care_of_it() -> None:
    assert problem_with(1.0, math.inf, None, PLAIN, scaled=True) is None
    assert "gradient norm inf" in str(problem_with(1.0, math.inf, None, PLAIN, scaled=False))


def test_spike_is_held_against_the_recent_average() -> None:
    assert problem_with(3.1, 1.0, 1.0, PLAIN, scaled=False) is None
    assert problem_with(2.9, 1.0, 1.0, WATCHFUL, scaled=False) is None
    assert problem_with(9.0, 1.0, None, WATCHFUL, scaled=False) is None
    assert "more than 3 times" in str(problem_with(3.1, 1.0, 1.0, WATCHFUL, scaled=False))


def test_average_is_the_mean_at_first_and_forgets_later() -> None:
    average = None
    for step, loss in enumerate([4.0, 2.0, 3.0]):
        average = averaged(average, loss, step)
    assert average == pytest.approx(3.0)
    assert averaged(1.0, 2.0, 10_000) == pytest.approx(1 + 1 / AVERAGED_STEPS)


def bad(cursor: int, answer: str) -> BadStep:
    return BadStep(step=1, epoch=0, cursor=cursor, reason="NaN", answer=answer, files=("é.png",))  # type: ignore[arg-type]


def test_bad_steps_are_written_once_and_read_back(tmp_path: Path) -> None:
    run = Run(directory=tmp_path, inputs="")
    assert avoided(run) == frozenset()
    for each in (bad(8, "skip"), bad(16, "rollback"), bad(8, "skip")):
        record(run, each)
    assert bad_steps(run) == [bad(8, "skip"), bad(16, "rollback")]
    assert avoided(run) == {16}


def test_full_disk_is_said_in_words(tmp_path: Path) -> None:
    with (
        full_disk(),
        pytest.raises(SlipwayError, match=r"bad_steps\.jsonl: cannot be written .* MB are free"),
    ):
        record(Run(directory=tmp_path, inputs=""), bad(8, "rollback"))


def test_kill_while_writing_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(directory=tmp_path, inputs="")
    record(run, bad(8, "rollback"))

    def killed(_descriptor: int) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", killed)
        with pytest.raises(KeyboardInterrupt):
            record(run, bad(16, "rollback"))
    assert avoided(run) == {8}
    record(run, bad(16, "rollback"))
    assert avoided(run) == {8, 16}

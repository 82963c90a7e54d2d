"""Where the time of several ranks goes: one that is slow makes the others wait, and is named."""

from pathlib import Path

import pytest

from tests.integration.checkout import Checkout, outcome
from tests.integration.training import DEADLINE_SECONDS

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]


def test_rank_that_the_other_waits_for_is_named_with_its_reason(
    checkout: Checkout, odd_folder: Path, tmp_path: Path
) -> None:
    program = str(Path(__file__).with_name("slow_rank.py"))
    before = set(tmp_path.iterdir())
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    process = checkout.start(
        program, str(odd_folder), str(tmp_path / "runs"), variables={"TMPDIR": str(scratch)}
    )
    result = outcome(process, DEADLINE_SECONDS)
    assert result.returncode == 0, result.stderr
    ranks, _, *rows, verdict, waiting = result.stdout.splitlines()
    assert ranks.split() == ["rank", "0", "rank", "1"]
    times = {row.split()[0]: row.split()[1:] for row in rows}
    first, last = ({kind: float(times[kind][at]) for kind in list(times)[:5]} for at in (0, 3))
    assert max(first, key=first.__getitem__) == "communication"
    assert max(last, key=last.__getitem__) == "data"
    assert verdict.startswith("data: ")
    assert waiting.startswith("rank 0 waits ")
    assert waiting.endswith(" ms a step longer for others than rank 1, which holds it up")
    assert set(tmp_path.iterdir()) == {*before, scratch}
    assert not list(scratch.iterdir())

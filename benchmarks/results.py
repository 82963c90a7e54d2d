"""What benchmarks find, as lines of JSON for `make trend`: one ratio a line, appended.

Only ratios. Seconds change with the machine, and with what else it does; what is divided by what was measured beside
it in the same minutes can be compared with last week's.
"""

import argparse
import json
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from slipway.paths import PROJECT_ROOT


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """One figure of a benchmark: what it is, which way is better, and the target that it fails by, if there is one."""

    name: str
    value: float
    better: Literal["higher", "lower"] = "higher"
    target: float | None = None

    @property
    def missed(self) -> bool:
        if self.target is None:
            return False
        return self.value < self.target if self.better == "higher" else self.value > self.target


def add_option(parser: argparse.ArgumentParser) -> None:
    """`--json FILE`, for `append`."""
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="append the ratios to this file, for `make trend`"
    )


def append(path: Path | None, benchmark: str, ratios: Sequence[Ratio]) -> None:
    """Append `ratios`, with the time and the commit, to the file if one is named; its folder is made."""
    if path is None:
        return
    context = {
        "benchmark": benchmark,
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.writelines(f"{json.dumps(context | asdict(ratio))}\n" for ratio in ratios)


def commit() -> str:
    """The commit of this checkout, shortened; empty where there is no git."""
    command = ["git", "rev-parse", "--short=12", "HEAD"]
    try:
        done = subprocess.run(command, cwd=PROJECT_ROOT, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip()

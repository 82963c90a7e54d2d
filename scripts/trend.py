"""A page of how the ratios of the benchmarks went, from the lines that their option --json appends to a file.

    trend.py trend/results.jsonl trend/index.html

Standard library only; the page is one file, without scripts, in the look of the other pages (train/page.css).
"""

import argparse
import json
import sys
from collections import defaultdict
from dataclasses import dataclass
from datetime import datetime, timedelta
from html import escape
from pathlib import Path
from statistics import median
from string import Template
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
WIDTH, HEIGHT, MARGIN = 360, 90, 6
COMPARED = 7  # runs before the last, whose median it is compared with
STALE = timedelta(days=2)  # behind the newest of all; a benchmark that fails writes nothing


PAGE = Template("""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<link rel="icon" href="data:,">
<title>Slipway benchmarks</title>
<style>
$style
.trends { margin-top: 12px; }
.trends { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 320px), 1fr)); gap: 24px 40px; }
.trends svg { display: block; width: 100%; height: auto; }
.trends polyline { fill: none; stroke: var(--accent); stroke-width: 2; vector-effect: non-scaling-stroke; }
.trends line { stroke: var(--soft); stroke-dasharray: 4 4; vector-effect: non-scaling-stroke; }
.trends circle { fill: var(--accent); }
.trends p { color: var(--soft); font-size: 13px; }
.trends p b { color: var(--ink); font-size: 20px; }
.trends .bad b { color: var(--bad); }
</style>
</head>
<body>
<header>
<h1>Benchmarks over time</h1>
<p class="lede">Each figure is a ratio to what was measured beside it in the same minutes; dashed is its target.
Last run $latest UTC: $verdict.</p>
</header>
<main>
$sections
</main>
</body>
</html>
""")

# Of a result, beside the names of its benchmark and its ratio.
FIELDS = ("at", "commit", "value", "better", "target")


@dataclass(frozen=True, kw_only=True)
class Run:
    """What one run of a benchmark found for one ratio. at: ISO 8601, UTC."""

    at: str
    commit: str
    value: float


@dataclass(frozen=True, kw_only=True)
class Trend:
    """One ratio over time, oldest first; never empty. The target and which way is better are those of the last run."""

    benchmark: str
    name: str
    better: str
    target: float | None
    runs: list[Run]

    @property
    def last(self) -> Run:
        return self.runs[-1]

    @property
    def missed(self) -> bool:
        if self.target is None:
            return False
        return self.last.value < self.target if self.better == "higher" else self.last.value > self.target

    def is_stale(self, newest: datetime) -> bool:
        return newest - datetime.fromisoformat(self.last.at) > STALE

    @property
    def change(self) -> float | None:
        """The last value relative to the median of those before it; None if it is the first."""
        before = [run.value for run in self.runs[-1 - COMPARED : -1]]
        return self.last.value / median(before) - 1 if before else None


class TrendError(Exception):
    """A sentence for the person who runs this."""


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="trend.py", description="Make a page of the results of benchmarks.")
    parser.add_argument("results", type=Path, help="what benchmarks have appended to with --json")
    parser.add_argument("page", type=Path, help="where to write the page")
    options = parser.parse_args(arguments)
    try:
        trends = read(options.results)
    except TrendError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    options.page.parent.mkdir(parents=True, exist_ok=True)
    options.page.write_text(page(trends), encoding="utf-8")
    print(options.page)
    return 0


def read(results: Path) -> list[Trend]:
    """Every ratio of the file, in the order in which it came first. Raises TrendError, naming the line."""
    try:
        lines = results.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise TrendError(
            f"{results}: cannot be read ({error.strerror}); "
            f'a benchmark appends to it: make benchmark-training ARGS="--json {results}"'
        ) from error
    found: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for number, line in enumerate(lines, start=1):
        try:
            result = json.loads(line)
            datetime.fromisoformat(result["at"])
            found[result["benchmark"], result["name"]].append({field: result[field] for field in FIELDS})
        except (ValueError, KeyError, TypeError) as error:
            raise TrendError(f"{results}:{number}: is no result of a benchmark; remove the line") from error
    if not found:
        raise TrendError(f"{results}: holds no result yet")
    return [trend(benchmark, name, own) for (benchmark, name), own in found.items()]


def trend(benchmark: str, name: str, results: list[dict[str, Any]]) -> Trend:
    ordered = sorted(results, key=lambda result: str(result["at"]))
    return Trend(
        benchmark=benchmark,
        name=name,
        better=ordered[-1]["better"],
        target=ordered[-1]["target"],
        runs=[Run(at=each["at"], commit=each["commit"], value=each["value"]) for each in ordered],
    )


def page(trends: list[Trend]) -> str:
    benchmarks = list(dict.fromkeys(each.benchmark for each in trends))
    newest = max(datetime.fromisoformat(each.last.at) for each in trends)
    missed = sum(each.missed for each in trends)
    stale = sum(each.is_stale(newest) for each in trends)
    problems = [f"targets missed: {missed}"] * (missed > 0) + [f"not measured any more: {stale}"] * (
        stale > 0
    )
    return PAGE.substitute(
        style=(ROOT / "train" / "page.css").read_text(encoding="utf-8"),
        latest=f"{newest:%Y-%m-%d %H:%M}",
        verdict=f'<span class="bad">{", ".join(problems)}</span>' if problems else "all targets reached",
        sections="\n".join(section(name, trends, newest) for name in benchmarks),
    )


def section(benchmark: str, trends: list[Trend], newest: datetime) -> str:
    cards = "\n".join(
        card(each, stale=each.is_stale(newest)) for each in trends if each.benchmark == benchmark
    )
    return f'<section>\n<h2>{escape(benchmark)}</h2>\n<div class="trends">\n{cards}\n</div>\n</section>'


def card(trend: Trend, *, stale: bool) -> str:
    """The figure of one ratio: what it is, its last value, and the curve."""
    target = "" if trend.target is None else f", target {trend.target:g}"
    change = "" if trend.change is None else f"{trend.change:+.1%} against the {COMPARED} runs before, "
    state = ' class="bad"' if trend.missed or stale else ""
    since = f"not measured since {trend.last.at[:10]}, " if stale else ""
    return (
        f"<figure><h3>{escape(trend.name)}</h3>"
        f"<p{state}><b>{trend.last.value:.2f}</b> {trend.better} is better{target}</p>{curve(trend)}"
        f"<p>{since}{change}{len(trend.runs)} in all, the last of {escape(trend.last.commit)}</p></figure>"
    )


def curve(trend: Trend) -> str:
    """An SVG of the values, evenly spaced, and of the target."""
    values = [run.value for run in trend.runs]
    shown = [*values, *([] if trend.target is None else [trend.target])]
    low, high = min(shown), max(shown)
    span = high - low or 1.0

    def y(value: float) -> float:
        return MARGIN + (HEIGHT - 2 * MARGIN) * (1 - (value - low) / span)

    steps = max(len(values) - 1, 1)
    points = [(MARGIN + (WIDTH - 2 * MARGIN) * i / steps, y(value)) for i, value in enumerate(values)]
    line = ""
    if trend.target is not None:
        line = f'<line x1="0" x2="{WIDTH}" y1="{y(trend.target):.1f}" y2="{y(trend.target):.1f}"/>'
    path = " ".join(f"{x:.1f},{height:.1f}" for x, height in points)
    dot = f'<circle cx="{points[-1][0]:.1f}" cy="{points[-1][1]:.1f}" r="3"/>'
    words = f"{trend.name}: {len(values)} runs, from {values[0]:.2f} to {values[-1]:.2f}"
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(words)}">'
        f'{line}<polyline points="{path}"/>{dot}</svg>'
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

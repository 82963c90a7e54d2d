"""What benchmarks append over the nights becomes one page, and what fell below its target is seen."""

import json
import re
from pathlib import Path

import pytest

from benchmarks import results
from benchmarks.results import Ratio
from scripts import trend


def test_page_shows_what_benchmarks_appended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, page = tmp_path / "trend" / "results.jsonl", tmp_path / "page" / "index.html"
    for value in (0.99, 1.01, 1.02, 0.93):
        speed = Ratio(name="step: ours / <bare> loop", value=value, target=0.98)
        time = Ratio(name="milliseconds, ours / Pillow", value=2 * value, better="lower")
        results.append(file, "training", [speed, time])
    results.append(None, "training", [speed])
    assert trend.main([str(file), str(page)]) == 0
    assert capsys.readouterr().out == f"{page}\n"
    text = page.read_text(encoding="utf-8")
    assert "step: ours / &lt;bare&gt; loop" in text
    assert "<b>0.93</b> higher is better, target 0.98" in text
    assert "<b>1.86</b> lower is better<" in text
    assert "-7.9% against the 7 runs before, 4 in all" in text
    assert text.count("<polyline") == 2
    assert "targets missed: 1" in text


@pytest.mark.parametrize(
    ("ratio", "missed"),
    [
        (Ratio(name="a", value=1.0, target=1.0), False),
        (Ratio(name="a", value=0.9, target=1.0), True),
        (Ratio(name="a", value=0.9, target=1.0, better="lower"), False),
        (Ratio(name="a", value=1.1, target=1.0, better="lower"), True),
        (Ratio(name="a", value=0.1), False),
    ],
)
def test_target_is_missed_from_the_worse_side(tmp_path: Path, ratio: Ratio, missed: bool) -> None:
    results.append(tmp_path / "results.jsonl", "a", [ratio])
    (shown,) = trend.read(tmp_path / "results.jsonl")
    assert (ratio.missed, shown.missed) == (missed, missed)


def test_ratio_that_is_not_measured_any_more_does_not_count_as_reached(tmp_path: Path) -> None:
    file, page = tmp_path / "results.jsonl", tmp_path / "index.html"
    results.append(file, "serving", [Ratio(name="gone", value=1.0, target=0.9)])
    (old,) = file.read_text().splitlines()
    file.write_text(re.sub(r'"at": "[\d-]+', '"at": "2026-01-31', old) + "\n")
    results.append(file, "training", [Ratio(name="still there", value=1.0, target=0.9)])
    assert trend.main([str(file), str(page)]) == 0
    assert "not measured any more: 1" in page.read_text()
    assert "not measured since 2026-01-31" in page.read_text()


def test_order_is_that_of_time_also_where_two_histories_were_joined(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    lines = [
        {
            "benchmark": "a",
            "name": "b",
            "at": at,
            "commit": "",
            "value": value,
            "better": "higher",
            "target": None,
        }
        for at, value in (("2026-11-30T03:00:00+00:00", 2.0), ("2026-11-29T03:00:00+00:00", 1.0))
    ]
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
    (shown,) = trend.read(file)
    assert [run.value for run in shown.runs] == [1.0, 2.0]
    assert shown.change == 1.0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            None,
            "cannot be read .*; a benchmark appends to it: make benchmark-training",
        ),
        ("", "holds no result yet"),
        ('{"benchmark": "a"}\n', ":1: is no result of a benchmark; remove the line"),
        ('{"benchmark": "a", "name": "b", "value": 1.0}\n', ":1: is no result of a benchmark"),
        ("half a li", ":1: is no result of a benchmark"),
    ],
)
def test_file_without_results_is_explained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None, said: str
) -> None:
    file = tmp_path / "results.jsonl"
    if text is not None:
        file.write_text(text, encoding="utf-8")
    assert trend.main([str(file), str(tmp_path / "index.html")]) == 1
    assert re.search(said, capsys.readouterr().err)
    assert not (tmp_path / "index.html").exists()

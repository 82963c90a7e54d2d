"""What the parity gate found, for people: `parity.html`, beside `parity.json`, in the run and in the bundle.

This file reads and adds up; `parity_page.html.j2` words and lays out.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from train import accuracy, parity
from train.charts import number
from train.page import Table, fixed, percent, write_page
from train.parity import Check
from train.tables import Column, or_else, table, text, verdict

PAGE = "parity.html"
MOST_CHANGES = 40
MOST_FAILURES = 20

Record = Mapping[str, Any]


def write_parity_page(path: Path, name: str, report: Record, recommended: Record | None = None) -> Path:
    """Write the page to `path`, replacing what is there in one step.

    name: of the model. report: as `parity.json` holds it. recommended: as `recommendation.json` does, if there is one.
    """
    checks, judged = report["checks"], report["accuracy"]
    failures = list(_failures(report))
    furthest = max(checks, key=share_of_tolerance)
    content = {
        "name": name,
        "verdict": report["verdict"],
        "checks": len(checks),
        "artefacts": len({check["artefact"] for check in checks} - {parity.EAGER}),
        "failed": list(dict.fromkeys(each["artefact"] for each in [*checks, *judged] if not each["passed"])),
        "failures": failures[:MOST_FAILURES],
        "all_failures": len(failures),
        "furthest": furthest,
        "share": share_of_tolerance(furthest),
        "judged": judged,
        "worst": max(judged, key=lambda each: each["drop"], default=None),
        "changes": sum(_changes(each) for each in judged),
        "summary": summary(checks, judged),
        "inputs": report["inputs"],
        "batches": sorted(
            {check["batch"] for check in checks if check["batch"] and check["artefact"] != parity.EAGER}
        ),
        **accuracies(judged),
        "recommendation": None if recommended is None else recommendation(recommended),
        "every_check": every_check(checks),
        "tolerances": tolerances(report["tolerances"]),
    }
    return write_page(path, "parity_page.html.j2", content)


def summary(checks: Sequence[Record], judged: Sequence[Record]) -> Table:
    """A row for each artefact: the comparison that went furthest towards its tolerance, and what it costs."""
    accuracy_of = {each["artefact"]: each for each in judged}
    columns: list[Column] = [
        ("Artefact", "artefact", text),
        ("Type", "dtype", text),
        ("Comparisons", "count", number),
        ("Largest difference", "max_abs", number),
        ("Of its tolerance", "share", percent),
        ("Accuracy", "accuracy", percent),
        ("Points lost", "drop", fixed),
        ("Answers changed", "changes", number),
        ("Verdict", "passed", verdict),
    ]
    rows = []
    for row in _by_artefact(checks):
        found = accuracy_of.get(row["artefact"])
        judgement: dict[str, Any] = {"accuracy": None, "drop": None, "changes": None}
        if found is not None:
            judgement = {
                "accuracy": found["accuracy"],
                "drop": found["drop"],
                "changes": _changes(found),
                "passed": row["passed"] and found["passed"],
            }
        rows.append({**row, "share": share_of_tolerance(row), **judgement})
    return table(columns, rows)


def distances(checks: Sequence[Record]) -> Table:
    """A row for each artefact: how many comparisons, and the one that went furthest towards its tolerance."""
    columns: list[Column] = [
        ("Artefact", "artefact", text),
        ("Type", "dtype", text),
        ("Comparisons", "count", number),
        ("Largest difference", "max_abs", number),
        ("Tolerance", "tolerance", number),
        ("On inputs", "inputs", text),
        ("Verdict", "passed", verdict),
    ]
    return table(columns, list(_by_artefact(checks)))


def every_check(checks: Sequence[Record]) -> Table:
    columns: list[Column] = [
        ("Artefact", "artefact", text),
        ("Reference", "reference", text),
        ("Inputs", "inputs", text),
        ("Batch", "batch", number),
        ("Type", "dtype", text),
        ("Largest difference", "max_abs", number),
        ("Tolerance", "tolerance", number),
        ("Relative", "max_relative", number),
        ("Same top-1", "top1_agreement", percent),
        ("Verdict", "passed", verdict),
    ]
    return table(columns, checks)


def tolerances(table_of_gate: Mapping[str, Record]) -> Table:
    columns: list[Column] = [
        ("Type", "dtype", text),
        ("Absolute", "absolute", number),
        ("Of the largest logit", "relative", number),
        ("Holds for", "held", text),
    ]
    rows = [
        {**each, "dtype": dtype, "held": "all inputs" if each["every_input"] else "golden inputs"}
        for dtype, each in table_of_gate.items()
    ]
    return table(columns, rows)


def accuracies(judged: Sequence[Record]) -> dict[str, Table | None]:
    """`accuracy`: artefacts that were judged on the validation split; `changed`: answers that are not the same."""
    columns: list[Column] = [
        ("Artefact", "artefact", text),
        ("Type", "dtype", text),
        ("Images", "samples", number),
        ("Accuracy", "accuracy", percent),
        ("Checkpoint's", "checkpoint_accuracy", percent),
        ("Points lost", "drop", fixed),
        ("Allowed", "limit", fixed),
        ("Calibration error", "calibration_error", percent),
        ("Checkpoint's", "checkpoint_calibration_error", percent),
        ("Verdict", "passed", verdict),
    ]
    pairs: list[Column] = [
        ("Artefact", "artefact", text),
        ("Checkpoint's answer", "from", text),
        ("Artefact's answer", "to", text),
        ("Images", "images", number),
    ]
    changes = [{"artefact": each["artefact"], **change} for each in judged for change in each["changed"]]
    return {
        "accuracy": table(columns, judged) if judged else None,
        "changed": table(pairs, changes[:MOST_CHANGES]) if changes else None,
    }


def recommendation(content: Record) -> dict[str, Any]:
    """What was measured side by side on which machine, and what is recommended for it."""
    batches = [f"Batch {batch}, ms" for batch in content["measured"][0]["ms"]]
    columns: list[Column] = [
        ("Artefact", "artefact", text),
        ("Accuracy", "accuracy", percent),
        *((heading, heading, fixed) for heading in batches),
        ("Size, MB", "megabytes", fixed),
        ("Start, s", "seconds", fixed),
    ]
    rows = [
        {
            **row,
            **dict(zip(batches, row["ms"].values(), strict=True)),
            "megabytes": row["bytes"] / 1e6,
            "seconds": row["start_ms"] / 1000,
        }
        for row in content["measured"]
    ]
    return {
        "name": text(content["recommended"]),
        "served": text(content["served"]),
        "by": text(content["by"]),
        "cpu": text(content["hardware"]["cpu"]),
        "threads": content["hardware"]["threads"],
        "table": table(columns, rows),
        "not_measured": content.get("not_measured", {}),
    }


def _by_artefact(checks: Sequence[Record]) -> Iterator[dict[str, Any]]:
    """For each artefact, its check that went furthest, with how many there are and whether all passed."""
    for name in dict.fromkeys(check["artefact"] for check in checks):
        mine = [check for check in checks if check["artefact"] == name]
        furthest = max(mine, key=share_of_tolerance)
        yield {**furthest, "count": len(mine), "passed": all(check["passed"] for check in mine)}


def share_of_tolerance(check: Record) -> float:
    """How far a distance went, as a share of what is allowed; 0 where it was not judged."""
    return or_else(check["max_abs"], 0) / (check["tolerance"] or math.inf)


def _changes(judged: Record) -> int:
    return sum(change["images"] for change in judged["changed"])


def _failures(report: Record) -> Iterator[str]:
    """Each in the words of the error that the export ends with."""
    for check in report["checks"]:
        if not check["passed"]:
            yield parity.describe(Check(**check))
    for judged in report["accuracy"]:
        if not judged["passed"]:
            yield accuracy.describe(judged)

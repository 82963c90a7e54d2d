"""What `data stats` shows on a terminal."""

from collections.abc import Iterable, Mapping, Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from train.doctor import Diagnosis, Finding
from train.split import SPLITS

MOST_CLASSES = 30
"""Above this many classes, the smallest and the largest of them stand for all."""


def print_tables(diagnosis: Diagnosis, findings: Sequence[Finding], console: Console) -> None:
    """Classes, formats and sizes, what was found, and the colours to paste into the configuration."""
    console.print(_classes(diagnosis))
    console.print(_images(diagnosis))
    if findings:
        console.print(_findings(findings))
    if diagnosis.mean and diagnosis.std:
        for line in colour_lines(diagnosis.mean, diagnosis.std):
            console.print(line, highlight=False, markup=False)


def colour_lines(mean: Sequence[float], std: Sequence[float]) -> list[str]:
    """What to paste into a config file."""
    values = [", ".join(f"{value:.3f}" for value in each) for each in (mean, std)]
    return [
        "image: # of the training split, as the model sees it",
        f"  mean: [{values[0]}]",
        f"  std: [{values[1]}]",
    ]


def _classes(diagnosis: Diagnosis) -> Table:
    table = _table("Images", ["class", *SPLITS, "all"], numbers_from=1)
    names = list(diagnosis.counts["train"])
    if len(names) > MOST_CLASSES:
        names.sort(key=lambda name: diagnosis.counts["train"][name])
        table.caption = f"the {MOST_CLASSES} smallest and largest of {len(names):,} classes"
        names = [*names[: MOST_CLASSES // 2], *names[-MOST_CLASSES // 2 :]]
    for name in names:
        counts = [diagnosis.counts[split][name] for split in SPLITS]
        table.add_row(escape(name), *(f"{count:,}" for count in [*counts, sum(counts)]))
    table.add_section()
    totals = [sum(diagnosis.counts[split].values()) for split in SPLITS]
    table.add_row("all", *(f"{count:,}" for count in [*totals, sum(totals)]))
    return table


def _images(diagnosis: Diagnosis) -> Table:
    table = _table("Files", ["", ""], numbers_from=2)
    table.show_header = False
    for name, tally in (
        ("formats", diagnosis.formats),
        ("modes", diagnosis.modes),
        ("EXIF orientations", diagnosis.orientations),
    ):
        table.add_row(name, _tally(tally))
    for name, spread in diagnosis.sizes.items():
        table.add_row(name, f"{spread.least:g} to {spread.most:g}, median {spread.median:g}")
    table.add_row("exact copies", f"{sum(len(places) - 1 for places in diagnosis.copies):,}")
    table.add_row("look alike", f"{len(diagnosis.look_alikes):,} pairs")
    return table


def _findings(findings: Iterable[Finding]) -> Table:
    table = _table("Findings", ["", "what", "what to do"], numbers_from=3)
    for each in findings:
        colour = "red" if each.severity == "error" else "yellow"
        table.add_row(f"[{colour}]{each.severity}", escape(each.title), escape(each.advice))
    return table


def _table(title: str, headings: Sequence[str], *, numbers_from: int) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    for position, heading in enumerate(headings):
        table.add_column(heading, justify="right" if position >= numbers_from else "left")
    return table


def _tally(tally: Mapping[str, int]) -> str:
    return ", ".join(f"{escape(name)}: {count:,}" for name, count in tally.items())

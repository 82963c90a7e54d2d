"""What a JSON file of ours holds, as the tables and blocks of a page: figures as figures, everything else as text."""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from train.charts import number
from train.page import Table, fixed, percent

MOST_ITEMS = 12

Column = tuple[str, str, Callable[[Any], str]]
"""(heading, key in the record, how its value is written)"""

Groups = list[tuple[str, list[tuple[str, str]]]]
"""Settings in titled blocks: [(title, [(dotted name, value)])]."""


def table(columns: Sequence[Column], records: Sequence[Mapping[str, Any]]) -> Table:
    return Table(
        columns=[(heading, write in (number, fixed, percent)) for heading, _, write in columns],
        rows=[[write(record[key]) for _, key, write in columns] for record in records],
    )


def text(value: Any) -> str:
    """Any value of a JSON or YAML file, spelled as there; of a long list, the beginning."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, Mapping):
        return ", ".join(f"{name}: {text(item)}" for name, item in value.items())
    if isinstance(value, list | tuple):
        more = f" and {len(value) - MOST_ITEMS:,} more" if len(value) > MOST_ITEMS else ""
        return ", ".join(text(item) for item in value[:MOST_ITEMS]) + more
    return str(value)


def verdict(passed: Any) -> str:
    return "passed" if passed is True else "failed"


def groups(content: Mapping[str, Any], title: str = "") -> Groups:
    """Nested settings as blocks: one for each mapping, and before them one for what stands beside."""
    plain = [(name, text(value)) for name, value in content.items() if not isinstance(value, Mapping)]
    blocks = [
        (f"{title} {name}".strip(), list(_flat(value)))
        for name, value in content.items()
        if isinstance(value, Mapping)
    ]
    return [(title or "general", plain), *blocks] if plain else blocks


def _flat(content: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in content.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", text(value)


def or_else(value: float | None, otherwise: float) -> float:
    """`value`, or `otherwise` where it is absent or NaN and could not be compared."""
    return otherwise if value is None or math.isnan(value) else value

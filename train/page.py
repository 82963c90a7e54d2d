"""How a page for people is made: one self-contained HTML file, written in one step. `page.css` is its look."""

import math
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from slipway.files import write_whole, writing
from train.charts import number


@dataclass(frozen=True, kw_only=True)
class Table:
    """columns: (heading, whether it holds numbers). Cells are text."""

    columns: Sequence[tuple[str, bool]]
    rows: Sequence[Sequence[str]]


def write_page(path: Path, template: str, content: Mapping[str, Any]) -> Path:
    """Fill `template`, a file beside this one, and put the page at `path`, replacing what is there in one step.

    Raises SlipwayError where it cannot be written.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=visible,
    )
    environment.filters |= {"number": number, "fixed": fixed, "percent": percent}
    page = environment.get_template(template).render(content)
    with writing(path):
        write_whole(path, page)
    return path


def fixed(value: float | None, digits: int = 2, unit: str = "") -> str:
    """A figure whose decimal points are to stand below each other."""
    return f"{value:,.{digits}f}{unit}" if value is not None and math.isfinite(value) else number(value)


def percent(share: float | None, digits: int = 1) -> str:
    return fixed(None if share is None else 100 * share, digits, "\N{NO-BREAK SPACE}%")


def visible(value: Any) -> Any:
    """Text with line breaks, control characters and lone surrogates (undecodable file names) spelled out."""
    if type(value) is not str:  # Markup is a str of its own, and is finished
        return value
    # U+200C and U+200D, the joiners, are format characters that ordinary Persian and Hindi words need.
    odd = {
        c
        for c in value
        if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp") and c not in "\u200c\u200d"
    }
    return "".join(c.encode("unicode_escape").decode() if c in odd else c for c in value)

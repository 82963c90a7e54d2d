"""The README is read before anything is trusted. (What any page names must exist: tests/scripts/test_docs.py.)"""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_to_a_file(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8"))
    assert not [link for link in links if "://" not in link and not (page.parent / link).exists()]


@pytest.mark.parametrize("side", ["train", "serve"])
def test_every_stage_in_the_picture_is_a_command(side: str) -> None:
    picture = re.search(rf"{side}/   (\w+(?:[\s│]+· \w+)+)", README)
    assert picture
    source = (ROOT / side / "__main__.py").read_text(encoding="utf-8")
    commands = set(re.findall(r'(?m)^    "(\w+)": ', source[source.index("COMMANDS") :]))
    assert set(re.findall(r"\w+", picture[1])) == commands

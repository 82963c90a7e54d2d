"""The README is read before anything is trusted: what it names must exist."""

import re
from pathlib import Path

import pytest

from slipway.config import options_of
from train.config import Config

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def targets() -> set[str]:
    return set(re.findall(r"(?m)^([a-z][a-z-]*):", (ROOT / "Makefile").read_text()))


def test_every_make_target_exists() -> None:
    named = set(re.findall(r"\bmake ([a-z][a-z-]*)", README))
    assert len(named) > 10
    assert not named - targets()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_to_a_file(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8"))
    assert not [link for link in links if "://" not in link and not (page.parent / link).exists()]


def test_every_path_in_a_sentence_exists() -> None:
    named = set(
        re.findall(r"`((?:src|train|serve|configs|docs|tests|requirements|scripts)/[\w./-]*)`", README)
    )
    made_up = {"train/<class>/*"}
    assert not [path for path in named - made_up if not (ROOT / path).exists()]


def test_every_option_exists() -> None:
    keys = {option.key for option in options_of(Config)}
    named = set(re.findall(r"--([a-z_]+\.[a-z_]+)", README)) | set(re.findall(r"`([a-z]+\.[a-z_]+)`", README))
    assert {"optimizer.lr", "model.name"} <= named
    assert not {name for name in named if name.split(".")[0] in {key.split(".")[0] for key in keys}} - keys


@pytest.mark.parametrize("side", ["train", "serve"])
def test_every_stage_in_the_picture_is_a_command(side: str) -> None:
    picture = re.search(rf"{side}/   (\w+(?: · \w+)+)", README)
    assert picture
    source = (ROOT / side / "__main__.py").read_text(encoding="utf-8")
    commands = set(re.findall(r'(?m)^    "(\w+)": ', source[source.index("COMMANDS") :]))
    assert set(picture[1].split(" · ")) == commands

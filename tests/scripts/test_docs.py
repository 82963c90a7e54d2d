"""A document names only what exists: targets, commands, options, files. (Links: tests/scripts/test_readme.py.)"""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch

from slipway.config import options_of
from slipway.contract import INPUT, LOGITS
from train import __main__ as train_command
from train.blocks import blocks_of
from train.config import Config
from train.formats import FORMATS
from train.model import ImageClassifier, inference
from train.servable import Source, exporting

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
TARGETS = set(re.findall(r"(?m)^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(encoding="utf-8")))
OPTIONS = {option.key for option in options_of(Config)}
SECTIONS = {key.split(".")[0] for key in OPTIONS}
# Of `python -m train`, and what `data` and `bundle` do.
SUBCOMMANDS = {"data": {"check", "stats", "show", "split"}, "bundle": {"verify", "diff"}}

FOLDERS = "src|train|serve|deploy|configs|docs|tests|requirements|scripts|benchmarks|\\.github|\\.ci"
# What a reader is to put there, and not a file of this repository.
MADE_UP = {
    *("configs/flowers.yaml", "docs/decisions/NNNN-*.md"),
    *("deploy/compose/compose.override.yaml", "src/harbour"),
}


def code(page: Path) -> Iterator[str]:
    """Everything that a page sets as code: blocks line by line, and spans."""
    text = page.read_text(encoding="utf-8")
    blocks = re.findall(r"(?ms)^```\w*\n(.*?)^```$", text)
    for block in blocks:
        yield from block.splitlines()
    yield from re.findall(r"`([^`\n]+)`", re.sub(r"(?ms)^```.*?^```$", "", text))


def named(page: Path, pattern: str) -> set[str]:
    return {match for piece in code(page) for match in re.findall(pattern, piece)}


def named_pairs(page: Path, pattern: str) -> set[tuple[str, str]]:
    return {(match[1], match[2]) for piece in code(page) for match in re.finditer(pattern, piece)}


@pytest.fixture(params=PAGES, ids=lambda page: page.name)
def page(request: pytest.FixtureRequest) -> Path:
    return request.param


def test_make_targets_exist(page: Path) -> None:
    assert named(page, r"\bmake ([a-z][a-z-]*)") <= TARGETS


def test_commands_exist(page: Path) -> None:
    serve = (ROOT / "serve" / "__main__.py").read_text(encoding="utf-8")
    commands = {
        "train": {*train_command.COMMANDS, "bundle"},
        "serve": set(re.findall(r'(?m)^    "(\w+)": ', serve[serve.index("COMMANDS") :])),
    }
    found = named_pairs(page, r"-m (train|serve) ([a-z]\w*)")
    assert [(side, command) for side, command in found if command not in commands[side]] == []
    actions = named_pairs(page, r"-m train (data|bundle) ([a-z]\w*)")
    assert [(command, action) for command, action in actions if action not in SUBCOMMANDS[command]] == []


def test_commands_run_where_a_reader_pastes_them(page: Path) -> None:
    """Nobody has told them to activate an environment."""
    text = page.read_text(encoding="utf-8")
    blocks = re.findall(r"(?ms)^```sh\n(.*?)^```$", text)
    lines = [line for block in blocks for line in block.splitlines()]
    assert [
        line
        for line in lines
        if re.match(r"(python3? -m (train|serve|deploy|pytest)|pytest|ruff|mypy)\b", line)
    ] == []


def test_options_exist(page: Path) -> None:
    dotted = named(page, r"--([a-z_]+\.[a-z_]+)") | named(page, r"^([a-z]+\.[a-z_]+)(?:: .*)?$")
    assert {name for name in dotted if name.split(".")[0] in SECTIONS and not is_file(name)} <= OPTIONS


def is_file(name: str) -> bool:
    """`data.csv`, `run.sh`: looks like an option of a section and is none."""
    return name.rsplit(".", 1)[1] in {
        "csv",
        "html",
        "json",
        "jsonl",
        "onnx",
        "parquet",
        "py",
        "sh",
        "txt",
        "yaml",
    }


def test_paths_exist(page: Path) -> None:
    paths = named(page, rf"(?:^|[\s\"'(=])((?:{FOLDERS})/[\w./*-]*)") - MADE_UP
    assert [path for path in paths if not exists(path)] == []


def exists(path: str) -> bool:
    """In the repository, or where git is told to ignore what commands and readers put. A star stands for files."""
    if any(ROOT.glob(path)) if "*" in path else (ROOT / path).exists():
        return True
    # Of a folder that is not there git has to be told that it is one.
    ignored = ["git", "check-ignore", "--quiet", f"{path}/x"]
    return subprocess.run(ignored, cwd=ROOT, check=False).returncode == 0


def test_network_of_the_page_trains_exports_and_has_blocks(tmp_path: Path) -> None:
    """docs/your-model.md: what it shows keeps to what it says."""
    text = (ROOT / "docs" / "your-model.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {}
    exec(re.findall(r"(?ms)^```python\n(.*?)^```$", text)[0], names)  # noqa: S102 - our own page
    classifier = ImageClassifier(names["YourNetwork"](10, width=8), (0.5,) * 3, (0.5,) * 3)
    assert len(blocks_of(classifier)) == 4
    pixels = torch.randint(0, 256, (3, 3, 32, 32), dtype=torch.uint8)
    torch.nn.functional.cross_entropy(classifier(pixels), torch.tensor([1, 2, 3])).backward()  # type: ignore[no-untyped-call]
    assert all(parameter.grad is not None for parameter in classifier.parameters())
    classifier.eval()
    with exporting(classifier, 32):
        source = Source(
            classifier=classifier,
            image_size=32,
            max_batch=4,
            onnx=tmp_path / "model.onnx",
            calibration=np.empty((0, 3, 32, 32), dtype=np.uint8),
        )
        FORMATS["onnx"].write("onnx", source, tmp_path)
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    (logits,) = session.run([LOGITS], {INPUT: pixels.numpy()})
    with inference(classifier):
        expected = classifier(pixels).numpy()
    np.testing.assert_allclose(logits, expected, atol=1e-4)

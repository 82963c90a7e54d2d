"""`slipway` <- `train`, `slipway` <- `serve`, never across; so that serving carries no training code."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

TRAINING_ONLY = {"torch", "torchvision", "lightning", "train"}
FORBIDDEN = {
    "src/slipway": {*TRAINING_ONLY, "serve", "deploy"},
    "serve": {*TRAINING_ONLY, "deploy"},
    "train": {"serve", "deploy"},
    "scripts": {"train", "serve", "deploy"},
    "deploy": TRAINING_ONLY,
}


def imported_packages(source: str) -> set[str]:
    """Top-level packages that a file imports, anywhere in it and by any means that names them literally."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            names |= {str(argument.value) for argument in node.args if isinstance(argument, ast.Constant)}
    return {name.partition(".")[0] for name in names}


@pytest.mark.parametrize("folder", FORBIDDEN)
def test_imports_point_one_way(folder: str) -> None:
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files, f"{folder} has no Python files; has it moved?"
    crossing = {
        str(file.relative_to(ROOT)): sorted(found)
        for file in files
        if (found := imported_packages(file.read_text(encoding="utf-8")) & FORBIDDEN[folder])
    }
    assert not crossing


@pytest.mark.parametrize(
    "source",
    [
        "import torch",
        "import numpy, torch.nn as nn",
        "from torch.utils import data",
        "def lazily():\n    import torch",
        "import importlib\nimportlib.import_module('torch.onnx')",
        "__import__('torch')",
    ],
)
def test_every_form_of_import_is_seen(source: str) -> None:
    assert "torch" in imported_packages(source)

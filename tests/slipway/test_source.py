"""What was made is stale exactly when the code that makes it has changed."""

from pathlib import Path

import pytest

from slipway import source
from slipway.source import code_hash, reached_from

MODULES = {
    "slipway/__init__.py": "",
    "slipway/base.py": "VALUE = 1\n",
    "slipway/unused.py": "VALUE = 2\n",
    "train/__init__.py": "",
    "train/fit.py": "import json\nfrom train import loop\nfrom slipway.base import VALUE\n",
    "train/loop.py": "def run():\n    if True:\n        import train.deep.late as late\n    return late\n",
    "train/report.py": "import train.fit\n",
    "train/deep/__init__.py": "from train.deep import helper\n",
    "train/deep/helper.py": "import train.fit\n",
    "train/deep/late.py": "import torch.nn, slipway.base\n",
    "train/broken.py": "from train import no_such_module\nimport slipway.neither\n",
    "serve/up.py": "from slipway import unused\n",
}
REACHED = {
    "slipway", "slipway.base", "train", "train.fit", "train.loop", "train.deep", "train.deep.helper", "train.deep.late",
}  # fmt: skip


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in MODULES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    packages = {name: tmp_path / name for name in ("slipway", "train", "serve")}
    monkeypatch.setattr(source, "_PACKAGES", packages)
    return tmp_path


def test_everything_that_is_imported_counts_however_deep(tree: Path) -> None:
    """Through packages, late imports and circles; nothing of others, and nothing that only imports it."""
    reached = reached_from("train.fit")
    assert reached.keys() == REACHED
    assert reached["train.deep"] == tree / "train/deep/__init__.py"
    assert reached["train.deep.late"] == tree / "train/deep/late.py"


@pytest.mark.parametrize("name", MODULES)
def test_hash_changes_exactly_with_what_is_reached(tree: Path, name: str) -> None:
    before = code_hash("train.fit")
    with (tree / name).open("a", encoding="utf-8") as file:
        file.write("# changed\n")
    module = name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    assert (code_hash("train.fit") != before) == (module in REACHED)


def test_hash_does_not_depend_on_where_the_checkout_lies(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = code_hash("train.fit")
    moved = tree / "somewhere else"
    for name in ("slipway", "train", "serve"):
        (moved / name).parent.mkdir(exist_ok=True)
        (tree / name).rename(moved / name)
    monkeypatch.setattr(source, "_PACKAGES", {name: moved / name for name in ("slipway", "train", "serve")})
    assert code_hash("train.fit") == before


def test_new_name_of_a_module_counts(tree: Path) -> None:
    before = code_hash("train.fit")
    (tree / "slipway/base.py").rename(tree / "slipway/basis.py")
    text = (tree / "train/fit.py").read_text(encoding="utf-8").replace("slipway.base", "slipway.basis")
    (tree / "train/fit.py").write_text(text, encoding="utf-8")
    assert code_hash("train.fit") != before


def test_names_that_are_no_modules_are_passed_over(tree: Path) -> None:
    assert reached_from("train.broken").keys() == {"train.broken", "train", "slipway"}


@pytest.mark.parametrize("entry", ["train.fitt", "json", "torch.nn", "train.fit.run"])
def test_entry_that_is_none_of_ours_is_refused(tree: Path, entry: str) -> None:
    """Hashed as nothing, it would never be stale again."""
    with pytest.raises(ModuleNotFoundError, match=entry):
        code_hash(entry)


def test_real_preprocessing_reaches_what_decides_about_pixels() -> None:
    reached = reached_from("slipway.preprocessing")
    assert {"slipway.preprocessing", "slipway.contract", "slipway.errors"} <= reached.keys()
    assert all(path.is_file() for path in reached.values())
    assert "slipway.config" not in reached

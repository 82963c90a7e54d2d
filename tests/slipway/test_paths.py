"""The one rule for relative paths (case E05)."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from slipway import paths
from slipway.paths import PROJECT_ROOT, relative_to_project


def test_project_root_is_this_checkout() -> None:
    assert PROJECT_ROOT.is_absolute()
    assert Path(__file__).resolve().parents[2] == PROJECT_ROOT
    assert (PROJECT_ROOT / "pyproject.toml").is_file()


@pytest.mark.parametrize(
    ("path", "written"),
    [
        (PROJECT_ROOT / "data/digits", "data/digits"),
        (Path("data/digits"), "data/digits"),
        (PROJECT_ROOT / "runs/../data", "data"),
        (PROJECT_ROOT, "."),
        (Path("/"), "/"),
    ],
)
def test_path_is_written_relative_to_the_project_where_it_lies_inside(
    path: Path, written: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert str(relative_to_project(path)) == written


def test_path_outside_the_project_is_written_in_full(tmp_path: Path) -> None:
    outside = PROJECT_ROOT.parent / f"{PROJECT_ROOT.name}-of-somebody-else" / "data"
    assert relative_to_project(outside) == outside
    assert relative_to_project(tmp_path) == tmp_path.resolve()
    assert relative_to_project(PROJECT_ROOT / ".." / "data") == PROJECT_ROOT.parent / "data"


def test_link_that_leads_out_of_the_project_is_written_as_its_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paths, "PROJECT_ROOT", tmp_path.resolve() / "project")
    (tmp_path / "project").mkdir()
    (tmp_path / "photos").mkdir()
    (tmp_path / "project/data").symlink_to(tmp_path / "photos")
    assert relative_to_project(Path("data")) == tmp_path.resolve() / "photos"


def changes_of_directory() -> Iterator[str]:
    for folder in ("src", "train", "serve", "scripts"):
        for path in sorted((PROJECT_ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_bytes())):
                name = getattr(node, "attr", getattr(node, "id", None))
                if name in ("chdir", "fchdir"):
                    yield f"{path.relative_to(PROJECT_ROOT)}:{getattr(node, 'lineno', 0)}"


def test_nothing_changes_the_current_directory() -> None:
    assert list(changes_of_directory()) == []

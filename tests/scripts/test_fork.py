"""A fork gets a name of its own by one command, and still gets what upstream does."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import fork
from scripts.fork import ForkError, UsageError

ROOT = Path(__file__).resolve().parents[2]
WHO = ("-c", "user.name=somebody", "-c", "user.email=somebody@example.org")
FILES = {
    "src/slipway/compatibility.toml": "# of slipway\n",
    "src/slipway/contract.py": 'FORMAT = "slipway-signature/1"\nLIMIT = 1\n',
    "serve/health.py": "import zoo\n\nfrom serve import quick\nfrom slipway import Slipway\n",
    "requirements/train.in": "# as src/slipway/compatibility.toml says\ntorch==2.14.1\n",
    "README.md": "# Slipway\n\nSLIPWAY_USER is for slipway_errors_total of slipway-serve.\n",
}


def commit(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    fork.git(root, "add", "--all")
    fork.git(root, *WHO, "commit", "--quiet", "--message", "a change")


def read(root: Path) -> dict[str, str]:
    return {
        path: (root / path).read_text() for path in sorted(fork.tracked(root)) if not path.endswith("png")
    }


@pytest.fixture
def upstream(tmp_path: Path) -> Path:
    root = tmp_path / "upstream"
    root.mkdir()
    fork.git(root, "init", "--quiet")
    (root / "tests" / "slipway").mkdir(parents=True)
    (root / "tests" / "slipway" / "image.png").write_bytes(b"\x89PNG slipway \xff")
    commit(root, FILES)
    return root


@pytest.fixture
def renamed(upstream: Path, tmp_path: Path) -> Path:
    """A fork that is called harbour, and has a change of its own."""
    root = tmp_path / "fork"
    fork.git(tmp_path, "clone", "--quiet", str(upstream), str(root))
    fork.rename(root, "harbour")
    commit(root, {"README.md": "# Our Harbour\n"})
    return root


def test_everything_is_called_by_the_new_name_but_formats_images_and_pins(renamed: Path) -> None:
    assert read(renamed) == {
        "README.md": "# Our Harbour\n",
        # To the byte, or its lock would be stale.
        "requirements/train.in": FILES["requirements/train.in"],
        # In the order that the new name has among the others.
        "serve/health.py": "import zoo\n\nfrom harbour import Harbour\nfrom serve import quick\n",
        "src/harbour/compatibility.toml": "# of harbour\n",
        "src/harbour/contract.py": 'FORMAT = "slipway-signature/1"\nLIMIT = 1\n',
    }
    assert (renamed / "tests" / "harbour" / "image.png").read_bytes() == b"\x89PNG slipway \xff"
    assert not (renamed / "src" / "slipway").exists()
    assert not (renamed / "tests" / "slipway").exists()


def test_links_are_passed_over(upstream: Path, tmp_path: Path) -> None:
    """What a link leads to is renamed for itself, or lies outside and is somebody else's."""
    outside = tmp_path / "outside.md"
    outside.write_text("slipway\n")
    for name, target in {"src/slipway/outside.md": str(outside), "folder": "src"}.items():
        (upstream / name).symlink_to(target)
    commit(upstream, {"zoo.md": "slipway\n"})
    fork.rename(upstream, "harbour")
    assert outside.read_text() == "slipway\n"
    assert (upstream / "src" / "harbour" / "outside.md").readlink() == outside
    assert (upstream / "folder").readlink() == Path("src")
    assert (upstream / "zoo.md").read_text() == "harbour\n"


def test_every_spelling_is_renamed() -> None:
    assert fork.renamed(FILES["README.md"], "harbour") == (
        "# Harbour\n\nHARBOUR_USER is for harbour_errors_total of harbour-serve.\n"
    )


def test_update_brings_what_upstream_did_under_the_new_name_and_keeps_what_the_fork_did(
    upstream: Path, renamed: Path
) -> None:
    commit(
        upstream,
        {
            "src/slipway/contract.py": 'FORMAT = "slipway-signature/1"\nLIMIT = 2\n',
            "src/slipway/sealed.py": "from slipway.contract import LIMIT\n",
            "requirements/train.in": FILES["requirements/train.in"].replace("2.14.1", "2.14.2"),
        },
    )
    fork.git(renamed, "fetch", "--quiet")
    assert fork.update(renamed, "FETCH_HEAD").startswith("merged; look at it")
    fork.git(renamed, *WHO, "commit", "--quiet", "--no-edit")
    found = read(renamed)
    assert found["src/harbour/contract.py"].endswith("LIMIT = 2\n")
    assert found["src/harbour/sealed.py"] == "from harbour.contract import LIMIT\n"
    assert found["requirements/train.in"] == read(upstream)["requirements/train.in"]
    assert found["README.md"] == "# Our Harbour\n"
    assert not [path for path in found if "slipway" in path]
    assert fork.update(renamed, "FETCH_HEAD") == "FETCH_HEAD is merged already"
    assert fork.git(renamed, "worktree", "list").count("\n") == 0


def test_update_that_conflicts_is_left_to_be_mended(upstream: Path, renamed: Path) -> None:
    commit(upstream, {"README.md": "# Slipway, faster\n"})
    fork.git(renamed, "fetch", "--quiet")
    with pytest.raises(ForkError, match=r"(?s)not all could be merged:.*CONFLICT.*README\.md.*mend what"):
        fork.update(renamed, "FETCH_HEAD")
    assert "<<<<<<<" in (renamed / "README.md").read_text()
    commit(renamed, {"README.md": "# Our Harbour, faster\n"})
    assert fork.update(renamed, "FETCH_HEAD") == "FETCH_HEAD is merged already"


def test_update_of_a_copy_without_history_says_how_to_give_it_one(upstream: Path, tmp_path: Path) -> None:
    root = tmp_path / "copy"
    root.mkdir()
    fork.git(root, "init", "--quiet")
    commit(root, FILES)
    fork.rename(root, "harbour")
    commit(root, {"README.md": "# Our Harbour\n"})
    fork.git(root, "fetch", "--quiet", str(upstream))
    with pytest.raises(ForkError, match="FETCH_HEAD has no history in common with this checkout"):
        fork.update(root, "FETCH_HEAD")
    fork.git(
        root, *WHO, "merge", "--strategy", "ours", "--allow-unrelated-histories", "--no-edit", "FETCH_HEAD"
    )
    commit(upstream, {"serve/tide.py": "import slipway\n"})
    fork.git(root, "fetch", "--quiet", str(upstream))
    assert fork.update(root, "FETCH_HEAD").startswith("merged; look at it")
    assert (root / "serve" / "tide.py").read_text() == "import harbour\n"
    assert (root / "README.md").read_text() == "# Our Harbour\n"


def test_exit_codes(
    upstream: Path, renamed: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """0 done, 1 failed, also by a conflict, 2 wrong usage."""
    commit(upstream, {"README.md": "# Slipway, faster\n"})
    fork.git(renamed, "fetch", "--quiet")
    monkeypatch.setattr(fork, "ROOT", renamed)
    assert fork.main(["update", "HEAD"]) == 0
    assert "HEAD is merged already" in capsys.readouterr().out
    assert fork.main(["update", "upstream/mian"]) == 2
    assert "upstream/mian is no commit here; `git fetch upstream`" in capsys.readouterr().err
    assert fork.main(["rename", "quay"]) == 1
    assert "error: this fork is called harbour already" in capsys.readouterr().err
    assert fork.main(["update", "FETCH_HEAD"]) == 1
    assert "CONFLICT" in capsys.readouterr().err
    monkeypatch.setattr(fork, "ROOT", upstream)
    assert fork.main(["rename", "Acme"]) == 2
    assert "error: 'Acme' cannot be imported everywhere" in capsys.readouterr().err
    assert fork.main(["rename", "acme"]) == 0
    assert "called acme; look at it" in capsys.readouterr().out
    assert fork.main(["rename", "other"]) == 1
    assert "commit or stash them first" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Acme", "cannot be imported everywhere"),
        ("a-b", "cannot be imported everywhere"),
        ("class", "cannot be imported everywhere"),
        ("json", "json is imported or installed here already"),
        ("serve", "serve is imported or installed here already"),
        ("zoo", "zoo is imported or installed here already"),
        ("triton", "triton is imported or installed here already"),
    ],
)
def test_name_that_would_not_do_is_refused(upstream: Path, name: str, words: str) -> None:
    commit(upstream, {"requirements/train.lock": "triton==3.6.0 \\\n    --hash=sha256:0\n"})
    with pytest.raises(UsageError, match=words):
        fork.require_usable(upstream, name)


def test_fork_is_renamed_once(renamed: Path) -> None:
    with pytest.raises(ForkError, match="this fork is called harbour already"):
        fork.require_usable(renamed, "quay")


def test_changes_that_are_not_committed_are_not_mixed_with_others(upstream: Path) -> None:
    fork.require_nothing_uncommitted(upstream)
    (upstream / "new.py").touch()
    with pytest.raises(ForkError, match="commit or stash them first"):
        fork.require_nothing_uncommitted(upstream)


@pytest.mark.slow
def test_this_repository_is_as_good_under_another_name(tmp_path: Path) -> None:
    """Of its tests only some are run here; docs/forking.md says what was."""
    root = tmp_path / "harbour"
    root.mkdir()
    listed = fork.git(ROOT, "ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0")
    for path in (path for path in listed if path and (ROOT / path).is_file()):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes((ROOT / path).read_bytes())
    fork.git(root, "init", "--quiet")
    fork.git(root, "add", "--all")
    fork.rename(root, "harbour")
    fork.git(root, "add", "--all")
    found = subprocess.run(
        ["git", "grep", "-il", "slipway"], cwd=root, capture_output=True, text=True, check=True
    )
    formats = subprocess.run(
        ["git", "grep", "-lE", "slipway-[a-z-]+/[0-9]"], cwd=root, capture_output=True, text=True, check=True
    )
    assert {path for path in found.stdout.split() if not fork.is_kept(path)} <= set(formats.stdout.split())
    subprocess.run([fork.RUFF, "check", "--quiet", "."], cwd=root, check=True)
    tests = [
        "tests/harbour/test_contract.py",
        "tests/harbour/test_sealed.py",
        "tests/scripts/test_makefile.py",
    ]
    packages = {"PYTHONPATH": f"{root / 'src'}:{root}"}
    for command in (["scripts/lock.py", "--check"], ["-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]):
        done = subprocess.run(
            [sys.executable, *command],
            cwd=root,
            env={**os.environ, **packages},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr

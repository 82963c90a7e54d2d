"""What no wheel brings is installed from one list, and what is missing is named."""

import shutil
from pathlib import Path

import pytest

from scripts import programs
from tests.programs import require


def write_list(monkeypatch: pytest.MonkeyPatch, folder: Path, text: str) -> None:
    path = folder / "debian.txt"
    path.write_text(text, encoding="utf-8")
    monkeypatch.setattr(programs, "LIST", path)


def test_only_packages_whose_program_is_missing_are_wanted() -> None:
    text = "# package program\nbash bash\n\nghost-tools   no-such-program\n"
    assert programs.missing_packages(text) == ["ghost-tools"]


def test_what_brings_no_program_is_known_by_a_file_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "module.so").touch()
    text = f"module {tmp_path}/module.so\nghost {tmp_path}/ghost.so\n"
    assert programs.missing_packages(text) == ["ghost"]


def test_nothing_is_done_where_nothing_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write_list(monkeypatch, tmp_path, "bash bash\n")
    monkeypatch.setattr(programs, "install", lambda packages: pytest.fail(f"installs {packages}"))
    assert programs.main([]) == 0


def test_check_names_the_command_and_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_list(monkeypatch, tmp_path, "ghost-tools no-such-program\n")
    assert programs.main(["--check"]) == 1
    assert "apt-get install --no-install-recommends ghost-tools" in capsys.readouterr().err


@pytest.mark.skipif(shutil.which("apt-get") is None, reason="this machine has no apt-get")
def test_package_manager_that_fails_is_quoted(capsys: pytest.CaptureFixture[str]) -> None:
    # An option that it does not know fails before anything is fetched.
    assert programs.run_apt("update", "--no-such-option") == 1
    assert "--no-such-option" in capsys.readouterr().err


def test_a_test_whose_program_is_missing_is_skipped_but_fails_in_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match="no-such-program not found; `make programs`"):
        require("bash", "no-such-program")
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="no-such-program not found; `make programs`"):
        require("bash", "no-such-program")

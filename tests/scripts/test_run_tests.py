"""A failure in either environment is a failure, and a run of no tests is not a success."""

import sys
from pathlib import Path

import pytest

from scripts import run_tests


@pytest.mark.parametrize(
    ("train", "serve", "expected"),
    [
        (0, 0, 0),
        (1, 0, 1),
        (0, 1, 1),
        (2, 0, 1),
        (-9, 0, 1),
        (run_tests.NO_TESTS_RAN, 0, 0),
        (0, run_tests.NO_TESTS_RAN, 0),
        (run_tests.NO_TESTS_RAN, 1, 1),
        (run_tests.NO_TESTS_RAN, run_tests.NO_TESTS_RAN, 1),
    ],
)
def test_failure_in_either_environment_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, train: int, serve: int, expected: int
) -> None:
    codes = {"train": train, "serve": serve}
    monkeypatch.setattr(run_tests, "run_suite", lambda name, options, scratch: codes[name])
    monkeypatch.setattr(run_tests, "report_coverage", lambda scratch: None)
    assert run_tests.main([]) == expected


def test_every_test_folder_belongs_to_a_suite() -> None:
    folders = {f"tests/{path.parent.name}" for path in (run_tests.ROOT / "tests").glob("*/test_*.py")}
    assert folders
    assert folders <= {folder for suite in run_tests.SUITES.values() for folder in suite}


@pytest.fixture
def environments(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A checkout whose Pythons only say how they were called, and the first of them what the second waits for."""
    monkeypatch.setattr(run_tests, "ROOT", tmp_path)
    monkeypatch.setattr(run_tests, "report_coverage", lambda scratch: None)
    for name in run_tests.SUITES:
        python = tmp_path / ".venv" / name / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.write_text(PYTHON.format(name=name))
        python.chmod(0o755)
    return tmp_path


# Each waits for the other: one after the other, they would never end.
PYTHON = """#!/bin/sh
touch "{name} is here"
for try in $(seq 6000); do
    test -e "train is here" && test -e "serve is here" && break
    sleep 0.01
done
echo "$@"
exit 3
"""


def test_suites_run_side_by_side_with_the_options_and_say_whose_line_it_is(
    environments: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run_tests.main(["-k", "health"]) == 1
    lines = [line for line in capfd.readouterr().out.splitlines() if line and not line.startswith("==")]
    assert sorted(line.split(":")[0] for line in lines) == ["serve", "train"]
    for line in lines:
        name, said = line.split(": ")
        assert said.startswith("-u -m pytest --cov ")
        assert said.endswith(" ".join(["-k health", *run_tests.SUITES[name]]))


TESTS = """
import pytest

def test_adds():
    assert 1 + 1 == 2

def test_compares():
    assert 3 == 4, "three is not four"

@pytest.fixture
def broken():
    raise OSError("no room")

def test_needs_room(broken):
    pass
"""


def test_what_failed_is_said_again_at_the_end_of_a_long_log(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    tests = tmp_path / "test_numbers.py"
    tests.write_text(TESTS)
    monkeypatch.setattr(run_tests, "SUITES", {"train": [str(tests)]})
    monkeypatch.setattr(run_tests, "python", lambda name: sys.executable)
    monkeypatch.setattr(run_tests, "report_coverage", lambda scratch: print("== coverage of both"))
    assert run_tests.main(["-p", "no:cacheprovider", f"--rootdir={tmp_path}"]) == 1
    end = capfd.readouterr().out.partition("== coverage of both")[2]
    assert "== train: pytest ended with 1" in end
    assert "failure: test_numbers::test_compares\n    AssertionError: three is not four" in end
    assert "error: test_numbers::test_needs_room" in end
    assert "no room" in end
    assert "test_adds" not in end

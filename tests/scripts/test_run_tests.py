"""A failure in either environment is a failure, and a run of no tests is not a success."""

import subprocess
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


def test_options_reach_pytest_in_the_environment_of_the_suite(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    commands = []

    def note(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", note)
    run_tests.run_suite("serve", ["-k", "health"], tmp_path)
    assert commands[0][0] == str(run_tests.ROOT / ".venv/serve/bin/python")
    suites = ["tests/slipway", "tests/serve", "tests/deploy", "tests/benchmarks"]
    assert commands[0][-6:] == ["-k", "health", *suites]

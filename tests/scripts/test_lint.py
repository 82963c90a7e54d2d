"""Each linter is run on its own files, and finds what is wrong with them; none is left out unnoticed."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

from scripts import lint
from tests import programs

ROOT = Path(__file__).resolve().parents[2]

TEST = 'def test_a() -> None:\n    assert len("a") == 1\n'
WORKFLOW = """\
name: ci
on:
  push:
    branches: [main]
permissions: {}
concurrency:
  group: ${{ github.workflow }}-${{ github.ref }}
  cancel-in-progress: true
jobs:
  lint:
    name: lint
    runs-on: ubuntu-24.04
    timeout-minutes: 10
    steps:
      - name: Lint
        env:
          TITLE: ${{ github.event.head_commit.message }}
        run: make lint "$TITLE"
"""
DEPENDABOT = """\
version: 2
updates:
  - package-ecosystem: docker
    directory: /
    cooldown:
      default-days: 7
    schedule:
      interval: weekly
"""
COMPOSE = """\
services:
  server:
    image: busybox:1.37
"""
RULES = """\
groups:
  - name: server
    rules:
      - alert: Down
        expr: up == 0
"""
RULE_TESTS = """\
rule_files: [rules.yaml]
tests:
  - input_series:
      - series: up{job="a"}
        values: 0 0 0
    alert_rule_test:
      - alertname: Down
        eval_time: 1m
        exp_alerts:
          - exp_labels:
              job: a
"""


class Fault(NamedTuple):
    """A sound file, a change that spoils it, and what its linter says of that. beside: another file that it needs."""

    check: str
    path: str
    text: str
    spoil: tuple[str, str]
    said: str
    beside: tuple[str, str] | None = None


FAULTS = [
    Fault("mypy-train", "train/a.py", "A: int = 1\n", ("= 1", '= ""'), "[assignment]"),
    Fault("mypy-serve", "serve/a.py", "A: int = 1\n", ("= 1", '= ""'), "[assignment]"),
    Fault("mypy-train", "tests/train/test_a.py", TEST, (" -> None", ""), "[no-untyped-def]"),
    # Of another length: mypy takes a file of the same size and second for the one that it knows.
    Fault("mypy-serve", "tests/serve/test_a.py", TEST, ('"a"', "1"), "[arg-type]"),
    Fault("ruff", "serve/a.py", "import os\n\nprint(os.sep)\n", ("print(os.sep)\n", ""), "F401"),
    Fault("ruff", "serve/a.py", "A = 1\n", (" = ", "="), "would be reformatted"),
    Fault("hadolint", "deploy/x/Dockerfile", "FROM busybox:1.37\n", (":1.37", ":latest"), "DL3007"),
    Fault("shellcheck", "deploy/job.sbatch", "#!/bin/bash\necho\n", ("echo", "echo $A"), "SC2086"),
    Fault("shellcheck", ".ci/run", "#!/usr/bin/env bash\necho\n", ("echo", "echo $1"), "SC2086"),
    Fault("yamllint", "configs/a.yaml", "a: 1\n", ("a: 1", "a: 1\na: 2"), "duplication of key"),
    Fault("jactionlint", ".github/workflows/a.yml", WORKFLOW, ("ubuntu-24.04", "ubuntoo"), "ubuntoo"),
    Fault("jactionlint", ".github/workflows/a.yml", WORKFLOW, ('"$TITLE"', "$TITLE"), "SC2086"),
    Fault(
        "zizmor", ".github/workflows/a.yml", WORKFLOW, ("$TITLE", "${{ github.ref }}"), "template-injection"
    ),
    Fault("dependabot", ".github/dependabot.yml", DEPENDABOT, ("weekly", "sometimes"), "sometimes"),
    Fault("gitlab-ci", ".gitlab-ci.yml", "lint:\n  script: [make lint]\n", ("script", "skript"), "skript"),
    Fault("compose", "deploy/compose/compose.yaml", COMPOSE, ("image:", "imago:"), "imago"),
    Fault("compose", "deploy/other/docker-compose.gpu.yml", COMPOSE, ("image:", "imago:"), "imago"),
    Fault(
        "compose",
        "deploy/compose/compose.gpu.yaml",
        "services:\n  server:\n    read_only: true\n",
        ("read_only", "read_onlie"),
        "read_onlie",
        beside=("deploy/compose/compose.yaml", COMPOSE),
    ),
    Fault(
        "kubernetes",
        "deploy/kubernetes/base/map.yaml",
        "apiVersion: v1\nkind: ConfigMap\nmetadata:\n  name: a\ndata:\n  a: b\n",
        ("\ndata:", "\ndato:"),
        "'dato' was unexpected",
        beside=("deploy/kubernetes/base/kustomization.yaml", "resources: [map.yaml]\n"),
    ),
    Fault(
        "prometheus",
        "deploy/monitoring/prometheus.yaml",
        "scrape_configs:\n  - job_name: server\n",
        ("job_name", "job_nome"),
        "job_nome",
    ),
    Fault("prometheus-rules", "rules.yaml", RULES, ("up ==", "up ===="), "could not parse expression"),
    Fault(
        "prometheus-tests",
        "tests.yaml",
        RULE_TESTS,
        ("0 0 0", "1 1 1"),
        "got:[]",
        beside=("rules.yaml", RULES),
    ),
    Fault(
        "alertmanager",
        "deploy/monitoring/alertmanager.yaml",
        "route:\n  receiver: a\nreceivers:\n  - name: a\n",
        ("receiver: a", "receiver: b"),
        "undefined receiver",
    ),
]
IDS = [f"{fault.check}-{number}" for number, fault in enumerate(FAULTS)]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    root = tmp_path / "checkout of a fork"
    root.mkdir()
    subprocess.run(["git", "init", "--quiet"], cwd=root, check=True)
    for name in ("pyproject.toml", ".yamllint"):
        shutil.copy(ROOT / name, root)
    return root


def examine(root: Path, check: str, files: dict[str, str]) -> lint.Result:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    result = lint.run(root, lint.tracked(root), lint.BY_NAME[check])
    if result.state == lint.NOT_CHECKED:
        programs.require(*lint.BY_NAME[check].needs)
    return result


@pytest.mark.parametrize("fault", FAULTS, ids=IDS)
def test_fault_is_found_and_nothing_else(checkout: Path, fault: Fault) -> None:
    beside = dict([fault.beside]) if fault.beside else {}
    sound = examine(checkout, fault.check, {**beside, fault.path: fault.text})
    assert (sound.state, sound.output) == (lint.OK, "")
    spoilt = examine(checkout, fault.check, {fault.path: fault.text.replace(*fault.spoil)})
    assert spoilt.state == lint.FAILED
    assert fault.said in spoilt.output


def test_every_check_has_a_fault_that_it_finds() -> None:
    # Stale locks: tests/scripts/test_lock.py.
    assert {fault.check for fault in FAULTS} == lint.BY_NAME.keys() - {"locks"}


def test_kubernetes_object_without_a_schema_is_not_taken_for_a_good_one(checkout: Path) -> None:
    unknown = "apiVersion: example.com/v1\nkind: Thing\nmetadata:\n  name: a\n"
    files = {"k/kustomization.yaml": "resources: [a.yaml]\n", "k/a.yaml": unknown}
    assert re.search("kind Thing|Thing a: .* has no such kind", examine(checkout, "kubernetes", files).output)


def test_part_of_a_kustomization_is_judged_by_what_it_becomes(checkout: Path) -> None:
    files = {
        "k/base/kustomization.yaml": "resources: [map.yaml]\n",
        "k/base/map.yaml": "apiVersion: v1\nkind: ConfigMap\nmetadata:\n  name: a\ndata: {}\n",
        "k/part/kustomization.yaml": "apiVersion: kustomize.config.k8s.io/v1alpha1\nkind: Component\n"
        "patches:\n  - target: {kind: ConfigMap, name: a}\n    patch: |\n"
        "      - {op: add, path: /data/a, value: 1}\n",
        "k/whole/kustomization.yaml": "resources:\n  - ../base\ncomponents:\n  - ../part\n",
    }
    result = examine(checkout, "kubernetes", files)
    assert set(re.findall(r"k/\w+", result.output)) == {"k/whole"}
    assert re.search("k/whole: .*1 is not of type", result.output)


def test_files_that_git_ignores_are_passed_over(checkout: Path) -> None:
    files = {".gitignore": "/runs/\n", "runs/a.sh": "echo $A", "b.sh": "#!/bin/sh\n"}
    result = examine(checkout, "shellcheck", files)
    assert (result.state, result.files) == (lint.OK, 1)


def test_every_python_file_of_this_checkout_is_checked_for_types() -> None:
    files = [name for name in lint.tracked(ROOT) if name.endswith(".py")]
    sides = [lint.of_side("train"), lint.of_side("serve")]
    assert [name for name in files if not any(chooses(ROOT, name) for chooses in sides)] == []


def test_missing_program_is_named_and_fails_in_ci(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (checkout / "a.sh").write_text("#!/bin/sh\n")
    monkeypatch.setattr(lint, "ROOT", checkout)
    monkeypatch.setattr(lint, "SEARCHED", str(checkout))
    monkeypatch.delenv("CI", raising=False)
    assert lint.main(["shellcheck"]) == 0
    printed = capsys.readouterr()
    assert "shellcheck         NOT CHECKED      1 file\n    shellcheck not found" in printed.out
    assert printed.err == "warning: not checked, for want of programs: shellcheck\n"
    monkeypatch.setenv("CI", "true")
    assert lint.main(["shellcheck"]) == 1
    assert "error: not checked" in capsys.readouterr().err


def test_what_was_found_is_shown_with_what_to_do(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (checkout / "a.sh").write_text("#!/bin/sh\necho $1\n")
    monkeypatch.setattr(lint, "ROOT", checkout)
    assert lint.main(["shellcheck", "compose"]) == 1
    printed = capsys.readouterr()
    assert "SC2086" in printed.out
    assert "    → mend it, or `# shellcheck disable=SC…`" in printed.out
    assert "compose            no files\n" in printed.out
    assert printed.err == "error: shellcheck found something; it is shown above\n"


def test_copy_without_git_is_told_that_git_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    (tmp_path / "copy").mkdir()
    with pytest.raises(SystemExit, match="copy: git has to say which files there are"):
        lint.tracked(tmp_path / "copy")


def test_check_that_does_not_exist_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        lint.main(["spellcheck"])
    assert stopped.value.code == 2
    assert "there is no check spellcheck; the checks are mypy-train, mypy-serve" in capsys.readouterr().err

import json
import subprocess
from pathlib import Path

import pytest

from slipway.config import load
from tests.train.conftest import MakeConfig, MakeFolder
from train.config import Config
from train.fit import fit
from train.folder import read_folder
from train.runs import Run, append_metrics, environment, forget_metrics_after, git_state, read_metrics


def test_run_says_what_was_trained_from_what_on_what(
    make_folder: MakeFolder, make_config: MakeConfig
) -> None:
    config = make_config(make_folder(), training__epochs="1")
    folder = read_folder(config.data)
    directory = fit(config, folder)
    assert load(Config, directory / "config.yaml", {}) == config
    content = json.loads((directory / "environment.json").read_text())
    assert content["precision"] == {"requested": "32-true", "effective": "32-true"}
    assert content["data"]["fingerprint"] == folder.fingerprint
    assert content["data"]["images"] == {"train": 21, "val": 9, "test": 9}
    assert content["versions"]["torch"].startswith("2.")
    assert len(content["lock_sha256"]) == 64


def test_line_cut_short_by_a_kill_is_left_out(tmp_path: Path) -> None:
    run = Run(directory=tmp_path, inputs="")
    append_metrics(run, {"step": 1})
    with run.metrics.open("a") as file:
        file.write('{"step": 2')
    assert list(read_metrics(run)) == [{"step": 1}]
    forget_metrics_after(run, 1)
    append_metrics(run, {"step": 2})
    assert list(read_metrics(run)) == [{"step": 1}, {"step": 2}]


def test_what_will_happen_again_is_forgotten(tmp_path: Path) -> None:
    run = Run(directory=tmp_path, inputs="")
    assert list(read_metrics(run)) == []
    for step in range(5):
        append_metrics(run, {"step": step})
    forget_metrics_after(run, 2)
    assert [line["step"] for line in read_metrics(run)] == [0, 1, 2]


def test_git_state_is_null_where_there_is_no_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*arguments: str) -> str:
        raise subprocess.CalledProcessError(128, "git")

    monkeypatch.setattr("train.runs._git", fails)
    assert git_state() == {"commit": None, "dirty": None}
    assert environment()["git"] == git_state()

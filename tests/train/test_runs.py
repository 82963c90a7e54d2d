import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slipway.config import load
from slipway.errors import SlipwayError
from tests.train.conftest import MakeConfig, MakeFolder, full_disk
from train.config import Config
from train.fit import fit
from train.folder import read_folder
from train.runs import (
    Run,
    append_metrics,
    environment,
    epochs_without_gain,
    forget_metrics_after,
    git_state,
    read_metrics,
)


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
    append_metrics(run, {"step": 1, "samples": 8})
    with run.metrics.open("a") as file:
        file.write('{"step": 2')
    assert list(read_metrics(run)) == [{"step": 1, "samples": 8}]
    forget_metrics_after(run, 8)
    append_metrics(run, {"step": 2})
    assert list(read_metrics(run)) == [{"step": 1, "samples": 8}, {"step": 2}]


def test_what_will_happen_again_is_forgotten(tmp_path: Path) -> None:
    run = Run(directory=tmp_path, inputs="")
    assert list(read_metrics(run)) == []
    for step in range(5):
        append_metrics(run, {"step": step, "samples": 8 * step})
    forget_metrics_after(run, 16)
    assert [line["step"] for line in read_metrics(run)] == [0, 1, 2]


@pytest.mark.parametrize("write", [append_metrics, lambda run, line: forget_metrics_after(run, 8)])
def test_full_disk_is_said_in_words(tmp_path: Path, write: Callable[[Run, dict[str, Any]], None]) -> None:
    """Case B03: long before the next checkpoint. What was logged stays."""
    run = Run(directory=tmp_path, inputs="")
    line = {"samples": 8, "text": "x" * 80}
    append_metrics(run, line)
    with (
        full_disk(),
        pytest.raises(
            SlipwayError, match=rf"{run.metrics}: cannot be written \(.*File too large.* MB are free"
        ),
    ):
        write(run, line)
    assert list(read_metrics(run)) == [line]


def test_git_state_is_null_where_there_is_no_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*arguments: str) -> str:
        raise subprocess.CalledProcessError(128, "git")

    monkeypatch.setattr("train.runs._git", fails)
    assert git_state() == {"commit": None, "dirty": None}
    assert environment()["git"] == git_state()


def test_epochs_without_gain_count_from_the_best_of_both_weights(tmp_path: Path) -> None:
    run = Run(directory=tmp_path, inputs="")
    assert epochs_without_gain(run) == 0
    scores = [(0, 0.5, 0.7), (1, 0.6, 0.6), (2, 0.6, 0.9), (3, 0.5, 0.3)]
    for epoch, raw, average in scores:
        for weights, accuracy in (("raw", raw), ("ema", average)):
            line = {"kind": "evaluation", "step": epoch, "epoch": epoch, "weights": weights}
            append_metrics(run, {**line, "accuracy": accuracy, "loss": 1.0})
    assert epochs_without_gain(run) == 1
    append_metrics(run, {"kind": "evaluation", "step": 4, "epoch": 4, "accuracy": 0.9, "loss": 0.9})
    assert epochs_without_gain(run) == 0

"""A run tells Prometheus that it runs, how far it is and when it saved; and not that it ended, when it was killed."""

import contextlib
import os
import re
import time
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from slipway import sealed
from tests.train.conftest import MakeConfig, MakeFolder
from train import exposition
from train.exposition import TEXTFILE, Exposition
from train.fit import fit
from train.folder import read_folder
from train.health import DivergedError
from train.preemption import Preempted


def shown(run: Path) -> dict[str, float]:
    """Name without its prefix -> value."""
    families = text_string_to_metric_families((run / TEXTFILE).read_text(encoding="utf-8"))
    samples = [sample for family in families for sample in family.samples]
    assert all(sample.labels == {"run": run.name} for sample in samples)
    return {sample.name.removeprefix("slipway_training_"): sample.value for sample in samples}


@pytest.mark.parametrize(
    ("error", "running"),
    [(None, 0), (DivergedError("lost"), 0), (KeyboardInterrupt(), 0), (Preempted("later"), 1)],
    ids=["finished", "failed", "given up", "preempted"],
)
def test_only_a_run_that_is_to_go_on_says_that_it_runs(
    tmp_path: Path, error: BaseException | None, running: int
) -> None:
    raised = (type(error),) if error else ()
    with contextlib.suppress(*raised), Exposition(tmp_path, tmp_path / "none", 100):
        assert shown(tmp_path)["running"] == 1
        if error:
            raise error
    assert shown(tmp_path)["running"] == running


def test_progress_is_written_at_most_once_a_second_and_never_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exposition, "WRITE_SECONDS", 3600.0)
    with Exposition(tmp_path, tmp_path / "none", 100) as one:
        one.update(3, 24, {"loss": 0.5})
        assert "step" not in shown(tmp_path)
        one._write_at = 0
        one.update(4, 32, {"loss": 0.25})
        assert (shown(tmp_path)["step"], shown(tmp_path)["loss"]) == (4, 0.25)
        one.update(5, 40, {"loss": 0.125})
    assert (shown(tmp_path)["samples"], shown(tmp_path)["loss"]) == (40, 0.125)
    assert [path.name for path in tmp_path.iterdir()] == [TEXTFILE]


def test_a_file_that_cannot_be_written_neither_ends_training_nor_hides_why_it_ends(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(exposition, "write_to_textfile", full)
    monkeypatch.setattr(exposition, "WRITE_SECONDS", 0.0)

    def train() -> None:
        with Exposition(tmp_path, tmp_path / "none", 100) as one:
            one.update(1, 8, {})
            raise Preempted("later")

    with pytest.raises(Preempted, match="later"):
        train()
    assert len([line for line in caplog.messages if "cannot be written (No space left" in line]) == 1


def test_work_is_safe_since_the_newest_checkpoint_or_the_start(tmp_path: Path) -> None:
    checkpoints = tmp_path / "checkpoints"
    for name, age in (("step-00000001", -7200), ("step-00000002", 3600)):
        with sealed.stage(checkpoints / name, kind="checkpoint"):
            pass
        moment = time.time() + age
        manifest = checkpoints / name / sealed.MANIFEST
        os.utime(manifest, (moment, moment))
        with Exposition(tmp_path, checkpoints, 100):
            saved = shown(tmp_path)["checkpoint_timestamp_seconds"]
        # Before this process, nothing can be lost.
        assert saved == pytest.approx(max(moment, shown(tmp_path)["progress_timestamp_seconds"]), abs=1e-3)


def test_a_real_run_says_how_it_goes(make_folder: MakeFolder, make_config: MakeConfig) -> None:
    config = make_config(make_folder())
    run = fit(config, read_folder(config.data))
    values = shown(run)
    assert (values["running"], values["samples"], values["planned_samples"]) == (0, 42, 42)
    # Stopped or killed behind the last score it still says that it runs, until it is found to be finished.
    text = (run / TEXTFILE).read_text(encoding="utf-8")
    (run / TEXTFILE).write_text(re.sub(r"(?m)^(slipway_training_running\{.*\}) 0.0$", r"\1 1.0", text))
    assert shown(run)["running"] == 1
    fit(config, read_folder(config.data))
    assert (shown(run)["running"], shown(run)["samples"]) == (0, 42)
    assert values["step"] == 6
    for name in (
        "loss",
        "lr",
        "gradient_norm",
        "images_per_second",
        "data_wait",
        "memory_mb",
        "val_accuracy_raw",
    ):
        assert name in values

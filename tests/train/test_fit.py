import json
import math
import os
import shutil
import signal
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from safetensors.torch import load_file

from slipway.errors import SlipwayError
from tests.train.conftest import MakeConfig, MakeFolder
from tests.train.stepping import Linear, trainer_for
from train import checkpoint
from train import fit as loop
from train import step as steps
from train.checkpoint import Progress
from train.config import HardwareConfig
from train.evaluate import score
from train.fit import fit
from train.folder import read_folder
from train.hardware import HardwareError, launch
from train.health import DivergedError, bad_steps
from train.loader import PlainSamples
from train.order import Draw, Order, Window
from train.preemption import SIGNALS, Preempted, ended_by_signals
from train.runs import MEASURED, Run, read_metrics, run_for
from train.trainer import Trainer


def final_state(run: Path) -> dict[str, Any]:
    """Every tensor of the last checkpoint by name, and where training stands."""
    directory = max((run / "checkpoints").glob("step-*"))
    tensors: dict[str, Any] = {}
    for file in (directory / "state").iterdir():
        # Copied, because they are the file itself, mapped into memory.
        tensors |= {name: value.clone() for name, value in load_file(file).items()}
    return {**tensors, "progress": json.loads((directory / "progress.json").read_text())}


def assert_bit_equal(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_bit_equal(one[key], other[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_bit_equal(a, b)
    else:
        assert one == other


def without_speed(run: Path) -> list[dict[str, Any]]:
    lines = read_metrics(Run(directory=run, inputs=""))
    return [{key: value for key, value in line.items() if key not in MEASURED} for line in lines]


@pytest.mark.parametrize(("stop_after", "workers"), [(1, "0"), (3, "0"), (4, "0"), (6, "0"), (4, "2")])
def test_stopped_and_resumed_is_bit_identical_to_never_stopped(
    make_folder: MakeFolder,
    make_config: MakeConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    stop_after: int,
    workers: str,
) -> None:
    """Cases B02, B18, B19: in mid-epoch and at an epoch's end, with dropout, batch statistics and a schedule.

    21 samples in windows of 8 make 3 steps an epoch; the last holds 5 samples in 2 micro-batches.
    """
    root = make_folder()
    options = {
        "training__checkpoint_every": "1",
        "training__accumulate": "2",
        "training__epochs": "3",
        "training__ema": "0.9",
        "data__workers": workers,
    }
    straight = make_config(root, **options)
    folder = read_folder(straight.data)
    never_stopped = fit(straight, folder)

    stopped = make_config(root, **options, run__directory=str(tmp_path / "other"))
    taken = 0
    save = loop._save

    def save_and_stop(trainer: Trainer) -> None:
        nonlocal taken
        save(trainer)
        taken += 1
        if taken == stop_after:
            raise KeyboardInterrupt

    monkeypatch.setattr(loop, "_save", save_and_stop)
    with pytest.raises(KeyboardInterrupt):
        fit(stopped, folder)
    monkeypatch.setattr(loop, "_save", save)
    torch.manual_seed(123)  # whatever the new process starts with must not matter
    resumed = fit(stopped, folder)

    assert without_speed(resumed) == without_speed(never_stopped)
    assert_bit_equal(final_state(resumed), final_state(never_stopped))


def test_window_of_one_sample_is_trained_on_where_layers_shrink_it_to_a_pixel(
    make_folder: MakeFolder, make_config: MakeConfig
) -> None:
    """9 samples in windows of 8. Batch normalisation raises on the ninth alone."""
    config = make_config(make_folder(train=3), model__stem="standard", training__epochs="1")
    run = fit(config, read_folder(config.data))
    assert json.loads((run / "checkpoints" / "step-00000002" / "progress.json").read_text())["cursor"] == 9
    assert final_state(run)["progress"]["bad_samples"] == 0


def test_runs_directory_that_cannot_be_written_is_named(
    make_folder: MakeFolder, make_config: MakeConfig, tmp_path: Path
) -> None:
    (tmp_path / "runs").write_text("no directory")
    config = make_config(make_folder())
    with pytest.raises(SlipwayError, match=rf"^{tmp_path}/runs/tiny-\w+: cannot be written"):
        fit(config, read_folder(config.data))


def test_second_fit_finds_the_run_finished(
    make_folder: MakeFolder, make_config: MakeConfig, caplog: pytest.LogCaptureFixture
) -> None:
    config = make_config(make_folder())
    folder = read_folder(config.data)
    run = fit(config, folder)
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    caplog.set_level("INFO")
    assert fit(config, folder) == run
    assert before == {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    assert "trained already" in caplog.text


@pytest.mark.parametrize("scored", ["nothing", "the weights but not their average"])
def test_missing_last_evaluation_is_made_up_for(
    make_folder: MakeFolder, make_config: MakeConfig, scored: str
) -> None:
    """A run killed between its last checkpoint and the end of its last evaluation: nothing is scored twice."""
    config = make_config(make_folder(), training__ema="0.5")
    folder = read_folder(config.data)
    run = run_for(config, folder)
    fit(config, folder)
    expected = without_speed(run.directory)
    lines = run.metrics.read_text().splitlines(keepends=True)
    kept = len(lines) - (2 if scored == "nothing" else 1)
    run.metrics.write_text("".join(lines[:kept]) + lines[kept][:10])
    fit(config, folder)
    assert without_speed(run.directory) == expected


def test_damaged_newest_checkpoint_falls_back_to_the_one_before(
    make_folder: MakeFolder, make_config: MakeConfig, caplog: pytest.LogCaptureFixture
) -> None:
    config = make_config(make_folder())
    folder = read_folder(config.data)
    directory = fit(config, folder)
    expected, state = without_speed(directory), final_state(directory)
    newest = max((directory / "checkpoints").glob("step-*"))
    (file,) = (newest / "state").iterdir()
    file.chmod(0o644)
    file.write_bytes(b"damaged")
    fit(config, folder)
    assert "passing over a damaged checkpoint" in caplog.text
    assert without_speed(directory) == expected
    assert_bit_equal(final_state(directory), state)


def test_other_settings_are_another_run(make_folder: MakeFolder, make_config: MakeConfig) -> None:
    root = make_folder()
    config = make_config(root)
    folder = read_folder(config.data)
    run = run_for(config, folder)
    assert run_for(make_config(root, optimizer__lr="0.01"), folder) != run
    assert run_for(make_config(root, data__workers="2"), folder) == run
    assert run_for(make_config(root, data__cache="/elsewhere"), folder) == run
    assert run_for(make_config(root, export__max_batch="4"), folder) == run


def test_run_that_skips_samples_resumes_exactly_and_says_how_many(
    make_folder: MakeFolder,
    make_config: MakeConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Case A07, with batch statistics and dropout, stopped in mid-epoch."""
    root = make_folder()
    for name in ("ant/2.png", "cat/0.png"):
        path = root / "train" / name
        path.write_bytes(path.read_bytes()[:-20])
    options = {"data__on_bad_sample": "skip", "training__checkpoint_every": "1", "training__accumulate": "2"}
    straight = make_config(root, **options)
    folder = read_folder(straight.data)
    never_stopped = fit(straight, folder)
    stopped = make_config(root, **options, run__directory=str(tmp_path / "other"))

    def step_and_stop(trainer: Trainer, *arguments: Any) -> bool:
        return steps.step(trainer, *arguments) or trainer.progress.step == 4

    monkeypatch.setattr(loop, "step", step_and_stop)
    with pytest.raises(Preempted):
        fit(stopped, folder)
    monkeypatch.setattr(loop, "step", steps.step)
    caplog.clear()
    resumed = fit(stopped, folder)
    assert "4 of the 42 samples that training drew could not be decoded" in caplog.text
    assert without_speed(resumed) == without_speed(never_stopped)
    assert_bit_equal(final_state(resumed), final_state(never_stopped))
    assert final_state(resumed)["progress"]["bad_samples"] == 4


def test_loss_scale_comes_back_with_its_growth_tracker(
    make_folder: MakeFolder, make_config: MakeConfig
) -> None:
    """Case B01: without it a resumed run starts at 65536 again and skips steps.

    A linear model, because convolutions in fp16 take seconds on a CPU.
    """
    config = make_config(make_folder(), training__precision="16-mixed")
    folder = read_folder(config.data)
    run = run_for(config, folder)
    machine = launch(HardwareConfig(accelerator="cpu"), config.training)
    module = Linear()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    scaler.load_state_dict({**scaler.state_dict(), "scale": 512.0, "_growth_tracker": 2})
    signature = checkpoint.signature_for(config, folder)
    progress = Progress(step=1, cursor=8, precision="16-mixed", loss_scale=scaler.state_dict())
    checkpoint.save(machine, run, config, signature, progress, checkpoint.tensors_of(module, optimizer, None))
    trainer = trainer_for(config, run.directory, Linear(), samples=21, precision="16-mixed")
    loop._restore(trainer, max(run.checkpoints.glob("step-*")))
    assert trainer.machine.precision.state_dict() == scaler.state_dict()
    assert trainer.progress == progress


def test_parameter_names_are_the_modules_own(make_folder: MakeFolder, make_config: MakeConfig) -> None:
    """Case B07."""
    config = make_config(make_folder(), training__epochs="1")
    names = final_state(fit(config, read_folder(config.data))).keys() - {"progress"}
    assert all(name.split(".")[0] in ("model", "optimizer") for name in names)
    assert "model.backbone.features.0.0.weight" in names
    assert not [name for name in names if "module." in name or "_orig_mod" in name]


def test_seed_changes_the_weights(make_folder: MakeFolder, make_config: MakeConfig) -> None:
    root = make_folder()
    states = []
    for seed in ("0", "1"):
        config = make_config(root, training__seed=seed, training__epochs="1")
        states.append(final_state(fit(config, read_folder(config.data))))
    assert not torch.equal(*(state["model.backbone.features.0.0.weight"] for state in states))


def test_stop_request_saves_the_step_and_the_next_start_continues(
    make_folder: MakeFolder, make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case B04: in the middle of an epoch, without a checkpoint being due."""
    root = make_folder()
    straight = make_config(root)
    folder = read_folder(straight.data)
    undisturbed = fit(straight, folder)
    config = make_config(root, run__directory=str(tmp_path / "other"))

    def step_and_signal(trainer: Trainer, *arguments: Any) -> bool:
        if trainer.progress.step == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return steps.step(trainer, *arguments)

    monkeypatch.setattr(loop, "step", step_and_signal)
    with pytest.raises(Preempted, match="stopped at step 2") as caught:
        fit(config, folder)
    assert caught.value.exit_code == 75
    monkeypatch.setattr(loop, "step", steps.step)
    resumed = fit(config, folder)
    assert without_speed(resumed) == without_speed(undisturbed)
    assert_bit_equal(final_state(resumed), final_state(undisturbed))


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_stop_before_the_first_step_that_is_taken_changes_nothing(
    make_folder: MakeFolder,
    make_config: MakeConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    optimizer: str,
) -> None:
    """Case B04: PyTorch takes a step of its own to find out what the state of an optimiser is that has none."""
    monkeypatch.setattr(loop, "build_model", lambda *arguments: Linear())
    poison(monkeypatch, 8)
    root = make_folder()
    options = {"optimizer__name": optimizer, "training__on_bad_loss": "skip"}
    straight = make_config(root, **options)
    folder = read_folder(straight.data)
    undisturbed = fit(straight, folder)
    config = make_config(root, **options, run__directory=str(tmp_path / "other"))

    def signal_and_step(trainer: Trainer, *arguments: Any) -> bool:
        os.kill(os.getpid(), signal.SIGTERM)
        return steps.step(trainer, *arguments)

    monkeypatch.setattr(loop, "step", signal_and_step)
    with pytest.raises(Preempted, match="stopped at step 0"):
        fit(config, folder)
    monkeypatch.setattr(loop, "step", steps.step)
    assert_bit_equal(final_state(fit(config, folder)), final_state(undisturbed))


def test_rank_that_waits_for_others_can_be_ended(
    make_folder: MakeFolder, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may never come, and Python hears of no signal until PyTorch returns from waiting for them."""
    found: list[Any] = []

    def look(*_arguments: object) -> NoReturn:
        found.extend(signal.getsignal(number) for number in SIGNALS)
        raise HardwareError("nobody came")

    monkeypatch.setattr(loop, "launch", look)
    config = make_config(make_folder())
    with ended_by_signals(), pytest.raises(HardwareError, match="nobody came"):
        fit(config, read_folder(config.data))
    assert found == [signal.SIG_DFL] * 2


def test_stop_request_ends_a_validation_on_the_spot(
    make_folder: MakeFolder, make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case B04: it may take longer than a scheduler waits, and its checkpoint is there. 21 images in batches of 8."""
    root = make_folder(val=7)
    straight = make_config(root)
    folder = read_folder(straight.data)
    undisturbed = fit(straight, folder)
    config = make_config(root, run__directory=str(tmp_path / "other"))
    read, validated = PlainSamples.__getitem__, []

    def read_and_signal(samples: PlainSamples, draw: Draw) -> Any:
        validated.append(draw.index)
        if len(validated) == 9:
            os.kill(os.getpid(), signal.SIGTERM)
        return read(samples, draw)

    with monkeypatch.context() as patch:
        patch.setattr(PlainSamples, "__getitem__", read_and_signal)
        with pytest.raises(Preempted, match=r"stopped at step 3, in its validation, \d+\.\d s after"):
            fit(config, folder)
    assert len(validated) == 16
    resumed = fit(config, folder)
    assert without_speed(resumed) == without_speed(undisturbed)
    assert_bit_equal(final_state(resumed), final_state(undisturbed))


def test_average_follows_the_weights_and_both_are_reported(
    make_folder: MakeFolder, make_config: MakeConfig
) -> None:
    config = make_config(make_folder(), training__ema="0.5")
    run = fit(config, read_folder(config.data))
    reported = [line["weights"] for line in without_speed(run) if line["kind"] == "evaluation"]
    assert reported == ["raw", "ema", "raw", "ema"]
    state = final_state(run)
    name = "backbone.features.0.0.weight"
    assert not torch.equal(state[f"ema.{name}"], state[f"model.{name}"])


def test_validation_takes_no_more_images_at_a_time_than_training(
    make_folder: MakeFolder, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where micro-batches are what there is room for, a whole batch would find none."""
    taken: list[int] = []

    def counted(module: Any, batches: Any, machine: Any) -> Any:
        batches = list(batches)
        taken.extend(len(batch.labels) for batch in batches)
        return score(module, batches, machine)

    monkeypatch.setattr(loop, "score", counted)
    config = make_config(make_folder(), training__batch_size="4", training__accumulate="2")
    fit(config, read_folder(config.data))
    assert max(taken) == 2


def test_training_ends_when_patience_does(
    make_folder: MakeFolder, make_config: MakeConfig, caplog: pytest.LogCaptureFixture
) -> None:
    nothing_learnt = {"model__name": "squeezenet1_1", "optimizer__lr": "1e-30"}
    config = make_config(make_folder(), training__epochs="9", training__patience="2", **nothing_learnt)
    folder = read_folder(config.data)
    run = fit(config, folder)
    epochs = [line["epoch"] for line in without_speed(run) if line["kind"] == "evaluation"]
    assert epochs == [0, 1, 2]
    caplog.set_level("INFO")
    fit(config, folder)
    assert "trained already" in caplog.text


def poison(monkeypatch: pytest.MonkeyPatch, *ends: int) -> None:
    """Make the loss of the windows that end at these cursors NaN, behind a forward that moved batch statistics."""
    accumulate = steps.accumulate_gradients

    def poisoned(trainer: Trainer, window: Window, batches: Any) -> tuple[float, int, bool]:
        loss, bad, stopping = accumulate(trainer, window, batches)
        return (math.nan if window.end in ends else loss), bad, stopping

    monkeypatch.setattr(steps, "accumulate_gradients", poisoned)


def test_passing_over_a_bad_step_leaves_no_trace_of_it(
    make_folder: MakeFolder, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Skipped on the spot, or by a rollback to the checkpoint just before: the same weights, statistics and all."""
    root = make_folder()
    poison(monkeypatch, 16, 42)  # in mid-epoch, and at the end of the last epoch
    runs = []
    for answer in ("skip", "rollback"):
        options = {"training__on_bad_loss": answer, "training__checkpoint_every": "1", "training__ema": "0.9"}
        config = make_config(root, run__directory=str(root.parent / answer), **options)
        runs.append(fit(config, read_folder(config.data)))
    skipped, rolled_back = runs
    assert without_speed(skipped) == without_speed(rolled_back)
    assert_bit_equal(final_state(skipped), final_state(rolled_back))
    progress = final_state(skipped)["progress"]
    assert (progress["step"], progress["cursor"], progress["skipped"]) == (4, 42, 2)
    written = bad_steps(Run(directory=skipped, inputs=""))
    assert [(bad.cursor, bad.epoch, len(bad.files)) for bad in written] == [(16, 0, 8), (42, 1, 5)]
    assert all((root / file).exists() for bad in written for file in bad.files)


def test_rollback_returns_to_the_checkpoint_and_passes_over_after_a_restart_too(
    make_folder: MakeFolder, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(make_folder(), training__on_bad_loss="rollback", training__keep_checkpoints="9")
    folder = read_folder(config.data)
    poison(monkeypatch, 37)  # the second window of the second epoch; the last checkpoint is that of the first
    run = fit(config, folder)
    steps = [(line["step"], line["samples"]) for line in without_speed(run) if line["kind"] == "train"]
    assert steps == [(1, 8), (2, 16), (3, 21), (4, 29), (5, 42)]
    expected, state = without_speed(run), final_state(run)
    shutil.rmtree(max((run / "checkpoints").glob("step-*")))
    fit(config, folder)
    assert without_speed(run) == expected
    assert_bit_equal(final_state(run), state)


def test_rollback_in_fp16_leaves_a_scaler_that_works(
    make_folder: MakeFolder, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had been asked to unscale the gradient of the bad step, and refuses to be asked twice."""
    monkeypatch.setattr(loop, "build_model", lambda *arguments: Linear())
    config = make_config(
        make_folder(),
        training__on_bad_loss="rollback",
        training__precision="16-mixed",
        training__checkpoint_every="1",
    )
    poison(monkeypatch, 16)
    progress = final_state(fit(config, read_folder(config.data)))["progress"]
    assert (progress["step"], progress["cursor"], progress["skipped"]) == (5, 42, 1)


def test_window_that_is_passed_over_writes_no_checkpoint(
    make_folder: MakeFolder, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(
        make_folder(),
        training__on_bad_loss="skip",
        training__checkpoint_every="1",
        training__keep_checkpoints="9",
        training__epochs="1",
    )
    poison(monkeypatch, 8, 16)
    run = fit(config, read_folder(config.data))
    assert [path.name for path in (run / "checkpoints").glob("step-*")] == ["step-00000001+0002"]


def test_batch_statistics_do_not_move_where_no_sample_is_good(
    make_folder: MakeFolder, make_config: MakeConfig
) -> None:
    """Case A07: the forward has run, on images that stand in for the bad ones."""
    root = make_folder(train=1, classes=("ant", "bee", "cat"))
    for name in ("ant", "bee"):
        path = root / "train" / name / "0.png"
        path.write_bytes(path.read_bytes()[:-20])
    options = {"data__on_bad_sample": "skip", "training__batch_size": "2", "training__epochs": "1"}
    config = make_config(root, model__name="resnet18", **options)
    folder = read_folder(config.data)
    state = final_state(fit(config, folder))
    windows = [
        window.indices
        for window in Order(
            samples=3, batch_size=2, epochs=1, seed=0, fingerprint=folder.fingerprint
        ).windows(0)
    ]
    good = sum(2 in window for window in windows)
    assert state["model.backbone.bn1.num_batches_tracked"].item() == good
    assert state["progress"]["bad_samples"] == 2


def test_rollback_without_a_checkpoint_and_too_many_bad_steps_end_training(
    make_folder: MakeFolder, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = make_folder()
    poison(monkeypatch, *range(999))
    config = make_config(root, training__on_bad_loss="rollback")
    with pytest.raises(DivergedError, match="there is no checkpoint yet"):
        fit(config, read_folder(config.data))
    config = make_config(root, training__on_bad_loss="skip", training__epochs="9")
    with pytest.raises(DivergedError, match=r"bad_steps\.jsonl names the samples"):
        fit(config, read_folder(config.data))


def test_what_a_step_costs_and_where_gradients_go_is_logged(
    make_folder: MakeFolder, make_config: MakeConfig
) -> None:
    config = make_config(make_folder(), training__log_layers_every="2", training__epochs="1")
    lines = list(read_metrics(Run(directory=fit(config, read_folder(config.data)), inputs="")))
    (layers,) = (line for line in lines if line["kind"] == "layers")
    assert layers["step"] == 2
    assert layers["gradient_norms"]["backbone.classifier.3"] > 0
    first = lines[0]
    assert first["kind"] == "train"
    assert 0 <= first["data_wait"] <= 1
    assert first["memory_mb"] > 50

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from slipway import sealed
from slipway.sealed import SealError
from tests.train.conftest import MakeConfig, MakeFolder, full_disk
from train import checkpoint
from train.checkpoint import CheckpointError, Choice, Progress, tensors_of
from train.config import Config, HardwareConfig, TrainingConfig
from train.dataset import Dataset
from train.folder import read_folder
from train.hardware import Machine, launch
from train.model import build_model
from train.runs import Run, append_metrics, run_for

Setting = tuple[Config, Dataset, Run]


@pytest.fixture
def setting(make_folder: MakeFolder, make_config: MakeConfig) -> Setting:
    config = make_config(make_folder())
    folder = read_folder(config.data)
    run = run_for(config, folder)
    run.directory.mkdir(parents=True)
    return config, folder, run


def machine() -> Machine:
    return launch(HardwareConfig(accelerator="cpu"), TrainingConfig())


def small_model(value: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Every weight is `value`, and so is every moment of the optimiser."""
    module = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    for parameter in module.parameters():
        nn.init.constant_(parameter, value)
        optimizer.state[parameter]["momentum_buffer"] = torch.full_like(parameter, value)
    return module, optimizer


def save(setting: Setting, step: int, value: float = 0.0) -> Path:
    config, folder, run = setting
    tensors = tensors_of(*small_model(value), None)
    progress = Progress(step=step, cursor=step * 8, loss_scale={"scale": 512.0})
    return checkpoint.save(
        machine(), run, config, checkpoint.signature_for(config, folder), progress, tensors
    )


def evaluated(run: Run, step: int, accuracy: float, loss: float = 1.0, weights: str = "raw") -> None:
    line = {"kind": "evaluation", "step": step, "checkpoint": Progress(step=step).name, "weights": weights}
    append_metrics(run, {**line, "accuracy": accuracy, "loss": loss})


def damage(directory: Path) -> None:
    """Flip one bit of its tensors."""
    (file,) = (directory / "state").iterdir()
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.chmod(0o644)
    file.write_bytes(data)


def names(run: Run) -> list[str]:
    return sorted(path.name for path in run.checkpoints.iterdir())


def test_what_was_saved_comes_back(setting: Setting) -> None:
    directory = save(setting, 3, value=0.5)
    assert directory.name == "step-00000003"
    module, optimizer = small_model(0.0)
    progress = checkpoint.restore(directory, machine(), module, optimizer, None)
    assert progress == Progress(step=3, cursor=24, loss_scale={"scale": 512.0})
    for parameter in module.parameters():
        assert torch.equal(parameter, torch.full_like(parameter, 0.5))
        assert torch.equal(optimizer.state[parameter]["momentum_buffer"], torch.full_like(parameter, 0.5))
    assert checkpoint.load_signature(directory) == checkpoint.signature_for(*setting[:2])


def test_nothing_in_a_checkpoint_is_pickled(setting: Setting) -> None:
    """Case B08: what is not there cannot be refused, nor run."""
    suffixes = {path.suffix for path in save(setting, 1).rglob("*") if path.is_file()}
    assert suffixes == {".safetensors", ".json", ".yaml"}


def test_nothing_is_unpickled_anywhere() -> None:
    root = Path(__file__).parents[2]
    for file in [*root.glob("train/**/*.py"), *root.glob("serve/**/*.py"), *root.glob("src/**/*.py")]:
        assert "weights_only=False" not in file.read_text(), file
        assert "pickle" not in file.read_text().replace("nothing is\npickled", ""), file


def test_flipped_byte_is_refused_and_the_previous_checkpoint_used(
    setting: Setting, caplog: pytest.LogCaptureFixture
) -> None:
    """Case B03: tensor data with a flipped byte would be read without a word."""
    good, bad = save(setting, 1), save(setting, 2)
    damage(bad)
    with pytest.raises(SealError, match=r"safetensors: differs from the manifest"):
        checkpoint.load_weights(Choice(directory=bad, weights="raw"), small_model(0.0)[0])
    assert checkpoint.newest(setting[2]) == good
    assert "passing over a damaged checkpoint" in caplog.text


def test_full_disk_leaves_the_previous_checkpoint_and_says_so(setting: Setting) -> None:
    """Case B03."""
    save(setting, 1)
    with (
        full_disk(),
        pytest.raises(SealError, match=r"step-00000002: could not be written .* MB are free"),
    ):
        save(setting, 2)
    assert names(setting[2]) == ["step-00000001"]
    good = Choice(directory=setting[2].checkpoints / "step-00000001", weights="raw")
    checkpoint.load_weights(good, small_model(1.0)[0])


def test_old_checkpoints_are_pruned_and_the_best_is_kept(setting: Setting) -> None:
    run = setting[2]
    for step, accuracy in ((1, 0.5), (2, 0.9), (3, 0.6), (4, 0.7), (5, 0.8)):
        save(setting, step)
        evaluated(run, step, accuracy)
    assert names(run) == ["step-00000002", "step-00000004", "step-00000005"]
    assert checkpoint.best(run).directory.name == "step-00000002"


def test_damaged_checkpoint_is_set_aside_and_written_again(
    setting: Setting, caplog: pytest.LogCaptureFixture
) -> None:
    directory = save(setting, 2)
    damage(directory)
    assert save(setting, 2) == directory
    assert checkpoint.newest(setting[2]) == directory
    aside, kept = names(setting[2])
    assert aside.startswith(".damaged-step-00000002-")
    assert kept == "step-00000002"
    assert f"step-00000002 is damaged; kept as {aside} and written again" in caplog.text
    seal = sealed.read_manifest(directory).seal
    save(setting, 2, value=1.0)  # whole: it stays
    assert sealed.read_manifest(directory).seal == seal


def test_damaged_newer_checkpoint_evicts_no_good_one(setting: Setting) -> None:
    """Case B03: training fell back to a step before it, and went on from there."""
    config, folder, run = setting
    config = replace(config, training=replace(config.training, keep_checkpoints=1))
    for step in (10, 20, 15):
        saved = save((config, folder, run), step)
        if step == 20:
            damage(saved)
    assert checkpoint.newest(run) == saved
    assert saved.name == "step-00000015"


def test_best_is_recovered_from_what_is_there(setting: Setting) -> None:
    run = setting[2]
    save(setting, 1)
    save(setting, 2)
    evaluated(run, 1, 0.9, loss=0.5)
    evaluated(run, 2, 0.9, loss=0.4)
    evaluated(run, 3, 1.0)  # its checkpoint was lost
    assert checkpoint.best(run).directory.name == "step-00000002"


def test_damaged_best_is_passed_over_for_the_next(setting: Setting, caplog: pytest.LogCaptureFixture) -> None:
    run = setting[2]
    good = save(setting, 1)
    damage(save(setting, 2))
    for step, accuracy, weights in ((1, 0.7, "raw"), (2, 0.9, "ema"), (2, 0.8, "raw")):
        evaluated(run, step, accuracy, weights=weights)
    assert checkpoint.best(run) == Choice(directory=good, weights="raw")
    (said,) = (each for each in caplog.messages if "WARNING" in each)
    assert "passing over a damaged checkpoint" in said
    assert "step-00000002" in said
    damage(good)
    with pytest.raises(CheckpointError, match="no evaluated checkpoint that is whole; run `make train`"):
        checkpoint.best(run)


def test_run_without_checkpoint_says_what_to_do(setting: Setting) -> None:
    with pytest.raises(CheckpointError, match="run `make train`"):
        checkpoint.best(setting[2])


def test_foreign_checkpoint_is_refused_with_the_names(setting: Setting) -> None:
    """Case B07: strict=False would go on with random weights."""
    config = setting[0]
    model = build_model(config.model, 3, 16, config.image.mean, config.image.std)
    with pytest.raises(CheckpointError, match=r"it lacks model\.backbone.* Was it trained with another"):
        checkpoint.load_weights(Choice(directory=save(setting, 1), weights="raw"), model)


def test_failing_storage_is_said_in_words(setting: Setting) -> None:
    """Behind the verification, so the bytes were good a moment before."""
    directory = save(setting, 1)
    shutil.rmtree(directory / "state")
    with pytest.raises(CheckpointError, match=r"step-00000001: cannot be read .* storage still there"):
        checkpoint.restore(directory, machine(), *small_model(0.0), None)


def test_other_shape_is_refused_by_name(setting: Setting) -> None:
    with pytest.raises(CheckpointError, match=r"another shape of model\.weight"):
        checkpoint.load_weights(Choice(directory=save(setting, 1), weights="raw"), nn.Linear(4, 2))


def test_average_is_chosen_where_it_scored_better(setting: Setting) -> None:
    run = setting[2]
    save(setting, 1)
    evaluated(run, 1, 0.8, weights="raw")
    evaluated(run, 1, 0.9, weights="ema")
    assert checkpoint.best(run).weights == "ema"


def test_checkpoints_sort_by_time_also_where_windows_were_passed_over() -> None:
    """Of two with equal steps the later one has passed over more; neither may hide the other."""
    names = [
        Progress(step=step, skipped=skipped).name for step, skipped in ((9, 0), (9, 1), (9, 12), (10, 12))
    ]
    assert names == ["step-00000009", "step-00000009+0001", "step-00000009+0012", "step-00000010+0012"]
    assert names == sorted(names)

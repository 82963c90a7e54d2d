import resource
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path

import pytest
import torch

from slipway.sealed import SealError
from tests.train.conftest import MakeConfig, MakeFolder
from train import checkpoint
from train.checkpoint import CheckpointError, Progress
from train.config import Config
from train.folder import ImageFolder, read_folder
from train.model import build_model
from train.runs import Run, append_metrics, run_for


@pytest.fixture
def setting(make_folder: MakeFolder, make_config: MakeConfig) -> tuple[Config, ImageFolder, Run]:
    config = make_config(make_folder())
    folder = read_folder(config.data)
    run = run_for(config, folder)
    run.directory.mkdir(parents=True)
    return config, folder, run


def save(setting: tuple[Config, ImageFolder, Run], step: int, value: float = 0.0) -> Path:
    config, folder, run = setting
    state = {"model": OrderedDict(w=torch.full((4,), value)), "optimizer": {"lr": 0.1}, "precision": {}}
    progress = Progress(step=step, cursor=step * 8, skipped=1)
    return checkpoint.save(run, config, checkpoint.signature_for(config, folder), progress, state)


def evaluated(run: Run, step: int, accuracy: float, loss: float = 1.0) -> None:
    append_metrics(run, {"kind": "evaluation", "step": step, "accuracy": accuracy, "loss": loss})


def names(run: Run) -> list[str]:
    return sorted(path.name for path in run.checkpoints.iterdir())


def test_what_was_saved_comes_back(setting: tuple[Config, ImageFolder, Run]) -> None:
    directory = save(setting, 3, value=0.5)
    assert directory.name == "step-00000003"
    assert torch.equal(checkpoint.load_state(directory)["model"]["w"], torch.full((4,), 0.5))
    assert checkpoint.load_progress(directory) == Progress(step=3, cursor=24, skipped=1)
    assert checkpoint.load_signature(directory) == checkpoint.signature_for(*setting[:2])


def test_every_file_loads_with_weights_only(setting: tuple[Config, ImageFolder, Run]) -> None:
    """Case B08."""
    state = torch.load(save(setting, 1) / "state.pt", weights_only=True)
    assert set(state) == {"model", "optimizer", "precision"}


def test_weights_only_is_never_switched_off() -> None:
    root = Path(__file__).parents[2]
    for file in [*root.glob("train/**/*.py"), *root.glob("serve/**/*.py"), *root.glob("src/**/*.py")]:
        assert "weights_only=False" not in file.read_text(), file


def test_flipped_byte_is_refused_and_the_previous_checkpoint_used(
    setting: tuple[Config, ImageFolder, Run], caplog: pytest.LogCaptureFixture
) -> None:
    """Case B03: torch.load would read a flipped byte of tensor data without a word."""
    good, bad = save(setting, 1), save(setting, 2)
    data = bytearray((bad / "state.pt").read_bytes())
    data[len(data) // 2] ^= 1
    (bad / "state.pt").chmod(0o644)
    (bad / "state.pt").write_bytes(data)
    with pytest.raises(SealError, match=r"state\.pt: differs from the manifest"):
        checkpoint.load_state(bad)
    assert checkpoint.newest(setting[2]) == good
    assert "passing over a damaged checkpoint" in caplog.text


def test_full_disk_leaves_the_previous_checkpoint_and_says_so(
    setting: tuple[Config, ImageFolder, Run],
) -> None:
    """Case B03: torch.save reports a full disk as RuntimeError and leaves a partial file behind."""
    save(setting, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (512, hard))
    try:
        with pytest.raises(SealError, match=r"step-00000002: could not be written .* MB are free"):
            save(setting, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert names(setting[2]) == ["step-00000001"]
    checkpoint.load_state(setting[2].checkpoints / "step-00000001")


def test_old_checkpoints_are_pruned_and_the_best_is_kept(setting: tuple[Config, ImageFolder, Run]) -> None:
    run = setting[2]
    for step, accuracy in ((1, 0.5), (2, 0.9), (3, 0.6), (4, 0.7), (5, 0.8)):
        save(setting, step)
        evaluated(run, step, accuracy)
    assert names(run) == ["step-00000002", "step-00000004", "step-00000005"]
    assert checkpoint.best(run).name == "step-00000002"


def test_best_is_recovered_from_what_is_there(setting: tuple[Config, ImageFolder, Run]) -> None:
    run = setting[2]
    save(setting, 1)
    save(setting, 2)
    evaluated(run, 1, 0.9, loss=0.5)
    evaluated(run, 2, 0.9, loss=0.4)
    evaluated(run, 3, 1.0)  # its checkpoint was lost
    assert checkpoint.best(run).name == "step-00000002"


def test_run_without_checkpoint_says_what_to_do(setting: tuple[Config, ImageFolder, Run]) -> None:
    with pytest.raises(CheckpointError, match="run `make train`"):
        checkpoint.best(setting[2])


def test_foreign_checkpoint_is_refused_with_the_names(setting: tuple[Config, ImageFolder, Run]) -> None:
    """Case B07: strict=False would go on with random weights."""
    config = setting[0]
    model = build_model(config.model, 3, config.image.mean, config.image.std)
    with pytest.raises(CheckpointError, match=r"it lacks backbone.* Was it trained with another"):
        checkpoint.load_model(save(setting, 1), model)


KILLED = """
import sys, torch
from pathlib import Path
from slipway import sealed
parent = Path(sys.argv[1])
print("ready", flush=True)
for step in range(10_000):
    with sealed.stage(parent / f"step-{step:08d}", kind="checkpoint") as staging:
        torch.save({"w": torch.full((200_000,), float(step))}, staging / "state.pt")
"""


@pytest.mark.slow
def test_killed_while_saving_leaves_only_whole_checkpoints(tmp_path: Path) -> None:
    """Case B03."""
    for milliseconds in (20, 50, 90, 140, 200):
        parent = tmp_path / str(milliseconds)
        process = subprocess.Popen([sys.executable, "-c", KILLED, str(parent)], stdout=subprocess.PIPE)
        assert process.stdout
        process.stdout.readline()
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(milliseconds / 1000)
        process.kill()
        process.communicate()
        there = checkpoint.sealed.sealed_in(parent)
        newest = checkpoint.sealed.newest_good(parent, "checkpoint")
        assert newest == (there[-1] if there else None)
        if newest:
            step = float(newest.name.removeprefix("step-"))
            assert torch.equal(checkpoint.load_state(newest)["w"], torch.full((200_000,), step))

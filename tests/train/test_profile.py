"""What makes a step slow is named: each of the five kinds where it is provoked, with real parts."""

import os
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import nn

from slipway.errors import SlipwayError
from tests.train.conftest import MakeConfig, MakeFolder
from train.__main__ import main
from train.config import Config
from train.dataset import DataError, Storage
from train.folder import read_folder
from train.preemption import Preempted
from train.profile import (
    LAUNCHES,
    STEPS,
    Place,
    ProfileError,
    Times,
    profile,
    report,
    times_in,
    verdict,
)
from train.step_times import KINDS, WAITING, Event, Kind

ON_CPU = Place(device="cpu", cpus=2, precision="32-true")
ON_CUDA = Place(device="cuda", cpus=8, precision="bf16-mixed")
HEADING, VERDICT = 1, 7  # lines of a report: above the table, and below it


class OfMeans(nn.Module):
    """Logits from the mean of each channel: as good as nothing is computed, but what `layers` do."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers, self.head = nn.Sequential(*layers), nn.Linear(3, 3)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.layers(images.float().mean((2, 3)) / 255))
        return logits


class Wide(nn.Module):
    """One layer, in which all is computed that there is."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Conv2d(3, 256, 7), nn.Linear(256, 3)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.layer(images.float() / 255).mean((2, 3)))
        return logits


@dataclass(frozen=True)
class Disturbed:
    """Images that are read as they are, after something else has happened."""

    storage: Storage
    happens: Callable[[], None]

    def read(self, file: str) -> bytes:
        self.happens()
        return self.storage.read(file)

    def where(self, file: str) -> str:
        return self.storage.where(file)


@pytest.fixture
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("train.profile.WARM_UP", 1)
    monkeypatch.setattr("train.profile.MEASURED", 4)


@pytest.fixture(autouse=True)
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary files go: nothing may be left there."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    (tmp_path / "scratch").mkdir()
    return tmp_path / "scratch"


def measured(
    config: Config, network: nn.Module, monkeypatch: pytest.MonkeyPatch, storage: Storage | None = None
) -> list[str]:
    """The lines of a report. storage: where images come from, if not from the folder itself."""
    monkeypatch.setattr("train.fit.build_model", lambda *_: network)
    dataset = read_folder(config.data)
    text = profile(config, replace(dataset, storage=storage or dataset.storage))
    assert text is not None
    return text.splitlines()


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.usefixtures("few_steps")
def test_slow_reading_is_named(
    make_folder: MakeFolder, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    config = make_config(make_folder(), data__workers=str(workers), hardware__accelerator="cpu")
    monkeypatch.setattr("train.profile.available_cpus", lambda: 2)
    slow = Disturbed(read_folder(config.data).storage, lambda: time.sleep(0.05))
    lines = measured(config, OfMeans(), monkeypatch, storage=slow)
    assert lines[VERDICT].startswith("data: ")
    assert lines[VERDICT].endswith(f"data.workers is {workers}, and a rank has 2 CPUs: try --data.workers 2")


@pytest.mark.usefixtures("few_steps")
def test_wide_layer_is_named(
    make_folder: MakeFolder, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(make_folder(), image__size="64", image__resize="64", hardware__accelerator="cpu")
    lines = measured(config, Wide(), monkeypatch)
    assert lines[VERDICT].startswith("compute: ")
    assert lines[VERDICT + 1].startswith("most expensive: aten::conv")


def test_hundreds_of_tiny_layers_are_named(
    make_folder: MakeFolder, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(
        make_folder(),
        image__size="8",
        image__resize="8",
        training__batch_size="2",
        hardware__accelerator="cpu",
    )
    lines = measured(config, OfMeans(*(nn.Hardtanh() for _ in range(400))), monkeypatch)
    assert lines[VERDICT].startswith("overhead: ")
    assert lines[VERDICT].endswith("Try --hardware.compile whole; a training.batch_size above 2")


@pytest.mark.usefixtures("few_steps")
def test_command_shows_times_that_add_up_and_leaves_nothing_behind(
    make_folder: MakeFolder, tmp_path: Path, scratch: Path
) -> None:
    """Of a network and a data set as they come: three classes in 21 images, more than once through."""
    options = {
        "data.root": make_folder(),
        "data.workers": 0,
        "run.directory": tmp_path / "runs",
        "run.bundles": tmp_path / "bundles",
        "image.size": 16,
        "model.name": "mobilenet_v3_small",
        "model.stem": "small",
        "training.batch_size": 8,
        "training.epochs": 1,
        "training.on_bad_loss": "rollback",
        "hardware.accelerator": "cpu",
    }
    before = {path.name for path in tmp_path.iterdir()}
    text = main(["profile", *(f"--{name}={value}" for name, value in options.items())])
    assert isinstance(text, str)
    rows = [line.split() for line in text.splitlines()[1:7]]
    assert [row[0] for row in rows] == [*KINDS, "step"]
    *times, step = (float(row[1]) for row in rows)
    assert sum(times) == pytest.approx(step, abs=0.1)
    assert rows[KINDS.index("compute")][2] != "0.0"
    assert rows[-1][2:4] == ["100.0", "%,"]
    assert {path.name for path in tmp_path.iterdir()} == before
    assert not list(scratch.iterdir())


@pytest.mark.usefixtures("few_steps")
def test_fewer_steps_are_measured_where_each_does_very_much(
    make_folder: MakeFolder,
    make_config: MakeConfig,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What is recorded lies in memory: 180,000 events a step, of fsdp2 in 16-mixed, took 14 GB in 20 of them."""
    caplog.set_level("INFO")
    config = make_config(make_folder(), hardware__accelerator="cpu")
    for most, said in ((10**6, "steps to be measured: 4"), (1, "steps to be measured: 1")):
        monkeypatch.setattr("train.profile.MOST_EVENTS", most)
        assert measured(config, OfMeans(), monkeypatch)
        assert caplog.messages[-1] == said


@pytest.mark.usefixtures("few_steps")
def test_nothing_is_left_behind_by_one_that_fails_or_is_stopped(
    make_folder: MakeFolder, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, scratch: Path
) -> None:
    config = make_config(make_folder(), hardware__accelerator="cpu")

    def fail() -> None:
        raise DataError("gone")

    answers: dict[Callable[[], None], type[SlipwayError]] = {
        fail: DataError,
        lambda: os.kill(os.getpid(), signal.SIGUSR1): Preempted,
    }
    for happens, error in answers.items():
        storage = Disturbed(read_folder(config.data).storage, happens)
        with pytest.raises(error):
            measured(config, OfMeans(), monkeypatch, storage=storage)
        assert not list(scratch.iterdir())
        assert not config.run.directory.exists()


def recorded(*events: tuple[str, str, int, int]) -> list[Event]:
    """A recording of a CUDA device, from (category, name, start, end), with the ranges that all have."""
    ranges = [
        ("user_annotation", LAUNCHES, 0, 10),
        ("cpu_op", "aten::sqrt", 0, 2),
        ("user_annotation", STEPS, 100, 1100),
        ("gpu_user_annotation", STEPS, 150, 1050),
    ]
    return [
        Event(category=category, name=name, thread=category, start=start, end=end)
        for category, name, start, end in [*ranges, *events]
    ]


def test_copies_to_a_device_are_named() -> None:
    """No such device is here: made up of what its recordings hold."""
    events = recorded(
        ("user_annotation", WAITING, 100, 200),
        ("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 200, 800),
        ("kernel", "gemm", 600, 1000),
    )
    times = times_in(events, 10, "cuda")
    in_nanoseconds = {kind: round(time * 10 * 1e6) for kind, time in times.kinds.items()}
    assert in_nanoseconds == {
        "data": 100,
        "transfer": 400,
        "compute": 400,
        "communication": 0,
        "overhead": 100,
    }
    first, *_ = verdict(of(transfer=400, compute=390, data=100, overhead=110), Config(), ON_CUDA)
    assert first.startswith("transfer: 40 % of a step copies images to the device. They travel as uint8")


def test_recording_without_a_kernel_is_an_error_on_cuda() -> None:
    with pytest.raises(ProfileError, match="recorded nothing of the CUDA device"):
        times_in(recorded(), 10, "cuda")


def of(**kinds: float) -> Times:
    times: dict[Kind, float] = {kind: kinds.get(kind, 0.0) for kind in KINDS}
    return Times(kinds=times, expensive=[("gemm", 30.0), ("relu", 5.0)])


def test_notable_losses_are_said_beside_the_largest_kind(make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config(tmp_path, data__workers="2")
    lines = list(verdict(of(compute=50, overhead=25, data=20, transfer=5), config, ON_CPU))
    assert [line.partition(":")[0] for line in lines] == ["compute", "most expensive", "overhead", "data"]
    assert "data.workers is 2, and a rank has 2 CPUs: store images" in lines[3]
    lines = list(verdict(of(data=50, compute=40, overhead=10), config, ON_CPU))
    assert [line.partition(":")[0] for line in lines] == ["data"]


def test_nothing_to_gain_is_said_where_only_the_work_is_left(make_config: MakeConfig, tmp_path: Path) -> None:
    settings = {"hardware__compile": "whole", "hardware__channels_last": "true"}
    config = make_config(tmp_path, **settings)
    first, expensive = verdict(of(compute=95, data=5), config, ON_CPU)
    assert first == (
        "compute: 95 % of a step is the work of model, loss and optimiser itself. "
        "There is nothing to gain from settings; beyond that, a smaller model.name or image.size, or more "
        "hardware.devices"
    )
    assert expensive == "most expensive: gemm 30 %, relu 5 %"
    first, _ = verdict(of(compute=95, data=5), config, ON_CUDA)
    assert "Try --training.precision bf16-mixed; --hardware.deterministic false" in first


@pytest.mark.parametrize(
    ("kinds", "settings", "advice"),
    [
        ({"communication": 9}, {}, "a larger training.batch_size sends them less often"),
        ({"communication": 9}, {"hardware__strategy": "fsdp2"}, "--hardware.strategy ddp sends less"),
        ({"overhead": 9}, {"debug__anomaly": "true"}, "Try --debug.anomaly false;"),
        ({"overhead": 9}, {"training__accumulate": "2"}, "--training.accumulate 1, if memory allows;"),
        (
            {"compute": 9},
            {"hardware__activation_checkpointing": "block"},
            "Try --hardware.activation_checkpointing none, if memory allows; --hardware.channels_last true",
        ),
    ],
)
def test_advice_is_about_what_is_set(
    make_config: MakeConfig,
    tmp_path: Path,
    kinds: dict[str, float],
    settings: dict[str, str],
    advice: str,
) -> None:
    first, *_ = verdict(of(**kinds), make_config(tmp_path, **settings), ON_CPU)
    assert advice in first


@pytest.mark.parametrize(
    ("workers", "waits", "wanted"),
    [(0, 0.6, 2), (0, 0.3, 1), (2, 0.5, 4), (2, 0.25, 3), (3, 0.9, 8), (0, 1, 8)],
)
def test_as_many_workers_are_advised_as_would_keep_up(
    make_config: MakeConfig, tmp_path: Path, workers: int, waits: float, wanted: int
) -> None:
    """Two that were busy all the time, and made training wait for half of it, are two too few."""
    config = make_config(tmp_path, data__workers=str(workers))
    lines = verdict(of(data=waits, overhead=1 - waits), config, ON_CUDA)
    said = next(line for line in lines if line.startswith("data: "))
    assert said.endswith(f"and a rank has 8 CPUs: try --data.workers {wanted}")


def test_rank_that_the_others_wait_for_says_what_makes_a_step_slow() -> None:
    ranks = [
        of(compute=40, communication=60),
        of(compute=40, communication=50, data=10),
        of(compute=40, data=60),
    ]
    lines = list(report(ranks, 8, Config(), ON_CPU))
    assert lines[0].split() == ["rank", "0", "rank", "2"]
    assert lines[HEADING + 6].endswith("80 images/s")
    assert lines[HEADING + 7].startswith("data: 60 % of a step waits for images.")
    assert lines[-1] == "rank 0 waits 60.0 ms a step longer for others than rank 2, which holds it up"

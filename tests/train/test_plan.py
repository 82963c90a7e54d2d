"""What a rehearsal found, in words."""

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from slipway.config import load
from slipway.errors import UsageError
from train.config import Config
from train.hardware import HardwareError
from train.meter import MEGABYTE
from train.plan import SENT, _advice, _precision, _sent, plan
from train.rehearsal import IN_PASSING, Phase, Rehearsal


def config_of(**settings: str) -> Config:
    usual = {"image.size": "16", "model.name": "mobilenet_v3_small", "model.stem": "small"}
    chosen = {key.replace("__", "."): value for key, value in settings.items()}
    return load(Config, None, {**usual, **chosen})


def held(phase: Phase, **megabytes: int) -> Rehearsal:
    sizes = {part.replace("_", " "): size * MEGABYTE for part, size in megabytes.items()}
    return Rehearsal(held={"forward": {"parameters": 1}, phase: sizes}, messages={})


def test_every_column_adds_up() -> None:
    lines = plan(config_of(training__ema="0.9", hardware__devices="2"), 10)
    assert lines[:2] == [
        "mobilenet_v3_small, 10 classes, 16 pixels, 32-true on cpu",
        "one of 2 ranks (ddp), 1 x 32 images a step",
    ]
    heading, *rows, together = lines[3 : lines.index("", 3)]
    assert heading.split()[-4:] == ["forward", "backward", "optimiser", "validation"]
    columns = zip(*([float(each) for each in row.split()[-4:]] for row in rows), strict=True)
    for column, total in zip(columns, together.split()[-4:], strict=True):
        assert sum(column) == pytest.approx(float(total), abs=0.1 * len(rows))


def test_ring_sends_twice_what_is_summed_but_for_one_share() -> None:
    messages = {("all-reduce", 4): 100 * MEGABYTE, ("all-gather", 2): 10 * MEGABYTE}
    _, summed, gathered = _sent(Rehearsal(held={}, messages=messages))
    assert summed.split() == ["all-reduce", "among", "4", "150.0", "100.0"]
    assert gathered.split() == ["all-gather", "among", "2", "5.0", "10.0"]
    assert SENT["reduce-scatter"](8) == 7 / 8
    assert list(_sent(Rehearsal(held={}, messages={}))) == ["nothing is sent"]


@pytest.mark.parametrize(
    ("found", "settings", "expected"),
    [
        (
            held("backward", activations=900, parameters=100),
            {"training__accumulate": "2"},
            "most is taken in the backward pass: 0.98 GB, 90% of it for activations; training.accumulate 4 halves",
        ),
        (
            held("backward", activations=900, parameters=100),
            {},
            "them, hardware.activation_checkpointing block computes them again instead, training.precision bf16-mixed",
        ),
        (
            held("backward", activations=900),
            {"hardware__activation_checkpointing": "block", "training__precision": "bf16-mixed"},
            "for activations; training.accumulate 2 halves them",
        ),
        (
            held("optimiser", parameters=300, optimiser_state=600, intermediate_results=400),
            {},
            "69% of it for the weights and what is kept for each of them; with hardware.strategy fsdp2 and n ranks",
        ),
        (
            held("optimiser", parameters=300),
            {"hardware__strategy": "fsdp2"},
            "the more ranks (hardware.devices), the smaller each one's share",
        ),
        (
            held("validation", intermediate_results=900),
            {"training__accumulate": "4"},
            "as many images at a time as a micro-batch has, in float32, whatever it trains with; training.accumulate 8",
        ),
    ],
)
def test_what_takes_most_is_named_with_the_setting_that_makes_it_less(
    found: Rehearsal, settings: Mapping[str, str], expected: str
) -> None:
    assert IN_PASSING == "intermediate results"
    assert expected in _advice(config_of(**settings), found)


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for what is said where there is no GPU")
def test_gpus_need_not_be_here() -> None:
    assert _precision("auto", "cuda") == "bf16-mixed"
    assert _precision("16-mixed", "cuda") == "16-mixed"
    assert _precision("auto", "cpu") in ("32-true", "bf16-mixed")
    chosen: dict[str, Any] = {"hardware__accelerator": "cuda", "training__precision": "auto"}
    assert plan(config_of(**chosen), 10)[0].endswith("bf16-mixed on cuda")


def test_what_cannot_be_trained_cannot_be_planned() -> None:
    with pytest.raises(HardwareError, match="64 does not divide into 7 ranks"):
        plan(config_of(hardware__devices="7"), 10)
    with pytest.raises(UsageError, match="--classes is 0; must be at least 1"):
        plan(config_of(), 0)


def test_without_images_it_asks_for_the_number_of_classes(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "train",
        "plan",
        "--image.size=32",
        "--data.root",
        str(tmp_path / "none"),
    ]
    refused = subprocess.run(command, capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    assert refused.stderr.startswith(f"error: {tmp_path / 'none'}: there is no such folder; ")
    assert "To plan without images, say with --classes how many there will be" in refused.stderr
    planned = subprocess.run([*command, "--classes=7"], capture_output=True, text=True, check=False)
    assert planned.returncode == 0, planned.stderr
    assert planned.stdout.startswith("resnet18, 7 classes, 32 pixels, 32-true on cpu\n")
    assert planned.stderr == ""

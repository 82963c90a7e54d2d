"""In words: why torch.compile breaks a model into graphs, compiles it again, or it cannot be exported."""

from pathlib import Path

import pytest
import torch
from torch import nn

from tests.train.conftest import MakeConfig
from train.explain import compilation, explain, exportability, recompilations
from train.model import ImageClassifier


class Branching(nn.Module):
    """Whatever torch.compile and export dislike: a branch on values, and a number that changes with every call."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)
        self.calls = 0

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        colour = images.mean((2, 3))
        if colour.mean() > 0:
            colour = colour + 1
        self.calls += 1
        return self.layer(colour) * self.calls


def broken() -> ImageClassifier:
    return ImageClassifier(Branching(), (0.5,) * 3, (0.5,) * 3)


def test_partial_batch_is_compiled_once_and_nothing_in_the_second_epoch(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case C08."""
    layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    small = ImageClassifier(layers, (0.5,) * 3, (0.5,) * 3)
    monkeypatch.setattr("train.explain.build_model", lambda *_: small)
    lines = explain(make_config(tmp_path))
    assert lines[0] == "torch.compile: one graph, without a break"
    assert lines[1] == "torch.compile: 2 compilations in an epoch with batches of 4, 4, 3 images:"
    first, smaller, stays, export = lines[2:]
    assert first.endswith(": for the first time")
    assert "another size of batch" in smaller
    assert stays == "torch.compile: none in the next epoch: what is compiled in the first one stays"
    assert export == "export: can be exported"


def test_graph_break_is_told_by_line_and_cause() -> None:
    head, *breaks = compilation(broken(), 8)
    assert head.endswith("graphs where one would do, because it has to leave the graph:")
    (only,) = breaks
    assert only.startswith("  train/test_explain.py:")
    assert only.endswith(
        "in forward: branches on the values of a tensor; torch.where takes both ways and chooses"
    )


def test_recompilation_in_every_epoch_is_told_with_what_no_longer_holds() -> None:
    lines = list(recompilations(broken(), 8))
    assert any("more in the next epoch, and so on" in line for line in lines)
    assert any("it no longer holds that" in line and "calls" in line for line in lines)


def test_what_cannot_be_exported_says_why() -> None:
    (line,) = exportability(broken(), 8)
    assert line.startswith("export: the model answers the same images differently when asked twice")

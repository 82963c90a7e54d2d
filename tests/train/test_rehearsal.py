"""A step without numbers. It is held against real steps in tests/integration/test_plan.py and test_strategies.py."""

from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import nn

from slipway.errors import SlipwayError
from tests.train.conftest import MakeConfig
from train.model import ImageClassifier, build_model
from train.rehearsal import IN_PASSING, Rehearsal, rehearse

CLASSES = 3
FSDP = {"hardware__strategy": "fsdp2", "model__name": "resnet18", "training__batch_size": "32"}


def rehearsed(make_config: MakeConfig, root: Path, ranks: int = 1, **settings: str) -> Rehearsal:
    return rehearse(make_config(root, **settings), CLASSES, ranks=ranks, foreach=False)


def test_more_micro_batches_keep_fewer_activations_and_the_gradient_of_those_before(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    one, four = (rehearsed(make_config, tmp_path, training__accumulate=n).held["forward"] for n in ("1", "4"))
    assert four["activations"] == pytest.approx(one["activations"] / 4, rel=0.1)
    assert one.get("gradients", 0) == 0
    assert four["gradients"] == four["parameters"]


def test_each_rank_of_a_sharded_model_keeps_its_share(make_config: MakeConfig, tmp_path: Path) -> None:
    alone = rehearsed(make_config, tmp_path, model__name="resnet18").held["optimiser"]
    shared = rehearsed(make_config, tmp_path, 4, **FSDP).held["optimiser"]
    for part in ("parameters", "gradients", "optimiser state"):  # with what each share is filled up with
        assert alone[part] / 4 <= shared[part] <= 1.05 * alone[part] / 4


def test_parameters_travel_for_every_micro_batch_and_gradients_once(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    """The third and the fourth of five are not rehearsed: they are like the second."""
    one, three, five = (
        rehearsed(make_config, tmp_path, 2, **{**FSDP, "training__batch_size": "30"}, training__accumulate=n)
        for n in ("1", "3", "5")
    )
    gathered, scattered = ("all-gather", 2), ("reduce-scatter", 2)
    assert three.messages[gathered] == 3 * one.messages[gathered]
    assert five.messages[gathered] == 5 * one.messages[gathered]
    assert one.messages[scattered] == three.messages[scattered] == five.messages[scattered]


def test_replicas_sum_their_shares_over_each_other(make_config: MakeConfig, tmp_path: Path) -> None:
    messages = rehearsed(make_config, tmp_path, 4, **FSDP, hardware__replicas="2").messages
    assert set(messages) == {("all-gather", 2), ("reduce-scatter", 2), ("all-reduce", 2)}
    assert messages["all-reduce", 2] == messages["reduce-scatter", 2] / 2


def test_copies_send_their_gradients_and_the_first_ones_batch_statistics(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    config = make_config(tmp_path)
    module = build_model(config.model, CLASSES, config.image.size, config.image.mean, config.image.std)
    messages = rehearsed(make_config, tmp_path, 2, training__accumulate="2").messages
    assert messages == {
        ("all-reduce", 2): sum(each.nbytes for each in module.parameters()),
        ("broadcast", 2): sum(each.nbytes for each in module.buffers()),
    }


def test_optimiser_that_takes_all_parameters_at_a_time_has_more_in_passing(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    config = make_config(tmp_path)
    one_by_one, together = (
        rehearse(config, CLASSES, ranks=1, foreach=foreach).held["optimiser"] for foreach in (False, True)
    )
    assert together[IN_PASSING] > 0.9 * together["parameters"] > one_by_one[IN_PASSING]


def test_network_that_computes_its_sizes_with_tensors_has_them(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    held = rehearsed(make_config, tmp_path, model__name="regnet_y_400mf", model__stem="standard").held
    assert held["optimiser"]["parameters"] > 15e6


class _Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        colour = images.mean((2, 3))
        return self.layer(colour if colour.mean() > 0 else -colour)


def test_network_that_branches_on_values_is_refused_in_words(make_config: MakeConfig, tmp_path: Path) -> None:
    """And the group of ranks that are not there is left."""
    network = ImageClassifier(_Branching(), (0.5,) * 3, (0.5,) * 3)
    with (
        patch("train.rehearsal.build_model", lambda *_: network),
        pytest.raises(SlipwayError, match="decides by the values of its tensors"),
    ):
        rehearsed(make_config, tmp_path)
    assert not torch.distributed.is_initialized()

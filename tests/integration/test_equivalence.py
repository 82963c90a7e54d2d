"""Losses are those of one plain process in every strategy, compilation, number of micro-batches and precision.

And so are the names and shapes in their checkpoints, which are what decides where one can be loaded.

What is compared has neither batch statistics nor dropout: with them, which samples share a rank or a micro-batch
decides the statistics that normalise them, and the masks they meet, so losses differ by more than rounding.
`make equivalence` runs the whole matrix, CI the part of it that takes the least time to go once through each value.
"""

from itertools import product
from pathlib import Path

import pytest

from tests.integration.checkout import Checkout
from tests.integration.training import Setup, finish, losses, options, run_of
from train.checkpoint import _stored

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(900)]

PLAIN = {"model__name": "squeezenet1_1", "model__dropout": 0, "optimizer__lr": 3e-4, "training__ema": "null"}
STRATEGIES = {
    "alone": Setup(),
    "ddp": Setup(ranks=2, strategy="ddp"),
    "fsdp2": Setup(ranks=2, strategy="fsdp2"),
}
# Rounding, amplified by Adam, over the nine steps that are compared; bfloat16 has 8 bits of mantissa.
TOLERANCES = {"32-true": 1e-4, "bf16-mixed": 0.03}

WHOLE = list(product(STRATEGIES, ["none", "block"], [1, 4], TOLERANCES))
PART = [
    ("ddp", "none", 4, "bf16-mixed"),
    ("fsdp2", "none", 1, "bf16-mixed"),
    ("alone", "whole", 1, "32-true"),
]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    cells = WHOLE if metafunc.config.getoption("--whole-matrix") else PART
    if "cell" in metafunc.fixturenames:
        metafunc.parametrize("cell", cells, ids=lambda cell: "-".join(map(str, cell)))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, odd_images: Path) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    command = Setup().command(options(odd_images, folder / "runs", **PLAIN, training__epochs=3))
    finish(Checkout(folder / "checkout"), command)
    return run_of(folder / "runs")


def shapes(run: Path) -> dict[str, tuple[int, ...]]:
    """Of everything that the last checkpoint holds."""
    directory = max((run / "checkpoints").glob("step-*"))
    return {name: tuple(entry.size) for name, entry in _stored(directory, "").items()}


def test_losses_are_those_of_one_plain_process(
    checkout: Checkout,
    odd_images: Path,
    tmp_path: Path,
    plain: Path,
    cell: tuple[str, str, int, str],
) -> None:
    strategy, compilation, accumulate, precision = cell
    settings = {
        **PLAIN,
        "training__epochs": 3,
        "training__accumulate": accumulate,
        "training__precision": precision,
        "hardware__compile": compilation,
    }
    finish(checkout, STRATEGIES[strategy].command(options(odd_images, tmp_path / "runs", **settings)))
    run = run_of(tmp_path / "runs")
    assert losses(run) == pytest.approx(losses(plain), abs=TOLERANCES[precision])
    assert shapes(run) == shapes(plain)


def test_replicas_of_shards_give_them_too(
    checkout: Checkout, odd_images: Path, tmp_path: Path, plain: Path
) -> None:
    """Two copies of the model, each sharded over two ranks."""
    settings = {**PLAIN, "training__epochs": 3, "training__accumulate": 1, "hardware__replicas": 2}
    setup = Setup(ranks=4, strategy="fsdp2")
    finish(checkout, setup.command(options(odd_images, tmp_path / "runs", **settings)))
    run = run_of(tmp_path / "runs")
    assert losses(run) == pytest.approx(losses(plain), abs=TOLERANCES["32-true"])
    assert shapes(run) == shapes(plain)

"""No way to lose or repeat a step: real processes, really killed, at random moments."""

import secrets
from pathlib import Path

import pytest

from tests.integration.checkout import Checkout
from tests.integration.training import Setup, disturb, final_state, finish, metrics, options, run_of

pytestmark = [pytest.mark.integration, pytest.mark.slow]

SETUPS = [
    Setup(),
    Setup(workers=2, background_saving=True),
    Setup(ranks=2, strategy="ddp"),
    Setup(ranks=2, strategy="fsdp2", background_saving=True),
]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every setup, with time for as many kills as are asked for: 15 minutes for two, an hour for thirteen."""
    limit = pytest.mark.timeout(450 + 245 * metafunc.config.getoption("--kills"))
    name = "{0.ranks}x{0.strategy}-w{0.workers}"
    metafunc.parametrize(
        "setup", [pytest.param(setup, id=name.format(setup), marks=limit) for setup in SETUPS]
    )


def test_killed_anywhere_is_bit_identical_to_never_killed(
    checkout: Checkout, odd_folder: Path, tmp_path: Path, request: pytest.FixtureRequest, setup: Setup
) -> None:
    """Cases B02, B03, B04: losses, weights, moments, average, schedule and metrics, bit for bit."""
    kills, seed = request.config.getoption("--kills"), secrets.randbits(32)
    straight, disturbed = tmp_path / "straight", tmp_path / "disturbed"
    epochs = 2 + 4 * kills  # of three steps each: enough for every kill to find training under way
    # As long as it takes: on a busy machine, the many epochs of many kills took more than ten minutes.
    finish(checkout, setup.command(options(odd_folder, straight, training__epochs=epochs)), patience=3600)
    arguments = options(odd_folder, disturbed, training__epochs=epochs)
    done = disturb(checkout, setup, arguments, disturbed, kills, seed)
    assert len(done) == kills
    assert metrics(run_of(disturbed)) == metrics(run_of(straight))
    assert final_state(run_of(disturbed)) == final_state(run_of(straight))

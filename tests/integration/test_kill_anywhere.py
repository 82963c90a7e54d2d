"""No way to lose or repeat a step: real processes, really killed, at random moments."""

import secrets
from pathlib import Path

import pytest

from tests.integration.checkout import Checkout
from tests.integration.training import Setup, disturb, final_state, finish, metrics, options, run_of

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(900)]

SETUPS = [
    Setup(),
    Setup(workers=2),
    Setup(ranks=2, strategy="ddp"),
    Setup(ranks=2, strategy="fsdp2"),
]


@pytest.mark.parametrize(
    "setup", SETUPS, ids=lambda setup: f"{setup.ranks}x{setup.strategy}-w{setup.workers}"
)
def test_killed_anywhere_is_bit_identical_to_never_killed(
    checkout: Checkout, odd_folder: Path, tmp_path: Path, request: pytest.FixtureRequest, setup: Setup
) -> None:
    """Cases B02, B03, B04: losses, weights, moments, average, schedule and metrics, bit for bit."""
    kills, seed = request.config.getoption("--kills"), secrets.randbits(32)
    straight, disturbed = tmp_path / "straight", tmp_path / "disturbed"
    epochs = 2 + 4 * kills  # of three steps each: enough for every kill to find training under way
    finish(checkout, setup.command(options(odd_folder, straight, training__epochs=epochs)))
    arguments = options(odd_folder, disturbed, training__epochs=epochs)
    done = disturb(checkout, setup, arguments, disturbed, kills, seed)
    print(f"seed {seed}:", *done, sep="\n  ")
    assert len(done) == kills
    assert metrics(run_of(disturbed)) == metrics(run_of(straight))
    assert final_state(run_of(disturbed)) == final_state(run_of(straight))

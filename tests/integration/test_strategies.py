"""However many processes train, under whichever strategy: the same samples, the same losses."""

import json
import shutil
import signal
import time
from pathlib import Path

import psutil
import pytest

from tests.integration.checkout import Checkout
from tests.integration.training import (
    Setup,
    final_state,
    finish,
    losses,
    metrics,
    newest_step,
    options,
    run_of,
)

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(600)]

# Without batch statistics and dropout, which depend on which samples share a rank, nothing but the order of
# summation differs.
PLAIN = {
    "model__name": "squeezenet1_1",
    "model__dropout": 0,
    "optimizer__lr": 3e-4,
    "training__ema": "null",
    "data__on_bad_sample": "skip",
}
TOLERANCE = 1e-5


@pytest.fixture
def alone(checkout: Checkout, odd_folder: Path, tmp_path: Path) -> Path:
    """A run on one process. Two of its images are damaged, so that ranks skip different numbers of samples."""
    for name in ("3/plain.png", "7/print.jpeg"):
        path = odd_folder / "train" / name
        path.write_bytes(path.read_bytes()[:60])
    finish(checkout, Setup().command(options(odd_folder, tmp_path / "alone", **PLAIN)))
    return run_of(tmp_path / "alone")


def test_every_strategy_gives_the_losses_of_one_process(
    checkout: Checkout, odd_folder: Path, tmp_path: Path, alone: Path
) -> None:
    for strategy in ("ddp", "fsdp2"):
        setup = Setup(ranks=2, strategy=strategy)
        finish(checkout, setup.command(options(odd_folder, tmp_path / strategy, **PLAIN)))
        run = run_of(tmp_path / strategy)
        assert losses(run) == pytest.approx(losses(alone), abs=TOLERANCE)
        scores = [line["accuracy"] for line in metrics(run) if line["kind"] == "evaluation"]
        assert scores == [line["accuracy"] for line in metrics(alone) if line["kind"] == "evaluation"]
        assert json.loads((run / "environment.json").read_text())["world_size"] == 2
        # The same run wherever it trains, so that it can go on elsewhere.
        assert run.name == alone.name


def test_run_goes_on_with_other_ranks_and_another_strategy(
    checkout: Checkout, odd_folder: Path, tmp_path: Path, alone: Path
) -> None:
    """Case B15: 2 sharded ranks, then 1 process, then 3 copies; stopped in the middle of an epoch each time."""
    runs = tmp_path / "elastic"
    arguments = options(odd_folder, runs, **PLAIN)
    for setup in (Setup(ranks=2, strategy="fsdp2"), Setup()):
        stop_after_two_steps(checkout, setup, arguments, runs)
    finish(checkout, Setup(ranks=3, strategy="ddp").command(arguments))
    run = run_of(runs)
    samples = [[line.get("samples") for line in metrics(each)] for each in (run, alone)]
    assert samples[0] == samples[1]
    assert losses(run) == pytest.approx(losses(alone), abs=TOLERANCE)


def stop_after_two_steps(checkout: Checkout, setup: Setup, arguments: list[str], runs: Path) -> None:
    """SIGTERM to the last rank; all of them save the step they are in and end."""
    before = newest_step(runs)
    process = checkout.start(*setup.command(arguments))
    while newest_step(runs) < before + 2 and process.poll() is None:
        time.sleep(0.01)
    parent = psutil.Process(process.pid)
    (parent.children()[-1] if setup.ranks > 1 else parent).send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == (75 if setup.ranks == 1 else 1), errors
    assert "stopped at step" in errors


def test_sharded_run_makes_up_for_a_validation_that_was_cut_off(
    checkout: Checkout, odd_folder: Path, tmp_path: Path
) -> None:
    """Its first forward is then one without gradients, in which FSDP2 sets itself up."""
    command = Setup(ranks=2, strategy="fsdp2").command(
        options(odd_folder, tmp_path / "runs", training__epochs=2, training__keep_checkpoints=99)
    )
    finish(checkout, command)
    run = run_of(tmp_path / "runs")
    expected, state = metrics(run), final_state(run)
    for checkpoint in (run / "checkpoints").glob("step-*"):
        if checkpoint.name > "step-00000003":
            shutil.rmtree(checkpoint)
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:3]))
    finish(checkout, command)
    assert metrics(run) == expected
    assert final_state(run) == state


def test_failed_save_on_the_first_rank_ends_every_rank(
    checkout: Checkout, odd_folder: Path, tmp_path: Path
) -> None:
    """Case B05: the others wait for the first one in the middle of the save, and must not do so for ever."""
    command = Setup(ranks=2, strategy="fsdp2").command(
        options(odd_folder, tmp_path / "runs", training__epochs=1)
    )
    finish(checkout, command)
    run = run_of(tmp_path / "runs")
    shutil.rmtree(run / "checkpoints")
    (run / "metrics.jsonl").unlink()
    (run / "checkpoints").write_text("in the way")
    result = checkout.run(*command)
    assert result.returncode == 1
    assert "error: " in result.stderr
    assert str(run / "checkpoints") in result.stderr


def test_sharded_validation_ends_where_ranks_have_unequal_numbers_of_batches(
    checkout: Checkout, odd_folder: Path, tmp_path: Path
) -> None:
    """Nine images on two ranks in batches of four: one has a second batch, and every forward needs them both."""
    small = tmp_path / "small"
    shutil.copytree(odd_folder, small)
    images = sorted(path for path in (small / "val").rglob("*") if path.is_file())
    for path in images[9:]:
        path.unlink()
    settings = {**PLAIN, "training__epochs": 1, "training__batch_size": 4, "training__accumulate": 1}
    scores = []
    for setup in (Setup(), Setup(ranks=2, strategy="fsdp2")):
        runs = tmp_path / setup.strategy
        finish(checkout, setup.command(options(small, runs, **settings)))
        scores += [line for line in metrics(run_of(runs)) if line["kind"] == "evaluation"]
    alone, sharded = scores
    assert sharded["accuracy"] == alone["accuracy"]
    assert sharded["loss"] == pytest.approx(alone["loss"], abs=1e-4)

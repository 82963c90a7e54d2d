"""However many processes train, under whichever strategy: the same samples, the same losses."""

import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.integration import planned
from tests.integration.checkout import Checkout, end, outcome
from tests.integration.images import CLASSES
from tests.integration.ports import free_ports
from tests.integration.training import (
    DEADLINE_SECONDS,
    Setup,
    final_state,
    finish,
    losses,
    metrics,
    newest_step,
    options,
    ranks_in,
    run_of,
    wait_for_step_after,
)
from train.rehearsal import rehearse

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
    """Case B15: 2 sharded ranks, then 1 process, then 3 copies; stopped in an epoch or its validation."""
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
    """SIGTERM to the last rank; all of them end with a step that is saved."""
    process = checkout.start(*setup.command(arguments))
    try:
        wait_for_step_after(process, runs, newest_step(runs), checkpoints=1)
        if ranks := ranks_in(process, setup):
            os.kill(ranks[-1], signal.SIGTERM)
    finally:
        result = outcome(process, DEADLINE_SECONDS)
    assert result.returncode == (75 if setup.ranks == 1 else 1), result.stderr
    assert "stopped at step" in result.stderr


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


def test_failed_save_on_one_rank_ends_every_rank_in_the_same_words(
    checkout: Checkout, odd_folder: Path, tmp_path: Path
) -> None:
    """Case B05: the others wait in the middle of the save, and must do so neither for ever nor until killed."""
    runs = tmp_path / "runs"
    command = Setup(strategy="fsdp2").command(options(odd_folder, runs, training__epochs=1))
    with ranks_of(checkout, command) as ranks:
        psutil.Process(ranks[1].pid).rlimit(psutil.RLIMIT_FSIZE, (64, 64))
        for rank in ranks:
            result = outcome(rank)
            assert result.returncode == 1, result.stderr
            assert "Traceback" not in result.stderr
            assert re.search(r"error: .*could not be written \(.*rank 1: .*File too large", result.stderr)
    run = run_of(runs)
    assert not list((run / "checkpoints").iterdir())
    (run / "checkpoints").rmdir()
    (run / "checkpoints").write_text("in the way")
    with ranks_of(checkout, command) as ranks:
        for rank in ranks:
            result = outcome(rank)
            assert result.returncode == 1, result.stderr
            assert re.search(r"error: .*could not be written", result.stderr)


@pytest.mark.parametrize(("strategy", "split"), [("fsdp2", "train"), ("ddp", "val")])
def test_image_that_one_rank_cannot_decode_ends_every_rank_in_the_same_words(
    checkout: Checkout, odd_folder: Path, tmp_path: Path, strategy: str, split: str
) -> None:
    """Case A07: the others wait in the middle of a step or of a validation, and there is no launcher to end them."""
    path = odd_folder / split / "3" / "plain.png"
    path.write_bytes(path.read_bytes()[:60])
    command = Setup(strategy=strategy).command(options(odd_folder, tmp_path / "runs", training__epochs=1))
    with ranks_of(checkout, command) as ranks:
        said = []
        for number, rank in enumerate(ranks):
            result = outcome(rank)
            assert result.returncode == 1, result.stderr
            assert "Traceback" not in result.stderr
            who = r"\[rank1\]: " if number else ""
            said += re.findall(rf"(?m)^{who}(error: rank [01]: .*plain\.png: .*)$", result.stderr)
    assert len(said) == 2
    assert said[0] == said[1]


@contextmanager
def ranks_of(
    checkout: Checkout, command: list[str], count: int = 2
) -> Iterator[list["subprocess.Popen[str]"]]:
    """So many ranks, and no launcher that kills one of them because another has ended."""
    (port,) = free_ports(1)
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}", "WORLD_SIZE": f"{count}"}
    world |= {"LOCAL_WORLD_SIZE": f"{count}"}
    world |= {"TORCHELASTIC_RUN_ID": "none", "GROUP_RANK": "0"}
    # Coverage would want to write as well, and complain in a traceback where the limit forbids it.
    world |= {"COVERAGE_PROCESS_START": "", "COVERAGE_PROCESS_CONFIG": ""}
    # And Python would cache modules cut off at it, for the next process that imports them.
    world |= {"PYTHONDONTWRITEBYTECODE": "1"}
    ranks = [
        checkout.start(*command, variables={**world, "RANK": f"{rank}", "LOCAL_RANK": f"{rank}"})
        for rank in range(count)
    ]
    try:
        yield ranks
    finally:
        for rank in ranks:
            end(rank)


def test_gradients_travel_once_a_step_however_many_micro_batches(
    checkout: Checkout, odd_folder: Path, tmp_path: Path
) -> None:
    program = str(Path(__file__).with_name("collectives.py"))
    with ranks_of(checkout, [program, str(odd_folder), str(tmp_path / "runs")]) as ranks:
        for rank in ranks:
            result = outcome(rank)
            assert result.returncode == 0, result.stderr
            for strategy, (one, four) in json.loads(result.stdout).items():
                assert one == four > 0, strategy


def test_ranks_hold_and_send_what_was_planned(checkout: Checkout, odd_folder: Path, tmp_path: Path) -> None:
    program = str(Path(__file__).with_name("planned.py"))
    with ranks_of(checkout, [program, str(odd_folder), str(tmp_path / "runs")]) as ranks:
        results = [outcome(rank, DEADLINE_SECONDS) for rank in ranks]
    assert [result.returncode for result in results] == [0, 0], results
    everyones = [json.loads(result.stdout) for result in results]
    for number, case in enumerate(planned.CASES):
        config = planned.configuration(str(odd_folder), str(tmp_path), case)
        expected = rehearse(config, len(CLASSES), ranks=2, foreach=False)
        for found in (each[number] for each in everyones):
            sizes = {name: size for (name, _), size in expected.messages.items()}
            sizes["all-reduce"] = sizes.get("all-reduce", 0) + 4 * 4  # the loss, and what travels with it
            assert {name: size for name, size in found["messages"].items() if size} == sizes
            assert found["held"].items() <= expected.held["optimiser"].items()
            most = max(sum(held.values()) for phase, held in expected.held.items() if phase != "validation")
            assert found["most"] >= most / 1.01
            # Above it come oneDNN's copies. Where the model is sharded also those that gloo makes of what it gathers
            # and scatters, and lets go at moments of its own: four blocks were seen at a time. NCCL makes none.
            if case["hardware.strategy"] == "ddp":
                assert found["most"] <= 1.06 * most


def test_what_one_rank_meets_ends_the_other_too(checkout: Checkout, odd_folder: Path, tmp_path: Path) -> None:
    """A verdict that fails, a checkpoint that cannot be read, a wish to stop while another process has the run."""
    program = str(Path(__file__).with_name("agreement.py"))
    with ranks_of(checkout, [program, str(odd_folder), str(tmp_path / "runs")]) as ranks:
        results = [outcome(rank, DEADLINE_SECONDS) for rank in ranks]
    assert [result.returncode for result in results] == [0, 0], results
    first, last = (json.loads(result.stdout) for result in results)
    assert first[0].startswith("JSONDecodeError: Expecting value")
    assert last[0].startswith("VerdictError: rank 0: JSONDecodeError('Expecting value")
    assert first[1] == last[1]
    assert "CheckpointError" in first[1]
    assert "cannot be read (stale file handle)" in first[1]
    assert first[2] == last[2]
    assert first[2].startswith("Preempted: stopped while another process was busy with run")


def test_three_copies_that_are_stopped_and_resumed_end_bit_identical_to_ones_that_never_were(
    checkout: Checkout, odd_folder: Path, tmp_path: Path
) -> None:
    """Case B02. Two are too few: a sum of two numbers does not depend on their order."""
    program = str(Path(__file__).with_name("resuming.py"))
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    with ranks_of(checkout, [program, str(odd_folder), str(straight), str(resumed)], count=3) as ranks:
        results = [outcome(rank, DEADLINE_SECONDS) for rank in ranks]
    assert [result.returncode for result in results] == [0, 0, 0], results
    assert losses(run_of(resumed)) == losses(run_of(straight))
    assert final_state(run_of(resumed)) == final_state(run_of(straight))


def test_ranks_that_are_started_again_find_each_other_and_go_on(
    checkout: Checkout, odd_folder: Path, tmp_path: Path
) -> None:
    """With `--max-restarts` a rank that is killed costs what was done since the last checkpoint, and nobody's time."""
    setup, runs = Setup(ranks=2, strategy="ddp"), tmp_path / "runs"
    module, _, *rest = setup.command(options(odd_folder, runs, training__epochs=6))
    process = checkout.start(module, "train.torchrun", "--max-restarts=1", *rest)
    try:
        wait_for_step_after(process, runs, last=0, checkpoints=1)
        os.kill(ranks_in(process, setup)[1], signal.SIGKILL)
    finally:
        result = outcome(process, DEADLINE_SECONDS)
    assert result.returncode == 0, result.stderr
    assert re.search(rf"continuing {run_of(runs).name} at step \d", result.stderr)
    assert [line["step"] for line in metrics(run_of(runs)) if line["kind"] == "train"] == list(range(1, 19))


def test_processes_of_hardware_devices_train_together(
    checkout: Checkout, odd_folder: Path, tmp_path: Path
) -> None:
    """Without any launcher: Fabric starts the others, and tells them less than torchrun does."""
    chosen = options(odd_folder, tmp_path / "runs", training__epochs=1, hardware__devices=2)
    result = outcome(checkout.start(*Setup(strategy="ddp").command(chosen)), DEADLINE_SECONDS)
    assert result.returncode == 0, result.stderr
    environment = json.loads((run_of(tmp_path / "runs") / "environment.json").read_bytes())
    assert environment["world_size"] == 2


def test_sharded_validation_ends_where_ranks_have_unequal_numbers_of_batches(
    checkout: Checkout, odd_folder: Path, tmp_path: Path
) -> None:
    """Nine images on two ranks in batches of two: one has a third batch, and every forward needs them both."""
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

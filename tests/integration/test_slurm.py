"""deploy/slurm/train.sbatch on a real SLURM of two nodes: what is preempted goes on, what fails stays failed."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.checkout import Checkout
from tests.integration.ports import free_ports
from tests.integration.slurm import Cluster, running_cluster, wait_until
from tests.integration.training import Setup, final_state, finish, metrics, newest_step, options, run_of
from tests.programs import require

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(1800)]

EPOCHS = 12  # of three steps each: the signal finds training under way
SCRIPT = Path(__file__).parents[2] / "deploy" / "slurm" / "train.sbatch"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    require("munged", "slurmctld", "slurmd", "sbatch")
    with running_cluster() as cluster:
        yield cluster


@pytest.fixture
def variables(checkout: Checkout) -> dict[str, str]:
    return {
        "PYTHONPATH": f"{checkout.directory / 'src'}:{checkout.directory}",
        "SLIPWAY_PYTHON": sys.executable,
        "SLIPWAY_NODES": "2",
        "SLIPWAY_RANKS_PER_NODE": "1",
        "SLIPWAY_MASTER_ADDRESS": "127.0.0.1",
        "SLIPWAY_MASTER_PORT": str(*free_ports(1)),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }


def test_preempted_job_requeues_itself_and_ends_bit_identical_to_an_undisturbed_run(
    cluster: Cluster, checkout: Checkout, variables: dict[str, str], odd_folder: Path, tmp_path: Path
) -> None:
    """Cases B02 and B04. Told to stop as before the end of its time, and then ended by an operator's requeue."""
    straight, preempted = tmp_path / "straight", tmp_path / "preempted"
    finish(
        checkout,
        Setup(ranks=2, strategy="ddp").command(options(odd_folder, straight, training__epochs=EPOCHS)),
    )
    arguments = options(odd_folder, preempted, training__epochs=EPOCHS)
    log = tmp_path / "job.out"
    job = cluster.submit(SCRIPT, [f"--output={log}"], variables, *arguments)
    wait_until(lambda: newest_step(preempted) > 0, "a checkpoint", log.read_text)
    cluster.ask("scancel", "--signal=USR1", job)
    cluster.wait_for_start(job, restarts=1)
    stopped_at = int(re.findall(r"stopped at step (\d+)", log.read_text())[0])
    wait_until(lambda: newest_step(preempted) > stopped_at, "another checkpoint", log.read_text)
    cluster.ask("scontrol", "requeue", job)
    ended, said = cluster.wait_for_end(job), log.read_text()
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "2"), said
    assert f"training has saved its state; job {job} goes back into the queue" in said
    assert f"continuing {run_of(preempted).name} at step {stopped_at}" in said
    assert metrics(run_of(preempted)) == metrics(run_of(straight))
    assert final_state(run_of(preempted)) == final_state(run_of(straight))


def test_failed_training_is_not_requeued(
    cluster: Cluster, variables: dict[str, str], odd_folder: Path, tmp_path: Path
) -> None:
    """It would fail for ever. The job ends with training's own exit code."""
    log = tmp_path / "job.out"
    arguments = options(odd_folder, tmp_path / "runs", training__batch_size=23)
    ended = cluster.wait_for_end(cluster.submit(SCRIPT, [f"--output={log}"], variables, *arguments))
    assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == ("FAILED", "1:0", "0")
    assert "training.batch_size 23 does not divide into 2 ranks" in log.read_text()


def test_job_of_another_number_of_nodes_does_not_start(
    cluster: Cluster, variables: dict[str, str], tmp_path: Path
) -> None:
    log = tmp_path / "job.out"
    ended = cluster.wait_for_end(cluster.submit(SCRIPT, ["--nodes=1", f"--output={log}"], variables))
    assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == ("FAILED", "2:0", "0")
    assert "SLIPWAY_NODES is 2, but the job has 1 nodes; submit it with --nodes=2" in log.read_text()


@pytest.mark.parametrize("name", ["SLIPWAY_PYTHON", "SLIPWAY_NODES", "SLIPWAY_RANKS_PER_NODE"])
def test_setting_that_is_missing_is_named(name: str) -> None:
    variables = {
        "SLURM_JOB_ID": "1",
        "SLIPWAY_PYTHON": "python",
        "SLIPWAY_NODES": "1",
        "SLIPWAY_RANKS_PER_NODE": "1",
    }
    del variables[name]
    done = subprocess.run(["bash", SCRIPT], env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert f"{name}: is not set: " in done.stderr

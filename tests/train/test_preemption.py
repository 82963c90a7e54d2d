import os
import signal
import subprocess
import sys
from contextlib import suppress

import pytest

from train.preemption import Preempted, ended_by_signals, stop_requests


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_first_signal_is_noted_and_handlers_come_back(number: int) -> None:
    before = signal.getsignal(number)
    with stop_requests() as request:
        assert (request.received, request.seconds_ago) == (None, 0)
        os.kill(os.getpid(), number)
        assert request.received == number
        assert request.seconds_ago > 0
    assert signal.getsignal(number) is before


def test_exit_code_means_run_me_again() -> None:
    assert Preempted.exit_code == 75


def test_second_sigterm_ends_the_process_at_once_and_sigusr1_never_does() -> None:
    """SLURM may send SIGUSR1 to all processes of a job, of which the launcher passes it on."""
    program = """
import os, signal
from train.preemption import stop_requests
with stop_requests():
    os.kill(os.getpid(), signal.SIGUSR1)
    os.kill(os.getpid(), signal.SIGUSR1)
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGUSR1)
    print("still here", flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
    print("never", flush=True)
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (128 + signal.SIGTERM, "still here\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_what_is_not_training_is_given_up_and_cleaned_up(number: int) -> None:
    done = []

    @ended_by_signals()
    def work() -> None:
        with stop_requests():
            os.kill(os.getpid(), number)
            done.append("trained")
        try:
            with suppress(Exception):  # as libraries do
                os.kill(os.getpid(), number)
            done.append("never")
        finally:
            os.kill(os.getpid(), signal.SIGUSR1)  # once more, from the launcher
            done.append("cleaned up")

    with pytest.raises(Preempted, match="run it again"):
        work()
    assert done == ["trained", "cleaned up"]


ABANDONS_ITS_WORKERS = """
import torch
from torch.utils.data import DataLoader
from train.loader import _start_worker
loader = DataLoader(torch.arange(1000), num_workers=2, worker_init_fn=_start_worker)
kept = iter(loader)
next(kept)
__import__("builtins").kept = kept  # as a traceback does: nobody shuts the workers down before the end
"""


def test_workers_end_with_a_process_that_abandons_them() -> None:
    """Workers that ignored SIGTERM would keep a failed training from ever ending."""
    subprocess.run([sys.executable, "-c", ABANDONS_ITS_WORKERS], check=True, timeout=60)

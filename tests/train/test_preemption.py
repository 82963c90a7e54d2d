import os
import signal
import subprocess
import sys

import pytest

from train.preemption import Preempted, stop_requests


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_first_signal_is_noted_and_handlers_come_back(number: int) -> None:
    before = signal.getsignal(number)
    with stop_requests() as request:
        assert request.received is None
        os.kill(os.getpid(), number)
        assert request.received == number
    assert signal.getsignal(number) is before


def test_exit_code_means_run_me_again() -> None:
    assert Preempted.exit_code == 75


def test_second_signal_ends_the_process_at_once() -> None:
    program = """
import os, signal
from train.preemption import stop_requests
with stop_requests():
    os.kill(os.getpid(), signal.SIGTERM)
    print("still here", flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
    print("never", flush=True)
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (128 + signal.SIGTERM, "still here\n")

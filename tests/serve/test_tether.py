"""What a killed process has started ends with it."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from serve import tether
from tests.serve.tools import wait_until_gone

pytestmark = pytest.mark.integration

SLEEP = Path("/bin/sleep")
# Starts a program tethered to itself, says its process id, and goes on.
PARENT = f"""
import subprocess, time
from pathlib import Path
from serve import tether
print(subprocess.Popen(tether.command(Path({str(SLEEP)!r}), "600")).pid, flush=True)
time.sleep(600)
"""


def test_the_program_ends_when_its_parent_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.send_signal(signal.SIGKILL)
    wait_until_gone([child])


def test_the_program_keeps_its_process_id_its_arguments_and_its_exit_code() -> None:
    command = tether.command(Path("/bin/sh"), "-c", 'echo "$$ $1"; exit 7', "sh", "two words")
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        output, _ = process.communicate()
    assert (output, process.returncode) == (f"{process.pid} two words\n", 7)


def test_a_program_whose_parent_has_gone_already_is_not_started() -> None:
    command = tether.command(SLEEP, "600")
    command[command.index(str(os.getpid()))] = "1"
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "was not started, because the process that wanted it has ended" in done.stderr

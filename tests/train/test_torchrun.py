"""torchrun as a scheduler sees it: its exit codes, and what it does with signals."""

import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from train.torchrun import Launcher

WAITS_TO_BE_STOPPED = """
import os, sys, time
from train.preemption import Preempted, stop_requests
with stop_requests() as request:
    os.write(1, b"ready\\n")  # in one piece
    while request.received is None:
        time.sleep(0.01)
    os.write(1, b"saved\\n")
sys.exit(Preempted.exit_code)
"""
ENDS_IN_ANOTHER_WAY = """
import os, sys, time
if os.environ["RANK"] == "1":
    sys.exit(2)
time.sleep(600)
"""


@contextmanager
def launched(program: str, folder: Path, *options: str) -> Iterator["subprocess.Popen[str]"]:
    """Two ranks that run `program`. Nothing is left of them afterwards."""
    (folder / "program.py").write_text(program)
    command = [sys.executable, "-m", "train.torchrun", "--standalone", "--nproc-per-node=2", *options]
    with subprocess.Popen(
        [*command, str(folder / "program.py")], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            with contextlib.suppress(psutil.NoSuchProcess):
                for rank in psutil.Process(process.pid).children():
                    rank.kill()
                process.kill()


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--max-restarts=1"]])
def test_launcher_that_is_told_to_stop_lets_its_ranks_save_and_says_run_me_again(
    tmp_path: Path, options: list[str]
) -> None:
    """Plain torchrun would start them again, or end with 1 as if training had failed."""
    with launched(WAITS_TO_BE_STOPPED, tmp_path, *options) as process:
        assert process.stdout
        assert [process.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate()
    assert "saved\n" in output  # the other one may be ended first; real ranks leave the saving together
    assert process.returncode == 75


@pytest.mark.slow
def test_exit_code_is_that_of_the_rank_that_failed(tmp_path: Path) -> None:
    """Not that of the other one, which was ended because of it."""
    with launched(ENDS_IN_ANOTHER_WAY, tmp_path) as process:
        assert process.wait() == 2


@pytest.mark.parametrize(
    ("exitcode", "asked", "expected"),
    [
        (75, False, 75),  # another node was asked
        (1, True, 1),
        (-signal.SIGKILL, True, 137),  # out of memory, say
        (-signal.SIGUSR1, True, 75),  # asked before it could listen
        (-signal.SIGUSR1, False, 138),
    ],
)
def test_what_the_end_of_a_rank_means(exitcode: int, asked: bool, expected: int) -> None:
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=exitcode, error_file="")
    launcher = Launcher()
    launcher.asked = asked
    assert launcher.exit_code(failure) == expected


def test_launcher_that_has_no_ranks_yet_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its node waits for others that may never come."""
    monkeypatch.setattr(psutil.Process, "children", lambda _process: [])
    with pytest.raises(SystemExit, match="75"):
        Launcher().pass_on(signal.SIGTERM, None)

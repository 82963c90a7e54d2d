"""How a command ends: codes for scripts, one result on stdout, sentences on stderr."""

import signal
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE
from typing import IO

import pytest

PRELUDE = """
import argparse, logging, os, signal, sys, time
from pathlib import Path
from slipway import command
from slipway.config import ConfigError
from slipway.errors import SlipwayError, UsageError

def main(arguments):
"""


def program_of(body: str, speaker: str = "lambda: ''") -> str:
    """A command whose `main(arguments)` does `body`."""
    return (
        PRELUDE + "".join(f"    {line}\n" for line in body.splitlines()) + f"\ncommand.run(main, {speaker})\n"
    )


def run(
    body: str, *arguments: str, speaker: str = "lambda: ''", stdout: int | IO[str] = PIPE
) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-c", program_of(body, speaker), *arguments]
    return subprocess.run(program, stdout=stdout, stderr=PIPE, text=True, timeout=30, check=False)


def test_result_is_all_that_goes_to_stdout() -> None:
    """So that `bundle="$(make export)"` works, whatever is logged or shown meanwhile."""
    done = run(
        "logging.getLogger('slipway.sealed').info('progress')\n"
        "logging.getLogger('train').warning('WARNING: careful')\n"
        "logging.getLogger('PIL').info('chatter of a library')\n"
        "logging.getLogger('torch').warning('a warning of a library')\n"
        "return Path(arguments[0]) / 'bundle'",
        "a b",
    )
    assert done.returncode == 0
    assert done.stdout == "a b/bundle\n"
    assert done.stderr == "progress\nWARNING: careful\na warning of a library\n"


def test_line_goes_to_what_stderr_is_when_it_is_logged() -> None:
    """A progress bar takes the place of stderr; what went past it would be glued to the end of the bar."""
    done = run(
        "import contextlib, io\n"
        "with contextlib.redirect_stderr(io.StringIO()) as bar:\n"
        "    logging.getLogger('train').warning('above the bar')\n"
        "logging.getLogger('train').warning('without a bar')\n"
        "return bar.getvalue().strip()"
    )
    assert (done.stdout, done.stderr) == ("above the bar\n", "without a bar\n")


def test_one_of_many_processes_says_who_it_is() -> None:
    done = run(
        "logging.getLogger('train').warning('WARNING: careful')\nraise SlipwayError('so')",
        speaker="lambda: '[rank1]: '",
    )
    assert done.stderr == "[rank1]: WARNING: careful\n[rank1]: error: so\n"


@pytest.mark.parametrize(("body", "output"), [("pass", ""), ("return None", ""), ("return 0", "0\n")])
def test_command_that_makes_nothing_prints_nothing(body: str, output: str) -> None:
    done = run(body)
    assert (done.returncode, done.stdout, done.stderr) == (0, output, "")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        ("SlipwayError('configs/a.yaml: ä')", 1),
        ("UsageError('configs/a.yaml: ä')", 2),
        ("ConfigError('configs/a.yaml: ä')", 2),
    ],
)
def test_failure_is_one_sentence_on_stderr_and_an_exit_code(error: str, code: int) -> None:
    done = run(f"raise {error}")
    assert (done.returncode, done.stdout, done.stderr) == (code, "", "error: configs/a.yaml: ä\n")


def test_bug_keeps_its_traceback() -> None:
    done = run("raise RuntimeError('what is this')")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("Traceback (most recent call last):\n")
    assert done.stderr.endswith("RuntimeError: what is this\n")


def test_wrong_usage_that_argparse_finds_has_the_same_code() -> None:
    done = run("argparse.ArgumentParser(prog='x').parse_args(arguments)", "--unknown")
    assert (done.returncode, done.stdout) == (2, "")
    assert "unrecognized arguments: --unknown" in done.stderr


def test_ctrl_c_ends_quietly_and_runs_what_cleans_up() -> None:
    done = run(
        # What is started in the background by a shell inherits that Ctrl-C is ignored.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "try:\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    time.sleep(10)\n"
        "finally:\n"
        "    print('cleaned up', file=sys.stderr)"
    )
    assert (done.returncode, done.stdout) == (128 + signal.SIGINT, "")
    assert done.stderr == "cleaned up\ninterrupted\n"


def test_main_gets_the_arguments_without_the_programs_name() -> None:
    assert (
        run("return arguments", "fit", "--optimizer.lr", "0.1").stdout == "['fit', '--optimizer.lr', '0.1']\n"
    )


@pytest.mark.parametrize("body", ["return 'made'", "while True:\n    print('line')"], ids=["result", "much"])
def test_reader_that_has_seen_enough_is_no_failure_of_ours(body: str) -> None:
    program = [sys.executable, "-c", program_of(f"sys.stdin.read()\n{body}")]
    with subprocess.Popen(program, stdin=PIPE, stdout=PIPE, stderr=PIPE) as process:
        assert process.stdin
        assert process.stdout
        assert process.stderr
        process.stdout.close()
        process.stdin.close()
        assert process.stderr.read() == b""
    assert process.returncode == 128 + signal.SIGPIPE


def test_full_disk_behind_stdout_is_no_traceback() -> None:
    with Path("/dev/full").open("w") as full:
        done = run("return 'made'", stdout=full)
    assert (done.returncode, done.stderr) == (1, "error: No space left on device\n")


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("Path('/' + 300 * 'x').read_bytes()", f"error: /{300 * 'x'}: File name too long\n"),
        ("Path('/nowhere/file').read_bytes()", "error: /nowhere/file: No such file or directory\n"),
    ],
)
def test_file_that_cannot_be_had_is_named(body: str, said: str) -> None:
    done = run(body)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", said)


def test_other_failures_of_the_system_keep_their_traceback() -> None:
    """A broken pipe to a process of ours is not one to our reader."""
    done = run("raise BrokenPipeError(32, 'Broken pipe')")
    assert done.returncode == 1
    assert "Traceback" in done.stderr


@pytest.mark.parametrize("number", ["SIGTERM", "SIGINT", "SIGHUP"])
def test_signal_unwinds_so_that_nothing_is_left_behind(number: str) -> None:
    done = run(
        # Whoever runs the tests may ignore it, as `nohup` does.
        "signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"
        f"command.unwind_on_signals()\ntry:\n    os.kill(os.getpid(), signal.{number})\n    time.sleep(20)\n"
        "finally:\n    print('unwound')"
    )
    assert (done.returncode, done.stdout) == (130, "unwound\n")


def test_what_nohup_starts_outlives_its_terminal() -> None:
    done = run(
        "signal.signal(signal.SIGHUP, signal.SIG_IGN)\ncommand.unwind_on_signals()\n"
        "os.kill(os.getpid(), signal.SIGHUP)\nreturn 'alive'"
    )
    assert (done.returncode, done.stdout) == (0, "alive\n")

"""How a command starts and ends: progress on stderr, one result on stdout, exit codes."""

import contextlib
import errno
import logging
import os
import select
import signal
import sys
from collections.abc import Callable
from typing import NoReturn, TextIO

from slipway.errors import SlipwayError


class _Stderr(logging.StreamHandler[TextIO]):
    """Writes to what stderr is at that moment: a progress bar puts itself there, so that lines go above it."""

    def __init__(self, speaker: Callable[[], str]) -> None:
        super().__init__()
        self._speaker = speaker

    def format(self, record: logging.LogRecord) -> str:
        return self._speaker() + super().format(record)

    def emit(self, record: logging.LogRecord) -> None:
        self.setStream(sys.stderr)
        super().emit(record)


def unwind_on_signals() -> None:
    """Let SIGTERM, and SIGHUP of a terminal that is closed, do as Ctrl-C does: unwind, so that nothing is left behind.

    Ctrl-C itself, too, because a shell that starts us in the background has it ignored. Where SIGHUP is ignored, it
    stays so: whoever says `nohup` wants that.
    """
    numbers = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    for number in numbers:
        signal.signal(number, signal.default_int_handler)


def run(main: Callable[[list[str]], object], speaker: Callable[[], str] = lambda: "") -> NoReturn:
    """Run `main(arguments)`, print what it made as the only line on stdout, and exit.

    speaker: what to put in front of a line, where it is one of many processes that says it.
    Exit codes: 0 done, 1 failed, 2 wrong usage, 75 stopped by a signal and to be run again, 130 Ctrl-C, 141 nobody
    reads stdout any more. A SlipwayError is shown as its sentence, and so is what a file system refuses; anything else
    is a bug and keeps its traceback.
    """
    logging.basicConfig(level=logging.WARNING, format="%(message)s", handlers=[_Stderr(speaker)])
    for ours in ("slipway", "train", "serve", "deploy"):
        logging.getLogger(ours).setLevel(logging.INFO)
    try:
        if (result := main(sys.argv[1:])) is not None:
            print(result)
        sys.stdout.flush()
    except SlipwayError as error:
        print(f"{speaker()}error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except BrokenPipeError:
        if not _reader_has_gone():
            raise
        _let_stdout_go()
        sys.exit(128 + signal.SIGPIPE)  # without a word, as other programs end where `head` has seen enough
    except OSError as error:
        if not (said := _what_is_refused(error)):
            raise
        print(f"{speaker()}error: {said}", file=sys.stderr)
        _let_stdout_go()
        sys.exit(1)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
    sys.exit(0)


def _what_is_refused(error: OSError) -> str:
    """A sentence about a file, or a full disk; empty for anything else."""
    if error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error.strerror) if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""


def _reader_has_gone() -> bool:
    """Whether stdout is a pipe whose other end is closed."""
    poll = select.poll()
    poll.register(sys.stdout, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _let_stdout_go() -> None:
    """Python would try again, when it ends, to print what nobody takes, and fail on that."""
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

"""How a command starts and ends: progress on stderr, one result on stdout, exit codes."""

import logging
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


def run(main: Callable[[list[str]], object], speaker: Callable[[], str] = lambda: "") -> NoReturn:
    """Run `main(arguments)`, print what it made as the only line on stdout, and exit.

    speaker: what to put in front of a line, where it is one of many processes that says it.
    Exit codes: 0 done, 1 failed, 2 wrong usage, 75 stopped by a signal and to be run again, 130 Ctrl-C. A
    SlipwayError is shown as its sentence; anything else is a bug and keeps its traceback.
    """
    logging.basicConfig(level=logging.WARNING, format="%(message)s", handlers=[_Stderr(speaker)])
    for ours in ("slipway", "train", "serve", "deploy"):
        logging.getLogger(ours).setLevel(logging.INFO)
    try:
        result = main(sys.argv[1:])
    except SlipwayError as error:
        print(f"{speaker()}error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
    if result is not None:
        print(result)
    sys.exit(0)

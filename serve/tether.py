"""Run a program that cannot outlive its parent: `tether.py PARENT SIGNAL PROGRAM ARGUMENTS...`.

A parent that is killed outright can stop nobody. So the kernel is asked to send this process SIGNAL when the parent,
whose process id is PARENT, ends; and then this process becomes the program. The kernel means the thread that started
it: start a program from a thread that lives as long as the program should, such as the main one.

Standard library only, and as little as possible of it: this stands between `Popen` and every server's start.
"""

import ctypes
import os
import signal
import sys
from pathlib import Path

PR_SET_PDEATHSIG = 1  # from linux/prctl.h


def command(program: Path, *arguments: str, signal_number: int = signal.SIGKILL) -> list[str]:
    """What to give to Popen, so that `program` ends when this process does. Its process id is the one of Popen."""
    parent = str(os.getpid())
    return [sys.executable, "-I", "-S", __file__, parent, str(int(signal_number)), str(program), *arguments]


def main(arguments: list[str]) -> None:
    parent, signal_number, program, *rest = arguments
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, int(signal_number), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != int(parent):
        sys.exit(f"{program}: was not started, because the process that wanted it has ended")
    os.execv(program, [program, *rest])


if __name__ == "__main__":
    main(sys.argv[1:])

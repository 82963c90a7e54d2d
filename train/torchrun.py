"""torchrun with our exit codes: what a scheduler starts once on every node, and may tell to stop.

    python -m train.torchrun --nnodes 2 --node-rank 0 --master-addr node1 --nproc-per-node 8 -m train fit ...

Plain torchrun turns every exit code of a rank into 1, so that no scheduler could tell "run me again" (75) from a
failure; on SIGTERM it gives ranks 30 s before it kills them; and with --max-restarts it starts ranks again that were
told to stop, and those that it starts again do not always find each other. Options are torchrun's own.
"""

import contextlib
import os
import signal
import sys
from types import FrameType
from typing import TYPE_CHECKING

import psutil

from train.preemption import SIGNALS, Preempted

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

# Those that torchrun itself is to end its ranks for: its default without SIGTERM.
ENDING = ("SIGINT", "SIGHUP", "SIGQUIT")


class Launcher:
    """Passes the wish to stop on to the ranks, and waits for as long as they need; the scheduler has the watch."""

    def __init__(self) -> None:
        self.asked = False

    def pass_on(self, _number: int, _frame: FrameType | None) -> None:
        """Always as SIGUSR1, which a rank may get more than once: the scheduler may have sent it to all processes."""
        self.asked = True
        ranks = psutil.Process().children()
        if not ranks:  # still starting, or waiting for the other nodes; there is nothing to be saved
            sys.exit(Preempted.exit_code)
        for rank in ranks:
            with contextlib.suppress(psutil.NoSuchProcess):
                rank.send_signal(signal.SIGUSR1)

    def exit_code(self, failure: "ProcessFailure") -> int:
        """What the first of this node's ranks to fail means; those that torchrun then ended say nothing."""
        if failure.exitcode >= 0:
            return failure.exitcode
        if self.asked and -failure.exitcode in SIGNALS:  # before it began to train, or after it had finished
            return Preempted.exit_code
        return 128 - failure.exitcode


def _let_ranks_end(launcher: Launcher) -> None:
    """No restart for ranks that were told to stop: torchrun itself takes exit code 75 for a failure like any other."""
    from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup  # noqa: PLC0415
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent  # noqa: PLC0415

    look = LocalElasticAgent._monitor_workers  # noqa: SLF001 - torchrun has no other place for it

    def look_and_decide(agent: LocalElasticAgent, ranks: WorkerGroup) -> RunResult:
        found: RunResult = look(agent, ranks)
        if launcher.asked or any(one.exitcode == Preempted.exit_code for one in found.failures.values()):
            agent._remaining_restarts = 0  # noqa: SLF001
        return found

    LocalElasticAgent._monitor_workers = look_and_decide  # type: ignore[method-assign]  # noqa: SLF001


def main(arguments: list[str]) -> int:
    """Run torchrun with `arguments`; returns the exit code of the ranks of this node."""
    launcher = Launcher()
    if any(each.startswith(("--max-restarts", "--max_restarts")) for each in arguments):
        # Ranks that are started again would read in the store of those before them where these listened, and call
        # there. Of torchrun's ways to meet, c10d knows this variable (--standalone, --rdzv-backend=c10d).
        os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    for number in SIGNALS:
        signal.signal(number, launcher.pass_on)
    # Not before, because torch takes seconds to be imported, in which the wish to stop may come.
    from torch.distributed import run  # noqa: PLC0415
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError  # noqa: PLC0415

    _let_ranks_end(launcher)
    try:
        run.main([f"--signals-to-handle={','.join(ENDING)}", *arguments])
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        code = launcher.exit_code(failure)
        print(f"rank {rank} ended first, with {failure.exitcode}; exit code {code}", file=sys.stderr)
        return code
    return os.EX_OK


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

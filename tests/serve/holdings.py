"""What a service and all processes below it hold: memory, descriptors, shared memory, folders."""

import re
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from serve import shared_memory
from tests.serve.service import Service

SAMPLE_SECONDS = 2.0


@dataclass(frozen=True)
class Holdings:
    """Of all processes together.

    memory: their proportional set size in bytes, so that what is shared counts once. Without the pages of files:
        how many of those are theirs depends on who else has mapped the same libraries.
    servers: how many Tritons there are. regions: files in /dev/shm, also of Tritons that have ended.
    folders: in the service's directory for temporary files.
    """

    memory: int
    descriptors: int
    processes: int
    servers: int
    regions: int
    folders: int


@dataclass(frozen=True)
class Sample:
    """moment: seconds of the monotonic clock."""

    moment: float
    holdings: Holdings


class Watch:
    """Looks every two seconds, for as long as a `with` block lasts. Others may look, too, at any moment.

    temporary: the service's own directory for temporary files.
    """

    def __init__(self, service: Service, temporary: Path) -> None:
        self._service = service
        self._temporary = temporary
        self._identities: set[str] = set()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.samples: list[Sample] = []

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    def look(self) -> Holdings | None:
        """Nothing if a process ends meanwhile: the next look is as good."""
        with suppress(psutil.Error, OSError):
            return self._look()
        return None

    def _look(self) -> Holdings:
        processes = self._service.processes()
        commands = [" ".join(process.cmdline()) for process in processes]
        servers = [found[1] for line in commands if (found := re.search(r"tritonserver --id=(\S+)", line))]
        with self._lock:
            self._identities.update(servers)
            known = list(self._identities)
        return Holdings(
            memory=sum(map(_proportional_bytes, processes)),
            descriptors=sum(process.num_fds() for process in processes),
            processes=len(processes),
            servers=len(servers),
            regions=sum(len(list(shared_memory.DIRECTORY.glob(f"{one}*"))) for one in known),
            folders=len(list(self._temporary.iterdir())),
        )

    def between(self, start: float, end: float, servers: int) -> list[Holdings]:
        """What was seen while there were so many servers."""
        return [
            sample.holdings
            for sample in self.samples
            if start <= sample.moment < end and sample.holdings.servers == servers
        ]

    def _run(self) -> None:
        while not self._stop.wait(SAMPLE_SECONDS):
            moment = time.monotonic()
            if holdings := self.look():
                self.samples.append(Sample(moment, holdings))


def least_memory(seen: Sequence[Holdings]) -> int:
    """What is held for good, if somebody looks often enough: a large image takes 50 MB more while it is decoded."""
    return min(holdings.memory for holdings in seen)


def _proportional_bytes(process: psutil.Process) -> int:
    lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("Pss_Anon:", "Pss_Shmem:")))

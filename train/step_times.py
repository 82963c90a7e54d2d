"""What the time of training steps goes into, in five kinds, from what PyTorch's profiler recorded. All in nanoseconds.

On CUDA kernels and copies of the device are looked at, and of the host only its waiting for data. On a CPU the host's
operations stand for kernels.
"""

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from heapq import nlargest
from itertools import groupby
from operator import attrgetter, itemgetter
from typing import Any, Literal

Kind = Literal["data", "transfer", "compute", "communication", "overhead"]
KINDS: tuple[Kind, ...] = ("data", "transfer", "compute", "communication", "overhead")
# What hides what follows for as long as it lasts: a message that travels behind a kernel costs nothing.
HIDING: tuple[Kind, ...] = ("compute", "communication", "transfer", "data")

# The range in a recording in which a batch is waited for.
WAITING = "waiting for data"
ON_DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
ON_HOST = frozenset({"cpu_op", "user_annotation"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """What has a duration in a Chrome trace: an operation, a kernel, a named range."""

    name: str
    category: str
    thread: int | str
    start: int
    end: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """A stretch of time in which a thread, or a stream of the device, did one kind of work."""

    kind: Kind
    name: str
    start: int
    end: int


def events_in(trace: Mapping[str, Any]) -> list[Event]:
    """trace: what `export_chrome_trace` wrote, which counts in microseconds with three decimals."""
    return [
        Event(
            name=line["name"],
            category=line["cat"],
            thread=line["tid"],
            start=round(1000 * line["ts"]),
            end=round(1000 * line["ts"]) + round(1000 * line["dur"]),
        )
        for line in trace["traceEvents"]
        if line["ph"] == "X"
    ]


def spans_of(events: Iterable[Event], launch: float = 0) -> list[Span]:
    """What was done when. Spans of different threads and streams overlap.

    launch: what an operation takes on a CPU before it computes anything, each one within it as well; no span has it.
    """
    events = list(events)
    on_device = [_device_span(event) for event in events if event.category in ON_DEVICE]
    by_thread = attrgetter("thread")
    on_host = sorted((event for event in events if event.category in ON_HOST), key=lambda e: str(e.thread))
    spans = [span for _, each in groupby(on_host, by_thread) for span in _host_spans(each, launch)]
    # Beside a device, the host's operations do nothing but launch.
    return on_device + [span for span in spans if span.kind == "data"] if on_device else spans


def exposed(spans: Iterable[Span], start: int, end: int) -> dict[Kind, int]:
    """The time from `start` to `end` by kind, which adds up to all of it.

    Where spans overlap, it is that of the kind that comes first in `HIDING`. Where there is none, it is overhead.
    """
    spans = [span for span in spans if span.start < end and span.end > start]
    times = dict.fromkeys(KINDS, 0)
    taken: list[tuple[int, int]] = []
    before = 0
    for kind in HIDING:
        taken += [(max(span.start, start), min(span.end, end)) for span in spans if span.kind == kind]
        length = _length_of_union(taken)
        times[kind], before = length - before, length
    times["overhead"] = end - start - before
    return times


def most_expensive(spans: Iterable[Span], count: int) -> list[tuple[str, int]]:
    """The operations, on CUDA the kernels, that compute longest: name and time altogether."""
    times: defaultdict[str, int] = defaultdict(int)
    for span in spans:
        if span.kind == "compute":
            times[span.name] += span.end - span.start
    return nlargest(count, times.items(), key=itemgetter(1))


def _length_of_union(intervals: Iterable[tuple[int, int]]) -> int:
    length, reached = 0, 0
    for first, last in sorted(intervals):
        length += max(0, last - max(first, reached))
        reached = max(reached, last)
    return length


def _device_span(event: Event) -> Span:
    kind: Kind = "compute"
    if event.name.startswith("nccl"):
        kind = "communication"
    elif event.category == "gpu_memcpy" and "HtoD" in event.name:
        kind = "transfer"
    return Span(kind=kind, name=event.name, start=event.start, end=event.end)


def _host_spans(events: Iterable[Event], launch: float) -> Iterator[Span]:
    """events: of one thread. What happens within an operation, a collective or the wait for data is part of it."""
    working = [(event, kind) for event in events if (kind := _host_kind(event))]
    working.sort(key=lambda each: (each[0].start, -each[0].end))
    rest = deque(working)
    while rest:
        outer, kind = rest.popleft()
        launches = 1
        while rest and rest[0][0].start < outer.end:
            rest.popleft()
            launches += 1
        start = outer.start + round(launch * launches) if kind == "compute" else outer.start
        if start < outer.end:
            yield Span(kind=kind, name=outer.name, start=start, end=outer.end)


def _host_kind(event: Event) -> Kind | None:
    """None for what only stands around operations: ranges of modules and optimisers, autograd's engine."""
    if event.category == "user_annotation":
        if event.name == WAITING:
            return "data"
        return "communication" if event.name.startswith("gloo:") else None
    namespace, is_operation, _ = event.name.partition("::")
    if "c10d" in namespace:
        return "communication"
    if namespace == "autograd" or namespace.split(".")[0] == "torch":
        return None
    # What torch.compile made for a CPU runs within its graph, and is not recorded by itself.
    return "compute" if is_operation or event.name.startswith("## Call CompiledFxGraph") else None

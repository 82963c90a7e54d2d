"""Where the time of a training step goes, which of five kinds makes it slow, and which settings answer that.

A few steps are trained as `fit` trains them, with the same loader, model and step, in a run that is thrown away.
"""

import json
import logging
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch
from torch.profiler import record_function

from slipway.cpus import available_cpus
from slipway.errors import SlipwayError
from train.board import board
from train.compilation import needs_warm_up, warm_up
from train.config import Config, HardwareConfig
from train.dataset import Dataset
from train.display import display
from train.exposition import Exposition
from train.fit import batches_of, prepare
from train.hardware import Machine, effective_precision, launch
from train.loader import PREFETCHED, Batch, worker_deaths_in_words
from train.order import Window
from train.preemption import Preempted, ended_at_once, stop_requests
from train.runs import Run
from train.step import step
from train.step_times import (
    KINDS,
    ON_DEVICE,
    WAITING,
    Event,
    Kind,
    events_in,
    exposed,
    most_expensive,
    spans_of,
)
from train.trainer import Outputs, Trainer

WARM_UP, MEASURED = 5, 20
# The recorder takes 3 kB of memory for each: where a step has very many, fewer steps are measured.
MOST_EVENTS = 500_000
# Ranges in the recording: the steps; and as many operations on one number, which tell what launching alone takes.
STEPS, LAUNCHES, LAUNCHED = "measured steps", "launches", 100
MOST_EXPENSIVE = 3
# A kind that takes this share of a step, and is not the largest, is worth a sentence as well.
NOTABLE = 0.2

logger = logging.getLogger(__name__)


class ProfileError(SlipwayError):
    """What was recorded says nothing about the device."""


@dataclass(frozen=True, kw_only=True)
class Times:
    """Of one rank, in milliseconds a step: its five kinds, which add up, and the most expensive operations."""

    kinds: Mapping[Kind, float]
    expensive: Sequence[tuple[str, float]]

    @property
    def step(self) -> float:
        return sum(self.kinds.values())

    def share(self, kind: Kind) -> float:
        return self.kinds[kind] / self.step


@dataclass(frozen=True, kw_only=True)
class Place:
    """What advice depends on besides the configuration. cpus: for each rank. precision: what `auto` is here."""

    device: str
    cpus: int
    precision: str


def profile(config: Config, dataset: Dataset) -> str | None:
    """Measure some steps, and leave nothing behind; returns table and verdict, on the first rank alone.

    Raises Preempted on a signal, ProfileError where no kernel of a CUDA device is recorded, and what `fit` raises.
    """
    config = _for_measuring(config)
    with ended_at_once():
        machine = launch(config.hardware, config.training)
    with ExitStack() as stack:
        stop = stack.enter_context(stop_requests())
        scratch = Path(stack.enter_context(TemporaryDirectory(prefix="profile-")))
        # Not as a new run: weights to start from need not be fetched for this.
        run = Run(directory=scratch, inputs="")
        trainer = prepare(config, run, dataset, machine, stop, is_new=False)
        stack.callback(trainer.saver.close)
        with worker_deaths_in_words():
            events, images, steps = _record(trainer, stack)
        said = machine.everyones(json.dumps(asdict(times_in(events, steps, machine.device.type))))
    machine.leave()
    if not machine.is_first:
        return None
    place = Place(
        device=machine.device.type,
        cpus=max(1, available_cpus() // machine.ranks_here),
        precision=effective_precision("auto", machine.device.type),
    )
    return "\n".join(report([Times(**json.loads(each)) for each in said], images / steps, config, place))


def _for_measuring(config: Config) -> Config:
    """Long enough, and without trackers, or checkpoints to roll back to."""
    training = config.training
    answer = "stop" if training.on_bad_loss == "rollback" else training.on_bad_loss
    epochs = max(training.epochs, _warm_up_steps(config) + MEASURED)
    training = replace(training, epochs=epochs, on_bad_loss=answer)
    return replace(config, run=replace(config.run, loggers=()), training=training)


def _warm_up_steps(config: Config) -> int:
    """Until what loader workers made ready before the first step is used up as well."""
    return WARM_UP + PREFETCHED * config.data.workers // config.training.accumulate


def _record(trainer: Trainer, stack: ExitStack) -> tuple[list[Event], int, int]:
    """What this rank did in the measured steps, how many images all ranks took in them, and the number of steps."""
    machine, config = trainer.machine, trainer.config
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or the recorder tells stderr when it begins and ends
    stack.enter_context(torch.autograd.set_detect_anomaly(config.debug.anomaly))
    first = _warm_up_steps(config)
    outputs = _open_outputs(trainer, stack, first + MEASURED)
    if needs_warm_up(config.hardware, machine):
        warm_up(trainer)
    batches, windows = trainer.meter.timed(_marked(batches_of(trainer))), trainer.order.windows(0)
    _say(machine, f"steps to warm up: {first}")
    _take(trainer, islice(windows, first - 1), batches, outputs)
    one, _ = _recorded(trainer, islice(windows, 1), batches, outputs)
    steps = max(1, min(MEASURED, MOST_EVENTS // round(machine.largest(len(one)))))
    _say(machine, f"steps to be measured: {steps}")
    events, images = _recorded(trainer, islice(windows, steps), batches, outputs)
    return events, images, steps


def _say(machine: Machine, words: str) -> None:
    if machine.is_first:
        logger.info("%s", words)


def _recorded(
    trainer: Trainer, windows: Iterator[Window], batches: Iterator[Batch], outputs: Outputs
) -> tuple[list[Event], int]:
    """`_take`, and what was recorded meanwhile."""
    machine = trainer.machine
    with torch.profiler.profile() as recorder:
        _launch()
        machine.fabric.barrier()
        _wait_for(machine)
        with record_function(STEPS):
            images = _take(trainer, windows, batches, outputs)
            _wait_for(machine)
    trace = trainer.run.directory / "trace.json"
    recorder.export_chrome_trace(str(trace))
    return events_in(json.loads(trace.read_bytes())), images


def _open_outputs(trainer: Trainer, stack: ExitStack, steps: int) -> Outputs:
    """As for `fit`: what logging costs is part of a step."""
    run, config, speaks = trainer.run, trainer.config, trainer.machine.is_first
    show = stack.enter_context(display(steps, config.training.epochs, speaks=speaks))
    if not speaks:
        return Outputs(show=show, board=None)
    exposition = stack.enter_context(Exposition(run.directory, run.checkpoints, trainer.order.end))
    return Outputs(show=show, board=stack.enter_context(board(run, config, 0)), exposition=exposition)


def _marked(batches: Iterator[Batch]) -> Iterator[Batch]:
    """The same batches; each wait for one is a range of the recording."""
    while True:
        with record_function(WAITING):
            batch = next(batches, None)
        if batch is None:
            return
        yield batch


def _take(trainer: Trainer, windows: Iterator[Window], batches: Iterator[Batch], outputs: Outputs) -> int:
    """A step for each window; returns how many images they hold."""
    images = 0
    for window in windows:
        if step(trainer, window, batches, outputs):
            raise Preempted("stopped while steps were measured; run it again")
        images += len(window.indices)
    return images


def _launch() -> None:
    number = torch.ones(1)
    with record_function(LAUNCHES):
        for _ in range(LAUNCHED):
            number.sqrt()


def _wait_for(machine: Machine) -> None:
    if machine.device.type == "cuda":
        torch.cuda.synchronize(machine.device)


def times_in(events: Sequence[Event], count: int, device: str) -> Times:
    """count: of the steps that were recorded. Raises ProfileError."""
    if device == "cuda" and not any(event.category in ON_DEVICE for event in events):
        raise ProfileError(
            "PyTorch's profiler recorded nothing of the CUDA device. Where its driver lets administrators alone "
            "profile (NVreg_RestrictProfilingToAdminUsers=1), let others do so as well"
        )
    # A device shows ranges as well, as another category.
    ranges = {event.name: event for event in events if event.category == "user_annotation"}
    steps, launches = ranges[STEPS], ranges[LAUNCHES]
    launched = [event for event in _within(launches, events) if event.category == "cpu_op"]
    spans = spans_of(_within(steps, events), median(event.end - event.start for event in launched))
    scale = 1e-6 / count
    times = exposed(spans, steps.start, steps.end)
    return Times(
        kinds={kind: scale * time for kind, time in times.items()},
        expensive=[(name, scale * time) for name, time in most_expensive(spans, MOST_EXPENSIVE)],
    )


def _within(outer: Event, events: Sequence[Event]) -> list[Event]:
    return [event for event in events if outer.start <= event.start < outer.end]


def report(ranks: Sequence[Times], images: float, config: Config, place: Place) -> Iterator[str]:
    """Table and verdict, for a terminal. ranks: in their order. images: a step, of all ranks together."""
    # What holds all ranks up is what the one does that waits least for others.
    waiting = [times.kinds["communication"] for times in ranks]
    last, first = waiting.index(min(waiting)), waiting.index(max(waiting))
    yield from _table({rank: ranks[rank] for rank in sorted({first, last})}, images)
    yield from verdict(ranks[last], config, place)
    if (longer := waiting[first] - waiting[last]) >= NOTABLE * ranks[last].step:
        yield f"rank {first} waits {longer:.1f} ms a step longer for others than rank {last}, which holds it up"


def _table(ranks: Mapping[int, Times], images: float) -> Iterator[str]:
    if len(ranks) > 1:
        yield " " * 13 + "".join(f"{f'rank {rank}':>24}" for rank in ranks)
    yield " " * 13 + f"{'ms a step':>14}{'share':>10}" * len(ranks)
    for kind in KINDS:
        yield f"{kind:13}" + "".join(
            f"{times.kinds[kind]:14.2f}{100 * times.share(kind):8.1f} %" for times in ranks.values()
        )
    sums = "".join(f"{times.step:14.2f}{100:8.1f} %" for times in ranks.values())
    slowest = max(times.step for times in ranks.values())
    yield f"{'step':13}{sums}, {1000 * images / slowest:,.0f} images/s"


def verdict(times: Times, config: Config, place: Place) -> Iterator[str]:
    """What makes a step slow: its largest kind, and any other that is notable and not the work itself."""
    largest, *others = sorted(KINDS, key=times.share, reverse=True)
    for kind in [largest, *(kind for kind in others if kind != "compute" and times.share(kind) >= NOTABLE)]:
        yield f"{kind}: {_percent(times.share(kind))} of a step {_advice(kind, times, config, place)}"
        if kind == "compute":
            shares = (f"{name[:60]} {_percent(time / times.step)}" for name, time in times.expensive)
            yield f"most expensive: {', '.join(shares)}"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _advice(kind: Kind, times: Times, config: Config, place: Place) -> str:
    match kind:
        case "data":
            return f"waits for images. {_for_data(times.share(kind), config, place.cpus)}"
        case "transfer":
            return (
                "copies images to the device. They travel as uint8, from pinned memory: only a smaller image.size "
                f"({config.image.size}) makes them less; `nvidia-smi -q` says how wide the card's link is"
            )
        case "compute":
            return f"is the work of model, loss and optimiser itself. {_for_compute(config, place)}"
        case "communication":
            return (
                f"waits for other ranks and the network between them. {_for_communication(config.hardware)}"
            )
        case "overhead":
            tries = "; ".join(_against_overhead(config))
            return f"passes with nothing computed: Python, launching small operations, logging. Try {tries}"


def _for_data(share: float, config: Config, cpus: int) -> str:
    """share: of a step that waits. With workers, all of them were at work all the time."""
    workers = config.data.workers
    if workers >= cpus:
        return (
            f"data.workers is {workers}, and a rank has {cpus} CPUs: store images not much larger than image.resize "
            f"({config.image.resize}), or, where reading is slow, in shards (data.source)"
        )
    needed = math.ceil((workers or share) / max(0.01, 1 - share))
    more = min(cpus, max(workers + 1, needed))
    return f"data.workers is {workers}, and a rank has {cpus} CPUs: try --data.workers {more}"


def _for_compute(config: Config, place: Place) -> str:
    hardware, tries = config.hardware, []
    if config.training.precision == "32-true" and place.precision != "32-true":
        tries.append(f"--training.precision {place.precision}")
    if hardware.activation_checkpointing != "none":
        tries.append("--hardware.activation_checkpointing none, if memory allows")
    elif hardware.compile == "none":
        tries.append("--hardware.compile whole")
    if not hardware.channels_last:
        tries.append("--hardware.channels_last true")
    if place.device == "cuda" and hardware.deterministic:
        tries.append("--hardware.deterministic false, which costs exact resume")
    way = f"Try {'; '.join(tries)}" if tries else "There is nothing to gain from settings"
    return f"{way}; beyond that, a smaller model.name or image.size, or more hardware.devices"


def _for_communication(hardware: HardwareConfig) -> str:
    way = "Gradients travel once a step: a larger training.batch_size sends them less often"
    if hardware.strategy == "fsdp2":
        way += (
            "; --hardware.strategy ddp sends less, if the model fits on a device; else see hardware.replicas"
        )
    return way


def _against_overhead(config: Config) -> Iterator[str]:
    if config.debug.anomaly:
        yield "--debug.anomaly false"
    if config.training.accumulate > 1:
        yield "--training.accumulate 1, if memory allows"
    if config.hardware.compile == "none" and config.hardware.activation_checkpointing == "none":
        yield "--hardware.compile whole"
    yield f"a training.batch_size above {config.training.batch_size}"

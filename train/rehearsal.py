"""A step of training without numbers: what memory it takes, and what ranks send each other.

The real model, strategy, optimiser and loss, on PyTorch's fake tensors, which have a shape and a type and take no
memory, and in a group of ranks that send nothing. So it needs neither GPUs nor images, and finds what the code does and
not what somebody thinks it does. Tests hold it against steps that are really taken.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import nn
from torch._C._distributed_c10d import GradBucket
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.distributed import ProcessGroup, destroy_process_group, init_process_group
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from slipway.errors import SlipwayError
from train import execution
from train.config import Config
from train.ema import Average
from train.hardware import mesh_of, precision_of, shard
from train.loader import Batch
from train.mixing import mix
from train.model import build_model, inference
from train.optimizer import build_optimizer
from train.parameters import freeze

Phase = Literal["forward", "backward", "optimiser", "validation"]
Collective = tuple[str, int]
"""(its name, how many ranks take part)"""

IN_PASSING = "intermediate results"

# Of each collective its name, and which arguments are the whole that it works on, and the group.
_COLLECTIVES = {
    torch.ops.c10d.allreduce_.default: ("all-reduce", 0, 1),
    torch.ops.c10d._allgather_base_.default: ("all-gather", 0, 2),
    torch.ops.c10d._reduce_scatter_base_.default: ("reduce-scatter", 1, 2),
    torch.ops.c10d.broadcast_.default: ("broadcast", 0, 1),
}


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """What one rank holds and sends, in bytes.

    held: by phase, at the moment when it is most, by what it is for. messages: of one step, the whole that a collective
    works on, which is what each rank has of it before or after.
    """

    held: Mapping[Phase, Mapping[str, int]]
    messages: Mapping[Collective, int]


@dataclass
class _Held:
    """What a piece of memory is for, which may be known only after it was taken."""

    what: str = IN_PASSING


class _Ledger(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps account of all memory that tensors take inside, and of all messages."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.phase: Phase | None = None
        self.messages: Counter[Collective] = Counter()
        self._live: Any = WeakIdKeyDictionary()  # of storages, to _Held
        self._kept: Any = WeakIdKeyDictionary()
        self._sizes: Counter[str] = Counter()  # of what is kept
        self._most: dict[Phase, list[tuple[_Held, int]]] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # it comes again, as what it does to the tensor inside
        result = func(*args, **(kwargs or {}))
        storages = [each.untyped_storage() for each in _tensors_in(result)]
        if new := [each for each in storages if each not in self._live and each not in self._kept]:
            self._live.update({each: _Held() for each in new})
            self._look()
        if func in _COLLECTIVES:
            name, whole, group = _COLLECTIVES[func]
            self.count(name, ProcessGroup.unbox(args[group]).size(), args[whole])
        return result

    def count(self, collective: str, ranks: int, whole: Any) -> None:
        self.messages[collective, ranks] += sum(each.nbytes for each in _tensors_in(whole))

    def keep(self, what: str, tensors: Iterable[torch.Tensor] | None = None) -> None:
        """Say what everything is for that is there, or only some tensors, and that it stays to the end."""
        chosen = list(self._live) if tensors is None else [each.untyped_storage() for each in tensors]
        for each in chosen:
            del self._live[each]
            self._kept[each] = None
            self._sizes[what] += each.nbytes()

    def call_the_rest(self, what: str) -> None:
        """The same of what may go again, and of which that was not said yet."""
        for held in self._live.values():
            if held.what == IN_PASSING:
                held.what = what

    def call_the_empty(self, what: str) -> None:
        """The same of storages that are empty now, and will be filled again."""
        for storage, held in self._live.items():
            if storage.nbytes() == 0:
                held.what = what

    def held(self) -> dict[Phase, Counter[str]]:
        """Of each phase, at its moment of most, the bytes by what they were for."""
        found: dict[Phase, Counter[str]] = {}
        for phase, most in self._most.items():
            found[phase] = self._sizes.copy()
            for held, size in most:
                found[phase][held.what] += size
        return found

    def _look(self) -> None:
        # Summed up each time, because FSDP2 empties storages and fills them again, which is no operation on tensors.
        if self.phase is not None:
            there = [(held, storage.nbytes()) for storage, held in self._live.items()]
            if _total(there) > _total(self._most.get(self.phase, [])):
                self._most[self.phase] = there


def rehearse(config: Config, classes: int, *, ranks: int, foreach: bool) -> Rehearsal:
    """One step of the first of `ranks`, and a batch of its validation, without torch.compile.

    config: its precision must be one that is, not `auto`. foreach: whether the optimiser takes all parameters at a
    time, as it does on GPUs, or one after the other. Raises UsageError for a model that cannot be built, and
    SlipwayError for one that cannot do without numbers.
    """
    image, hardware = config.image, config.hardware
    with _as_one_of(ranks):
        mesh = mesh_of("cpu", ranks, hardware.replicas) if hardware.strategy == "fsdp2" else None
        # Built for real, since there are networks that compute with tensors how large they are to be.
        module = build_model(config.model, classes, image.size, image.mean, image.std)
        try:
            with FakeTensorMode(allow_non_fake_inputs=True), _Ledger() as ledger:
                module.to_empty(device="cpu")
                freeze(module, config.optimizer.freeze)
                execution.prepare(module, replace(hardware, compile="none"))
                model = _distributed(module, mesh, ranks, ledger)
                messages = _step_and_validation(config, module, model, ledger, foreach=foreach)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise SlipwayError(
                f"{config.model.name} decides by the values of its tensors what to do ({error.func}); its memory "
                "cannot be planned without them. `python -m train explain` names the lines"
            ) from error
    return Rehearsal(held=ledger.held(), messages=messages)


@contextmanager
def _as_one_of(ranks: int) -> Iterator[None]:
    init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        yield
    finally:
        destroy_process_group()


def _distributed(module: nn.Module, mesh: DeviceMesh | None, ranks: int, ledger: _Ledger) -> Any:
    model: Any = module if mesh is None else shard(module, mesh)
    ledger.keep("buffers", module.buffers())
    ledger.keep("parameters")
    if mesh is None and ranks > 1:
        model = DistributedDataParallel(module, init_sync=False)  # there is nothing that ranks could compare
        model.register_comm_hook(ledger, _sum_up_nothing)
        ledger.keep("buckets of DDP")
    return model


def _step_and_validation(
    config: Config, module: nn.Module, model: Any, ledger: _Ledger, *, foreach: bool
) -> dict[Collective, int]:
    """Returns the messages of the step."""
    optimizer = build_optimizer(module, config.optimizer)
    for group in optimizer.param_groups:
        group["foreach"] = foreach
    ledger.keep("optimiser state")
    average = None if config.training.ema is None else Average(module, config.training.ema)
    ledger.keep("moving average")
    ledger.messages.clear()
    _gradients(config, model, ledger)
    messages = dict(ledger.messages)
    ledger.call_the_empty("gathered parameters")
    # First out of sight: DTensor finds out how to shard operations, on fake tensors of the whole size.
    for phase in (None, "optimiser"):
        ledger.phase = phase
        _update(module, optimizer, average)
    optimizer.zero_grad()
    ledger.phase = None
    with average.applied_to(module) if average else nullcontext(), inference(module):
        ledger.phase = "validation"
        module(_blank(config).images)
    return messages


def _sum_up_nothing(ledger: _Ledger, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """In the place of DDP's own all-reduce, which wants to see a result that it can read."""
    ledger.count("all-reduce", torch.distributed.get_world_size(), bucket.buffer())
    done = torch.futures.Future[torch.Tensor]()
    done.set_result(bucket.buffer())
    return done


def _gradients(config: Config, model: Any, ledger: _Ledger) -> None:
    """As train.step.accumulate_gradients, in all that takes memory or is sent."""
    last = config.training.accumulate - 1
    precision = precision_of(config.training.precision, "cpu")
    for number in sorted({0, min(1, last), last}):  # all between are like the second one
        before = ledger.messages.copy()
        ledger.phase = "forward"
        batch = _blank(config)
        ledger.call_the_rest("images and labels")
        with _synchronised(model, now=number == last):
            mixed = mix(batch, config.augment, np.random.default_rng(0))
            with precision.forward_context():
                logits = model(mixed.images)
            loss = (mixed.losses(logits, config.training.label_smoothing) * batch.weights).sum()
            del logits
            ledger.call_the_rest("activations")
            ledger.phase = "backward"
            loss.backward()  # type: ignore[no-untyped-call]
        ledger.call_the_rest("gradients")
        if 0 < number < last:
            for collective, size in (ledger.messages - before).items():
                ledger.messages[collective] += size * (last - 2)


def _blank(config: Config) -> Batch:
    count, size = config.training.micro_batch(torch.distributed.get_world_size()), config.image.size
    batch = Batch(
        images=torch.zeros(count, 3, size, size, dtype=torch.uint8),
        labels=torch.zeros(count, dtype=torch.int64),
        weights=torch.ones(count),
    )
    return batch.to(torch.device("cpu"), channels_last=config.hardware.channels_last)


def _synchronised(model: Any, *, now: bool) -> AbstractContextManager[object]:
    """Inside, whether gradients are summed over ranks now, or only with those of a later micro-batch."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(now)
    if isinstance(model, DistributedDataParallel) and not now:
        return model.no_sync()
    return nullcontext()


def _update(module: nn.Module, optimizer: torch.optim.Optimizer, average: Average | None) -> None:
    nn.utils.clip_grad_norm_(module.parameters(), 1.0)
    optimizer.step()
    if average:
        average.update(module)


def _tensors_in(tree: Any) -> list[torch.Tensor]:
    return [each for each in tree_leaves(tree) if isinstance(each, torch.Tensor)]


def _total(there: Sequence[tuple[_Held, int]]) -> int:
    return sum(size for _, size in there)

"""How the network is executed: what changes speed and memory, and nothing of what is learnt but its rounding."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from train.blocks import blocks_of
from train.config import HardwareConfig

# Cheap to keep for what they cost to compute again.
_EXPENSIVE = {torch.ops.aten.convolution.default, torch.ops.aten.mm.default, torch.ops.aten.addmm.default}


def prepare(module: nn.Module, config: HardwareConfig) -> None:
    """Set up activation checkpointing and compilation, in place, before the module is wrapped for its strategy.

    In place, because wrappers would put `_orig_mod.` and its kind into the names of parameters (case B07).
    """
    if config.activation_checkpointing != "none":
        for block in blocks_of(module):
            recompute_in_backward(block, selective=config.activation_checkpointing == "selective")
    if config.compile == "whole":
        module.compile()
    elif config.compile == "block":
        for block in blocks_of(module):
            block.compile()


def recompute_in_backward(block: nn.Module, *, selective: bool) -> None:
    """Let a block compute its activations again in the backward pass instead of keeping them, in place.

    selective: keep the results of convolutions and matrix products all the same, and compute only the rest again.
    """
    norms = [part for part in block.modules() if isinstance(part, _BatchNorm)]
    if selective:
        _keep_results_as_they_are(block)

    def contexts() -> tuple[AbstractContextManager[object], AbstractContextManager[object]]:
        if not selective:
            return nullcontext(), _without_statistics(norms, nullcontext())
        first, again = create_selective_checkpoint_contexts(_policy)  # type: ignore[no-untyped-call]
        return first, _without_statistics(norms, again)

    block.forward = partial(checkpoint, block.forward, use_reentrant=False, context_fn=contexts)


def _keep_results_as_they_are(block: nn.Module) -> None:
    """No activation may work in place on what is kept: computed again, it would be applied to its own result."""
    part: Any  # each kind of activation has the attribute, and no base class of theirs
    for part in block.modules():
        if getattr(part, "inplace", False):
            part.inplace = False


def _policy(
    _context: object, operation: object, *_arguments: object, **_keywords: object
) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in _EXPENSIVE else CheckpointPolicy.PREFER_RECOMPUTE


@contextmanager
def _without_statistics(norms: list[_BatchNorm], inner: AbstractContextManager[object]) -> Iterator[None]:
    """The second forward of a step must not move the running statistics a second time.

    With momentum 0 they stay what they are. Not to track them at all would keep other tensors than the first forward.
    """
    tracking = [norm for norm in norms if norm.num_batches_tracked is not None]
    before = [(norm, norm.momentum, norm.num_batches_tracked.clone()) for norm in tracking]  # type: ignore[union-attr]
    for norm in tracking:
        norm.momentum = 0.0
    try:
        with inner:
            yield
    finally:
        for norm, momentum, batches in before:
            norm.momentum = momentum
            norm.num_batches_tracked.copy_(batches)  # type: ignore[union-attr]


def eager() -> AbstractContextManager[object]:
    """Inside, what is compiled runs as it is written: validation then equals the evaluation of the checkpoint."""
    stance: AbstractContextManager[object] = torch.compiler.set_stance("force_eager")
    return stance

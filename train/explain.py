"""Why a model breaks into several graphs under torch.compile, is compiled again and again, or cannot be exported.

The model is the configuration's, with random weights: none of this depends on what was learnt, nor on data.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from traceback import FrameSummary
from typing import Any

import torch
from torch import _dynamo, nn
from torch._dynamo.utils import clear_compilation_metrics, get_compilation_metrics

from slipway.errors import SlipwayError
from train.config import Config
from train.model import ImageClassifier, build_model
from train.servable import Servable, capture, exporting

CLASSES = 10
# What an epoch holds: full batches, and a smaller one at its end. Validation is not compiled (train/execution.py).
FULL, REST = 4, 3
BATCHES = (FULL, FULL, REST)
# One for the first size of batch, and one for any.
USUAL_GRAPHS = 2


def explain(config: Config) -> list[str]:
    """What is found, in sentences. Raises UsageError for a model that cannot be built."""
    size = config.image.size
    torch.manual_seed(0)
    classifier = build_model(config.model, CLASSES, size, (0.5,) * 3, (0.5,) * 3)
    return [
        *compilation(classifier, size),
        *recompilations(classifier, size),
        *exportability(classifier, size),
    ]


def compilation(classifier: nn.Module, size: int) -> Iterator[str]:
    """Where torch.compile has to leave the graph. Runs the model once, in training mode."""
    _dynamo.reset()
    with torch.no_grad():
        found = _dynamo.explain(classifier.train())(_images(FULL, size))
    if not found.graph_break_count:
        yield "torch.compile: one graph, without a break"
        return
    yield f"torch.compile: {found.graph_count} graphs where one would do, because it has to leave the graph:"
    # The same line may be told twice, once for each of the functions around it.
    yield from dict.fromkeys(
        f"  {_place(one.user_stack)}: {_broken(one.reason)}" for one in found.break_reasons
    )


def recompilations(classifier: nn.Module, size: int) -> Iterator[str]:
    """What is compiled in an epoch, and again in a second one. No code is generated: the graphs are run as they are."""
    first, second = _compiled(classifier.train(), size)
    yield f"torch.compile: {len(first)} compilations in an epoch with batches of {', '.join(map(str, BATCHES))} images:"
    for one in first:
        yield f"  {_name(one)}: {_again(one.recompile_reason)}"
    if second:
        yield f"torch.compile: {len(second)} more in the next epoch, and so on, which costs more than it gains:"
        for one in second:
            yield f"  {_name(one)}: {_again(one.recompile_reason)}"
    else:
        yield "torch.compile: none in the next epoch: what is compiled in the first one stays"
    if len(first) > USUAL_GRAPHS:
        yield f"torch.compile: more than {USUAL_GRAPHS}, which is what the sizes of batches alone ask for"


def exportability(classifier: ImageClassifier, size: int) -> Iterator[str]:
    """Whether the model can become an artefact; if not, why."""
    try:
        with exporting(classifier.eval(), size), torch.no_grad():
            capture(Servable(classifier).eval(), size, max_batch=8)
    except SlipwayError as error:
        yield f"export: {error}"
    else:
        yield "export: can be exported"


def _compiled(module: nn.Module, size: int) -> tuple[Sequence[Any], Sequence[Any]]:
    """The records of what two epochs made torch.compile compile."""
    _dynamo.reset()
    compiled = torch.compile(module, backend="eager")
    epochs = []
    for _ in range(2):
        clear_compilation_metrics()
        with torch.no_grad():
            for batch in BATCHES:
                compiled(_images(batch, size))
        epochs.append(get_compilation_metrics())
    return epochs[0], epochs[1]


def _images(batch: int, size: int) -> torch.Tensor:
    return torch.zeros(batch, 3, size, size, dtype=torch.uint8)


def _broken(reason: str) -> str:
    """The first two lines of PyTorch's reason are about the model, the rest is about PyTorch."""
    if reason.startswith(("generic_jump", "Data-dependent branching")):
        return "branches on the values of a tensor; torch.where takes both ways and chooses"
    lines = [line.strip() for line in reason.splitlines() if line.strip()]
    return ": ".join(line.removeprefix("Explanation: ") for line in lines[:2])


def _again(reason: str | None) -> str:
    if reason is None:
        return "for the first time"
    first = reason.splitlines()[0].partition(": ")[2]
    if "size mismatch at index 0" in first:
        return f"another size of batch ({first}); from now on it takes any above 1"
    return f"again, because it no longer holds that {first.partition('  #')[0].strip()}"


def _name(record: Any) -> str:
    return f"{record.co_name} ({_short(record.co_filename)}:{record.co_firstlineno})"


def _place(stack: Sequence[FrameSummary]) -> str:
    return f"{_short(stack[-1].filename)}:{stack[-1].lineno} in {stack[-1].name}" if stack else "somewhere"


def _short(filename: str) -> str:
    return "/".join(Path(filename).parts[-2:])

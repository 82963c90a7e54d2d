"""Which parameters learn, and how fast compared with the rest.

Patterns are those of a shell (`backbone.layer1.*`), and match whole names. One that matches nothing stops training:
a misspelt name would otherwise train what was to be frozen.
"""

import difflib
from fnmatch import fnmatchcase

from torch import nn

from slipway.errors import UsageError
from train.config import OptimizerConfig


def freeze(module: nn.Module, patterns: tuple[str, ...]) -> None:
    """Let the parameters that match keep their values, in place.

    A submodule of which nothing learns any more is put in eval mode as well: its batch statistics would go on moving,
    and its dropout would go on drawing.

    Raises UsageError for a pattern that matches nothing, and when nothing is left to learn.
    """
    parameters = dict(module.named_parameters())
    _require_matches(patterns, list(parameters), "optimizer.freeze")
    for name, parameter in parameters.items():
        if any(fnmatchcase(name, pattern) for pattern in patterns):
            parameter.requires_grad_(False)  # noqa: FBT003 - its only parameter
    if not any(parameter.requires_grad for parameter in parameters.values()):
        raise UsageError(f"optimizer.freeze {list(patterns)} leaves nothing to learn")
    for part in module.modules():
        own = list(part.parameters())
        if own and not any(parameter.requires_grad for parameter in own):
            part.eval()


def learning_groups(module: nn.Module, config: OptimizerConfig) -> list[dict[str, object]]:
    """The parameters that learn, as groups for a torch optimiser, with `weight_decay` and `lr_scale` each.

    Weights decay; norms and biases (one-dimensional parameters) do not (arxiv.org/abs/1812.01187, 3.1). Where several
    patterns of `lr_scales` match, the last one counts.

    Raises UsageError for a pattern that matches nothing.
    """
    learning = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
    scales = config.scales()
    _require_matches(tuple(scales), [name for name, _ in learning], "optimizer.lr_scales")
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in learning:
        scale = [1.0, *(factor for pattern, factor in scales.items() if fnmatchcase(name, pattern))][-1]
        decay = config.weight_decay if parameter.ndim > 1 else 0.0
        groups.setdefault((scale, decay), []).append(parameter)
    return [
        {"params": members, "weight_decay": decay, "lr_scale": scale}
        for (scale, decay), members in groups.items()
    ]


def _require_matches(patterns: tuple[str, ...], names: list[str], option: str) -> None:
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            near = difflib.get_close_matches(pattern.rstrip(".*"), names, n=1, cutoff=0.3)
            hint = f"; there is {near[0]}" if near else ""
            raise UsageError(f"{option}: {pattern} matches no parameter that learns{hint}")

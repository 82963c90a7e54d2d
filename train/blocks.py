"""The blocks of a network: the units that are sharded, compiled and recomputed one by one."""

from torch import nn


def blocks_of(module: nn.Module) -> list[nn.Module]:
    """The repeated parts of a network, in forward order: what its (nested) plain nn.Sequentials are made of.

    For a ResNet these are its residual blocks, for a ConvNeXt its CNBlocks. Single layers outside of any
    Sequential, such as a stem or a head, are no blocks; they stay with the whole.
    """
    blocks: list[nn.Module] = []
    for child in module.children():
        if type(child) is nn.Sequential:
            for part in child.children():
                blocks += blocks_of_part(part)
        else:
            blocks += blocks_of(child)
    return blocks


def blocks_of_part(part: nn.Module) -> list[nn.Module]:
    if type(part) is nn.Sequential:
        return [block for inner in part.children() for block in blocks_of_part(inner)]
    return [part] if any(True for _ in part.parameters()) else []

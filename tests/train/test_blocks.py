import pytest
import torchvision
from torch import nn

from train.blocks import blocks_of


@pytest.mark.parametrize(
    ("name", "kind", "count"),
    [("resnet18", "BasicBlock", 8), ("vit_b_16", "EncoderBlock", 12), ("convnext_tiny", "CNBlock", 18)],
)
def test_blocks_are_the_repeated_parts(name: str, kind: str, count: int) -> None:
    blocks = blocks_of(torchvision.models.get_model(name, weights=None))
    assert [type(block).__name__ for block in blocks].count(kind) == count


def test_no_block_lies_inside_another() -> None:
    blocks = blocks_of(torchvision.models.get_model("efficientnet_b0", weights=None))
    inside = {id(part) for block in blocks for part in block.modules() if part is not block}
    assert not [block for block in blocks if id(block) in inside]


def test_model_without_sequentials_is_one_whole() -> None:
    assert blocks_of(nn.Linear(2, 2)) == []

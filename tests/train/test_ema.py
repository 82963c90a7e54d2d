import torch
from torch import nn

from train.ema import Average


def model() -> tuple[nn.Sequential, nn.Conv2d, nn.BatchNorm2d]:
    """A model, and its layers 0 and 1."""
    torch.manual_seed(0)
    convolution, norm = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)
    return nn.Sequential(convolution, norm), convolution, norm


def test_average_is_the_weighted_sum_of_all_weights_so_far() -> None:
    module, convolution, _ = model()
    average = Average(module, 0.75)
    expected = convolution.weight.detach().clone()
    for step in range(3):
        with torch.no_grad():
            convolution.weight.fill_(step)
        average.update(module)
        expected = 0.75 * expected + 0.25 * step
    assert torch.allclose(average.values["0.weight"], expected)


def test_counters_are_copied_and_statistics_averaged() -> None:
    module, _, norm = model()
    module.train()
    average = Average(module, 0.5)
    module(torch.randn(4, 3, 2, 2))
    average.update(module)
    assert average.values["1.num_batches_tracked"] == 1
    assert norm.running_var is not None
    assert torch.allclose(average.values["1.running_var"], (1 + norm.running_var) / 2)


def test_own_weights_return_even_after_an_error() -> None:
    module, convolution, _ = model()
    average = Average(module, 0.5)
    with torch.no_grad():
        convolution.weight.fill_(7)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    try:
        with average.applied_to(module):
            assert torch.equal(convolution.weight, average.values["0.weight"])
            raise KeyError
    except KeyError:
        pass
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())

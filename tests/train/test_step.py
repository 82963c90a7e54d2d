import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.train.conftest import MakeConfig
from tests.train.stepping import SILENT, Linear, data_for, trainer_for
from train import step as steps
from train.checkpoint import Progress
from train.health import DivergedError


@pytest.mark.parametrize("accumulate", [1, 2, 4, 8])
def test_accumulated_gradient_is_that_of_the_whole_window(
    make_config: MakeConfig, tmp_path: Path, pictures: tuple[torch.Tensor, torch.Tensor], accumulate: int
) -> None:
    """Case B09: 7 samples, the last micro-batch smaller; each sample weighs the same."""
    images, labels = pictures
    config = make_config(tmp_path, training__batch_size="8", training__accumulate=str(accumulate))
    module = Linear()
    trainer = trainer_for(config, tmp_path, module, samples=7, precision="32-true")
    reference = Linear()
    expected = nn.functional.cross_entropy(reference(images), labels)
    torch.autograd.backward(expected)
    window = next(trainer.order.windows(0))
    loss, _, _ = steps.accumulate_gradients(
        trainer, window, iter(data_for(trainer.order, accumulate, images, labels))
    )
    assert loss == pytest.approx(expected.item(), abs=1e-6)
    assert torch.allclose(module.linear.weight.grad, reference.linear.weight.grad, atol=1e-6)  # type: ignore[arg-type]


@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
@pytest.mark.parametrize("accumulate", [1, 2, 4])
def test_gradient_is_the_mean_over_good_samples(
    make_config: MakeConfig,
    tmp_path: Path,
    pictures: tuple[torch.Tensor, torch.Tensor],
    accumulate: int,
    precision: str,
) -> None:
    """Case A07: as if the window had never held the bad ones. With 4 micro-batches, one is bad as a whole."""
    images, labels = pictures
    config = make_config(tmp_path, training__batch_size="8", training__accumulate=str(accumulate))
    module, reference = Linear(), Linear()
    trainer = trainer_for(config, tmp_path, module, samples=7, precision=precision)
    batches = data_for(trainer.order, accumulate, images, labels)[:accumulate]
    good = [1.0, 1.0, 0.0, 0.0, 1.0, 1.0, 1.0]
    weights = torch.split(torch.tensor(good), [len(batch.labels) for batch in batches])
    batches = [replace(batch, weights=own) for batch, own in zip(batches, weights, strict=True)]
    indices = torch.tensor(next(trainer.order.windows(0)).indices)[torch.cat(weights) > 0]
    expected = nn.functional.cross_entropy(reference(images[indices]), labels[indices])
    torch.autograd.backward(expected)
    loss, bad, _ = steps.accumulate_gradients(trainer, next(trainer.order.windows(0)), iter(batches))
    scaler = getattr(trainer.machine.precision, "scaler", None)
    gradient = module.linear.weight.grad / (scaler.get_scale() if scaler else 1)  # type: ignore[operator]
    assert bad == 2
    assert loss == pytest.approx(expected.item(), abs=2e-3 if scaler else 1e-6)
    assert torch.allclose(gradient, reference.linear.weight.grad, atol=2e-3 if scaler else 1e-6)  # type: ignore[arg-type]


@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
def test_window_without_a_good_sample_moves_nothing_but_the_cursor(
    make_config: MakeConfig, tmp_path: Path, pictures: tuple[torch.Tensor, torch.Tensor], precision: str
) -> None:
    """Not even by weight decay and momentum; and the next window is trained on as usual."""
    images, labels = pictures
    config = make_config(tmp_path, training__batch_size="8")
    module = Linear()
    trainer = trainer_for(config, tmp_path, module, samples=7, precision=precision)
    before = module.linear.weight.detach().clone()
    first, second, *_ = data_for(trainer.order, 1, images, labels)
    batches = iter([replace(first, weights=torch.zeros(7)), second])
    windows = trainer.order.windows(0)
    steps.step(trainer, next(windows), batches, SILENT)
    progress = trainer.progress
    assert (progress.step, progress.cursor, progress.skipped, progress.bad_samples) == (0, 7, 1, 7)
    assert torch.equal(module.linear.weight, before)
    steps.step(trainer, next(windows), batches, SILENT)
    assert (trainer.progress.step, trainer.progress.cursor, trainer.progress.bad_samples) == (1, 14, 7)
    assert not torch.equal(module.linear.weight, before)


@pytest.mark.parametrize("scale", [1.0, 1024.0, 65536.0])
@pytest.mark.parametrize("accumulate", [1, 4])
def test_gradient_is_clipped_after_unscaling(
    make_config: MakeConfig,
    tmp_path: Path,
    pictures: tuple[torch.Tensor, torch.Tensor],
    scale: float,
    accumulate: int,
) -> None:
    """Case B10: the step of SGD with rate 1 is as long as the clipping allows, whatever the loss scale."""
    images, labels = pictures
    config = make_config(
        tmp_path,
        training__batch_size="8",
        training__accumulate=str(accumulate),
        optimizer__clip_norm="0.01",
        optimizer__lr="1.0",
        optimizer__warmup="0",
    )
    module = Linear()
    trainer = trainer_for(config, tmp_path, module, samples=7, precision="16-mixed")
    trainer.machine.precision.scaler = torch.amp.GradScaler("cpu", init_scale=scale)  # type: ignore[attr-defined]
    before = torch.cat([parameter.detach().flatten() for parameter in module.parameters()]).clone()
    batches = iter(data_for(trainer.order, accumulate, images, labels))
    steps.step(trainer, next(trainer.order.windows(0)), batches, SILENT)
    after = torch.cat([parameter.detach().flatten() for parameter in module.parameters()])
    assert float((after - before).norm()) == pytest.approx(0.01, rel=1e-2)


def test_overflow_moves_nothing_but_the_cursor(
    make_config: MakeConfig, tmp_path: Path, pictures: tuple[torch.Tensor, torch.Tensor]
) -> None:
    images, labels = pictures
    config = make_config(tmp_path, training__batch_size="8")
    module = Linear()
    trainer = trainer_for(config, tmp_path, module, samples=7, precision="16-mixed")
    trainer.machine.precision.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)  # type: ignore[attr-defined]
    before = module.linear.weight.detach().clone()
    batches = iter(data_for(trainer.order, 1, images, labels))
    steps.step(trainer, next(trainer.order.windows(0)), batches, SILENT)
    progress = trainer.progress
    assert (progress.step, progress.cursor, progress.skipped) == (0, 7, 1)
    assert progress.loss_scale["scale"] == 2.0**39
    assert torch.equal(module.linear.weight, before)


def test_diverging_run_stops_with_advice(
    make_config: MakeConfig, tmp_path: Path, pictures: tuple[torch.Tensor, torch.Tensor]
) -> None:
    images, labels = pictures
    config = make_config(tmp_path, training__batch_size="8")
    module = Linear()
    trainer = trainer_for(config, tmp_path, module, samples=7, precision="32-true")
    with torch.no_grad():
        module.linear.weight.fill_(math.inf)
    batches = iter(data_for(trainer.order, 1, images, labels))
    with pytest.raises(DivergedError, match=r"Lower optimizer\.lr"):
        steps.step(trainer, next(trainer.order.windows(0)), batches, SILENT)
    assert trainer.progress == Progress()


def test_dropout_is_a_function_of_the_position_in_training() -> None:
    steps.seed_step(0, 8, 0)
    first = torch.rand(4)
    steps.seed_step(0, 16, 0)
    assert not torch.equal(first, torch.rand(4))
    steps.seed_step(0, 8, 1)
    assert not torch.equal(first, torch.rand(4))
    steps.seed_step(0, 8, 0)
    assert torch.equal(first, torch.rand(4))


def test_gradient_that_overflows_at_every_scale_ends_training(
    make_config: MakeConfig,
    tmp_path: Path,
    pictures: tuple[torch.Tensor, torch.Tensor],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is said each time, and not for ever."""
    images, labels = pictures
    config = make_config(tmp_path, training__batch_size="8")
    module = Linear()
    trainer = trainer_for(config, tmp_path, module, samples=7, precision="16-mixed")
    trainer.machine.precision.scaler = torch.amp.GradScaler("cpu", init_scale=2.0)  # type: ignore[attr-defined]
    module.linear.weight.register_hook(lambda gradient: gradient * math.inf)  # type: ignore[no-untyped-call]
    batches = iter(data_for(trainer.order, 1, images, labels))
    windows = trainer.order.windows(0)
    caplog.set_level("INFO")
    steps.step(trainer, next(windows), batches, SILENT)
    assert "the gradient overflowed; the loss scale is 1 now" in caplog.text
    with pytest.raises(DivergedError, match=r"at every loss scale down to 0\.5"):
        steps.step(trainer, next(windows), batches, SILENT)

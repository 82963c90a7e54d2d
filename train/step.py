"""One optimiser step, or, where that is not to be, none at all; decided by all ranks together."""

import logging
import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from slipway import hashing
from train import health, layers
from train.dataset import DataError
from train.health import BadStep, DivergedError
from train.loader import Batch
from train.mixing import mix
from train.optimizer import learning_rate, set_learning_rate
from train.order import Window
from train.runs import append_metrics
from train.trainer import Outputs, Trainer

logger = logging.getLogger(__name__)


class RolledBackError(Exception):
    """A bad step was written down; training is to go on from the last checkpoint."""


def step(trainer: Trainer, window: Window, batches: Iterator[Batch], outputs: Outputs) -> bool:
    """One optimiser step over one window of samples, or, where that is not to be, none at all.

    Returns whether any rank was asked to stop.
    """
    config, progress = trainer.config, trainer.progress
    if window.end in trainer.order.avoided:
        _pass_over(trainer, window, [])
        return False
    seed_step(config.training.seed, window.end, trainer.machine.fabric.global_rank)
    rate = learning_rate(progress.step, trainer.order.steps, config.optimizer)
    set_learning_rate(trainer.optimizer, rate)
    statistics = _batch_statistics(trainer)
    loss, bad, stopping = accumulate_gradients(trainer, window, batches)
    trainer.progress = progress = replace(progress, bad_samples=progress.bad_samples + bad)
    if bad == len(window.indices):  # nothing to learn from
        trainer.optimizer.zero_grad()
        _pass_over(trainer, window, statistics)
        return stopping
    norm = _clip(trainer)
    norms = _look_at_layers(trainer)
    # All these numbers are the same on every rank, so all decide alike.
    problem = health.problem_with(
        loss, norm, progress.loss_average, config.training, scaled=trainer.machine.scaler is not None
    )
    if problem:
        _answer(trainer, window, problem, statistics)
        return stopping
    trainer.optimizer.step()
    trainer.optimizer.zero_grad()
    trainer.progress = replace(progress, loss_scale=trainer.machine.precision.state_dict())
    if not math.isfinite(norm):
        _say_overflow(trainer)
        _pass_over(trainer, window, statistics)
        return stopping
    trainer.progress = replace(
        trainer.progress,
        step=progress.step + 1,
        cursor=window.end,
        loss_average=health.averaged(progress.loss_average, loss, progress.step),
    )
    if trainer.ema:
        trainer.ema.update(trainer.module)
    _log_layers(trainer, outputs, norms)
    _show_step(trainer, window, outputs, {"loss": loss, "lr": rate, "gradient_norm": norm})
    return stopping


def _answer(trainer: Trainer, window: Window, problem: str, statistics: list[torch.Tensor]) -> None:
    """Write a bad step down, and do about it what `training.on_bad_loss` says: on all ranks alike.

    Raises DivergedError, or RolledBackError.
    """
    progress, answer = trainer.progress, trainer.config.training.on_bad_loss
    trainer.optimizer.zero_grad()
    bad = BadStep(
        step=progress.step,
        epoch=window.epoch,
        cursor=window.end,
        reason=problem,
        answer=answer,
        files=tuple(trainer.dataset.splits["train"][index].file for index in window.indices),
    )
    if trainer.machine.is_first:
        health.record(trainer.run, bad)
        logger.warning("WARNING: step %d, epoch %d: %s; %s", bad.step, bad.epoch, problem, answer)
    machine = trainer.machine
    times = machine.decide(lambda: len(health.bad_steps(trainer.run)))
    if answer == "stop" or times > health.MOST_BAD_STEPS:
        often = f" It is the {times}th bad step of this run." if times > 1 else ""
        raise DivergedError(
            f"step {bad.step}, epoch {bad.epoch}: {problem}.{often} Lower optimizer.lr "
            f"({trainer.config.optimizer.lr:g}) or set optimizer.clip_norm, or see training.on_bad_loss; checkpoints "
            f"are intact, and {health.BAD_STEPS} names the samples"
        )
    if machine.scaler:
        machine.scaler.update()  # it was asked to unscale, and waits to hear how that went
        trainer.progress = replace(progress, loss_scale=machine.precision.state_dict())
    if answer == "rollback":
        raise RolledBackError
    _pass_over(trainer, window, statistics)


def _say_overflow(trainer: Trainer) -> None:
    """Raises DivergedError where no loss scale is small enough."""
    scale = trainer.progress.loss_scale["scale"]
    if scale < health.LEAST_LOSS_SCALE:
        raise DivergedError(
            f"step {trainer.progress.step}: the gradient overflows at every loss scale down to {scale:g}. Lower "
            f"optimizer.lr ({trainer.config.optimizer.lr:g}), or train in bf16-mixed or 32-true; checkpoints are intact"
        )
    if trainer.machine.is_first:
        logger.info(
            "step %d: the gradient overflowed; the loss scale is %g now", trainer.progress.step, scale
        )


def _pass_over(trainer: Trainer, window: Window, statistics: list[torch.Tensor]) -> None:
    """Nothing but the position in the data moves; batch statistics that a forward has moved are put back."""
    for buffer, before in zip(trainer.module.buffers(), statistics, strict=False):
        buffer.copy_(before)
    progress = trainer.progress
    trainer.progress = replace(progress, cursor=window.end, skipped=progress.skipped + 1)


def _batch_statistics(trainer: Trainer) -> list[torch.Tensor]:
    """A copy of all buffers, where a step may turn out not to be taken: its forward has moved them by then."""
    config = trainer.config
    may_skip = "skip" in (config.training.on_bad_loss, config.data.on_bad_sample)
    if not may_skip and trainer.machine.scaler is None:
        return []
    return [buffer.clone() for buffer in trainer.module.buffers()]


def accumulate_gradients(
    trainer: Trainer, window: Window, batches: Iterator[Batch]
) -> tuple[float, int, bool]:
    """Leave the gradient of the mean loss over the window's good samples in the model.

    Returns that loss, how many samples were bad, and whether any rank was asked to stop; all the same on every rank.
    Raises DataError on every rank where one of them has an image that must not be skipped.
    """
    config, fabric = trainer.config, trainer.machine.fabric
    micro_batches = trainer.order.micro_batches(
        window, config.training.accumulate, fabric.global_rank, fabric.world_size
    )
    samples, failure = len(window.indices), ""
    total = torch.zeros(4, device=fabric.device)
    for number in range(len(micro_batches)):
        batch = next(batches).to(fabric.device, channels_last=config.hardware.channels_last)
        # Around every backward, also the last: Fabric leaves FSDP2's synchronisation off otherwise.
        with fabric.no_backward_sync(trainer.model, enabled=number < len(micro_batches) - 1):
            position = [config.training.seed, window.end, fabric.global_rank, number]
            mixed = mix(batch, config.augment, np.random.default_rng(position))
            losses = mixed.losses(trainer.model(mixed.images), config.training.label_smoothing)
            # Divided by the samples of the whole window, so that a small last micro-batch or rank weighs what
            # it holds. Strategies average over ranks: multiplying by their number turns that into the sum.
            loss = (losses * batch.weights).sum() / samples
            fabric.backward(loss * fabric.world_size)
        total[0] += loss.detach()
        total[1] += batch.weights.sum()
        failure = failure or batch.failure
    # What else ranks have to agree on travels with the loss: it costs no message.
    total[2] = trainer.stop.received is not None
    total[3] = failure != ""
    loss_sum, good, wishes, failures = trainer.machine.total(total).tolist()
    if failures:
        raise DataError(trainer.machine.first_of(failure))
    bad = samples - round(good)
    if 0 < bad < samples:  # how many would be bad was known to no rank before
        _scale_gradients(trainer.module, samples / good)
        loss_sum *= samples / good
    return loss_sum, bad, wishes > 0


def _scale_gradients(module: nn.Module, factor: float) -> None:
    for parameter in module.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(factor)


def _clip(trainer: Trainer) -> float:
    """Clip the gradient, unscaled first; returns its norm before, over all ranks."""
    # error_if_nonfinite would raise on the overflow that a GradScaler is there to skip.
    norm = trainer.machine.fabric.clip_gradients(
        trainer.model,
        trainer.optimizer,
        max_norm=trainer.config.optimizer.clip_norm or math.inf,
        error_if_nonfinite=False,
    )
    assert norm is not None
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


def seed_step(seed: int, cursor: int, rank: int) -> None:
    """Make dropout and its kind a function of the position in training, as the data order is."""
    draw = int(hashing.of_bytes(f"{seed}:{cursor}:{rank}".encode())[:15], 16)
    # torch.manual_seed would do the same and costs 190 microseconds; these cost one.
    torch.default_generator.manual_seed(draw)
    if torch.cuda.is_available():
        torch.cuda.default_generators[torch.cuda.current_device()].manual_seed(draw)


def _show_step(trainer: Trainer, window: Window, outputs: Outputs, figures: dict[str, float]) -> None:
    progress, training, meter = trainer.progress, trainer.config.training, trainer.meter
    meter.count(len(window.indices))
    outputs.show.step(progress.step, figures["loss"], figures["lr"], meter)
    if is_due(progress.step, training.log_every):
        line = {"kind": "train", "step": progress.step, "epoch": window.epoch, "samples": progress.cursor}
        figures = {**figures, **meter.read()}
        if outputs.board:
            append_metrics(trainer.run, {**line, **figures})
            outputs.board.log({f"train/{name}": value for name, value in figures.items()}, progress.step)
        if outputs.exposition:
            outputs.exposition.update(progress.step, progress.cursor, figures)
    if outputs.profiler:
        outputs.profiler.step()


def _look_at_layers(trainer: Trainer) -> dict[str, float]:
    """Feel the gradient that the next step takes; norms by layer where they are to be logged. All ranks take part."""
    if trainer.pulse is None:
        return {}
    trainer.pulse.observe()
    due = is_due(trainer.progress.step + 1, trainer.config.training.log_layers_every)
    return layers.layer_norms(trainer.module) if due else {}


def _log_layers(trainer: Trainer, outputs: Outputs, norms: dict[str, float]) -> None:
    if trainer.pulse is None or not norms:
        return
    dead = trainer.pulse.take_dead(trainer.machine)
    if outputs.board is None:
        return
    step, cursor = trainer.progress.step, trainer.progress.cursor
    append_metrics(trainer.run, {"kind": "layers", "step": step, "samples": cursor, "gradient_norms": norms})
    outputs.board.log({f"gradient_norm/{name}": norm for name, norm in norms.items()}, step)
    for sentence in filter(None, (dead, layers.exploding(norms))):
        logger.warning("WARNING: step %d: %s", step, sentence)


def is_due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0

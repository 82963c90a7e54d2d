"""Training: one loop, top to bottom.

The loop holds no hidden state. What it needs to continue is the model, its moving average, the optimiser, the loss
scale and two integers; the order of samples, augmentation, dropout and the learning rate are functions of these.
"""

import logging
import math
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.tensorboard import SummaryWriter

from slipway import hashing, sealed
from slipway.contract import Signature
from train import checkpoint, execution, health, warm_start
from train.checkpoint import Progress, Weights
from train.config import Config
from train.dataset import Dataset
from train.display import Display, display
from train.ema import Average
from train.evaluate import score
from train.hardware import Machine, launch
from train.health import BadStep, DivergedError
from train.instruments import instruments
from train.loader import (
    Batch,
    PlainSamples,
    TrainingSamples,
    plain_batches,
    training_batches,
    warn_of_little_shared_memory,
    worker_deaths_in_words,
)
from train.meter import Meter
from train.mixing import mix
from train.model import build_model
from train.optimizer import build_optimizer, learning_rate, set_learning_rate
from train.order import Order, Window
from train.parameters import freeze
from train.preemption import Preempted, StopRequest, stop_requests
from train.runs import (
    Run,
    append_metrics,
    describe,
    epochs_without_gain,
    forget_metrics_after,
    read_metrics,
    run_for,
)

logger = logging.getLogger(__name__)


class _RolledBackError(Exception):
    """A bad step was written down; training is to go on from the last checkpoint."""


@dataclass(kw_only=True)
class Trainer:
    """Everything one rank works with. `module` is the plain model, `model` the one wrapped for its strategy."""

    config: Config
    run: Run
    folder: Dataset
    machine: Machine
    signature: Signature
    order: Order
    module: nn.Module
    model: Any
    optimizer: Any
    ema: Average | None
    progress: Progress
    stop: StopRequest
    meter: Meter


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """Where progress is shown and logged. `board` and `profiler` are there on the first rank only."""

    show: Display
    board: SummaryWriter | None
    profiler: torch.profiler.profile | None = None


def fit(config: Config, folder: Dataset) -> Path:
    """Train, or continue, or find finished, the run that `config` and `folder` determine; returns its directory.

    Raises:
        Preempted: SIGTERM or SIGUSR1 came; the state was saved, and the next call continues there.
        DivergedError: the loss went bad, and `training.on_bad_loss` is stop, or it did so too often.
        SealError: a checkpoint could not be written.
        DataError: an image cannot be decoded; the message names it.
    """
    run = run_for(config, folder)
    machine = launch(config.hardware, config.training)
    with ExitStack() as stack:
        if machine.is_first:
            stack.enter_context(sealed.only_one(run.directory, f"run {run.directory.name}"))
        machine.fabric.barrier()
        stop = stack.enter_context(stop_requests())
        newest = machine.decide(checkpoint.newest(run) if machine.is_first else None)
        trainer = _prepare(config, run, folder, machine, stop, is_new=newest is None)
        if newest:
            _restore(trainer, newest)
        if _is_finished(trainer):
            logger.info("trained already: %s", run.directory)
        else:
            with worker_deaths_in_words():
                _train(trainer)
        _say_what_was_skipped(trainer)
    machine.leave()
    return run.directory


def _prepare(
    config: Config, run: Run, folder: Dataset, machine: Machine, stop: StopRequest, *, is_new: bool
) -> Trainer:
    torch.manual_seed(config.training.seed)
    signature = checkpoint.signature_for(config, folder)
    module = build_model(config.model, len(folder.classes), signature.mean, signature.std)
    if is_new:
        warm_start.start(module, config.model)
    freeze(module, config.optimizer.freeze)
    execution.prepare(module, config.hardware)
    model = machine.fabric.setup_module(module)
    # After the module, because sharding replaces its parameters.
    optimizer = machine.fabric.setup_optimizers(build_optimizer(module, config.optimizer))
    return Trainer(
        config=config,
        run=run,
        folder=folder,
        machine=machine,
        signature=signature,
        order=Order(
            samples=len(folder.splits["train"]),
            batch_size=config.training.batch_size,
            epochs=config.training.epochs,
            seed=config.training.seed,
            fingerprint=folder.fingerprint,
            avoided=machine.decide(health.avoided(run)),
        ),
        module=module,
        model=model,
        optimizer=optimizer,
        ema=None if config.training.ema is None else Average(module, config.training.ema),
        progress=Progress(precision=machine.precision.precision),
        stop=stop,
        meter=Meter(machine.device),
    )


def _restore(trainer: Trainer, directory: Path) -> None:
    average = trainer.ema.values if trainer.ema else None
    plain_optimizer = trainer.optimizer.optimizer
    stored = checkpoint.restore(directory, trainer.machine, trainer.module, plain_optimizer, average)
    if stored.precision != trainer.progress.precision and trainer.machine.is_first:
        logger.warning(
            "WARNING: trained in %s so far, goes on in %s: training.precision is auto, and this is another device",
            stored.precision,
            trainer.progress.precision,
        )
    trainer.progress = replace(stored, precision=trainer.progress.precision)
    if trainer.progress.loss_scale:
        trainer.machine.precision.load_state_dict(trainer.progress.loss_scale)


def _train(trainer: Trainer) -> None:
    with ExitStack() as stack:
        outputs = _open_outputs(trainer, stack)
        if _at_epoch_end(trainer):
            _validate(trainer, outputs)  # what was not scored before training stopped, if anything
        while not _is_finished(trainer):
            try:
                _work_off(trainer, outputs)
            except _RolledBackError:
                _roll_back(trainer)


def _work_off(trainer: Trainer, outputs: Outputs) -> None:
    """Every window from where training stands to its end."""
    batches = trainer.meter.timed(_batches(trainer))
    for window in trainer.order.windows(trainer.progress.cursor):
        stopping = _step(trainer, window, batches, outputs)
        at_end = _at_epoch_end(trainer)
        if at_end or stopping or _is_due(trainer.progress.step, trainer.config.training.checkpoint_every):
            _save(trainer)
        if stopping:
            raise _stopped(trainer)
        if at_end:
            _validate(trainer, outputs)
            trainer.meter.end_epoch()
            if _is_finished(trainer):
                return


def _open_outputs(trainer: Trainer, stack: ExitStack) -> Outputs:
    """Describe the run, forget what was logged behind the checkpoint it continues from, and open its displays."""
    machine, run, config = trainer.machine, trainer.run, trainer.config
    show = stack.enter_context(display(trainer.order.steps, config.training.epochs, speaks=machine.is_first))
    if not machine.is_first:
        return Outputs(show=show, board=None)
    describe(run, config, trainer.folder, machine)
    forget_metrics_after(run, trainer.progress.cursor)
    if trainer.progress.step:
        logger.info("continuing %s at step %d", run.directory.name, trainer.progress.step)
    board = SummaryWriter(str(run.directory / "tensorboard"))
    stack.callback(board.close)
    profiler = stack.enter_context(instruments(config.debug, run))
    return Outputs(show=show, board=board, profiler=profiler)


def _step(trainer: Trainer, window: Window, batches: Iterator[Batch], outputs: Outputs) -> bool:
    """One optimiser step over one window of samples, or, where that is not to be, none at all.

    Returns whether any rank was asked to stop.
    """
    config, progress = trainer.config, trainer.progress
    if window.end in trainer.order.avoided:
        _pass_over(trainer, window)
        return False
    _seed_step(config.training.seed, window.end, trainer.machine.fabric.global_rank)
    rate = learning_rate(progress.step, trainer.order.steps, config.optimizer)
    set_learning_rate(trainer.optimizer, rate)
    statistics = _batch_statistics(trainer)
    loss, bad, stopping = _accumulate_gradients(trainer, window, batches)
    trainer.progress = progress = replace(progress, bad_samples=progress.bad_samples + bad)
    if bad == len(window.indices):  # nothing to learn from
        trainer.optimizer.zero_grad()
        _pass_over(trainer, window)
        return stopping
    norm = _clip(trainer)
    layers = _layer_norms(trainer)
    scaler = getattr(trainer.machine.precision, "scaler", None)
    # All these numbers are the same on every rank, so all decide alike.
    problem = health.problem_with(
        loss, norm, progress.loss_average, config.training, scaled=scaler is not None
    )
    if problem:
        _answer(trainer, window, problem, statistics)
        return stopping
    trainer.optimizer.step()
    trainer.optimizer.zero_grad()
    loss_scale = trainer.machine.precision.state_dict() if scaler else {}
    trainer.progress = replace(progress, cursor=window.end, loss_scale=loss_scale)
    if not math.isfinite(norm):
        trainer.progress = replace(trainer.progress, skipped=progress.skipped + 1)
        return stopping
    average = health.averaged(progress.loss_average, loss, progress.step)
    trainer.progress = replace(trainer.progress, step=progress.step + 1, loss_average=average)
    if trainer.ema:
        trainer.ema.update(trainer.module)
    _log_layers(trainer, outputs, layers)
    _show_step(trainer, window, outputs, {"loss": loss, "lr": rate, "gradient_norm": norm})
    return stopping


def _answer(trainer: Trainer, window: Window, problem: str, statistics: list[torch.Tensor]) -> None:
    """Write a bad step down, and do about it what `training.on_bad_loss` says: on all ranks alike.

    Raises DivergedError, or _RolledBackError.
    """
    progress, answer = trainer.progress, trainer.config.training.on_bad_loss
    trainer.optimizer.zero_grad()
    bad = BadStep(
        step=progress.step,
        epoch=window.epoch,
        cursor=window.end,
        reason=problem,
        answer=answer,
        files=tuple(trainer.folder.splits["train"][index].file for index in window.indices),
    )
    if trainer.machine.is_first:
        health.record(trainer.run, bad)
        logger.warning("WARNING: step %d, epoch %d: %s; %s", bad.step, bad.epoch, problem, answer)
    times = trainer.machine.decide(len(health.bad_steps(trainer.run)))
    if answer == "stop" or times > health.MOST_BAD_STEPS:
        raise DivergedError(
            f"step {bad.step}, epoch {bad.epoch}: {problem}. Lower optimizer.lr "
            f"({trainer.config.optimizer.lr:g}) or set optimizer.clip_norm, or see training.on_bad_loss; checkpoints "
            f"are intact, and bad_steps.jsonl names the samples"
        )
    if answer == "rollback":
        raise _RolledBackError
    scaler = getattr(trainer.machine.precision, "scaler", None)
    if scaler:
        scaler.update()  # it was asked to unscale, and waits to hear how that went
        trainer.progress = replace(progress, loss_scale=trainer.machine.precision.state_dict())
    for buffer, before in zip(trainer.module.buffers(), statistics, strict=True):
        buffer.copy_(before)
    _pass_over(trainer, window)


def _pass_over(trainer: Trainer, window: Window) -> None:
    """Nothing but the position in the data moves."""
    progress = trainer.progress
    trainer.progress = replace(progress, cursor=window.end, skipped=progress.skipped + 1)


def _roll_back(trainer: Trainer) -> None:
    """Return to the last checkpoint, and from there pass over what led away from it."""
    machine, run = trainer.machine, trainer.run
    directory = machine.decide(checkpoint.newest(run) if machine.is_first else None)
    if directory is None:
        raise DivergedError(
            "training.on_bad_loss is rollback, but there is no checkpoint yet; set training.checkpoint_every"
        )
    _restore(trainer, directory)
    trainer.order = replace(trainer.order, avoided=machine.decide(health.avoided(run)))
    if machine.is_first:
        forget_metrics_after(run, trainer.progress.cursor)
        logger.info("back at step %d", trainer.progress.step)


def _batch_statistics(trainer: Trainer) -> list[torch.Tensor]:
    """A copy of all buffers, if a bad step is to leave no trace in them: its forward has moved them already."""
    if trainer.config.training.on_bad_loss != "skip":
        return []
    return [buffer.clone() for buffer in trainer.module.buffers()]


def _accumulate_gradients(
    trainer: Trainer, window: Window, batches: Iterator[Batch]
) -> tuple[float, int, bool]:
    """Leave the gradient of the mean loss over the window's good samples in the model.

    Returns that loss, how many samples were bad, and whether any rank was asked to stop; all the same on every rank.
    """
    config, fabric = trainer.config, trainer.machine.fabric
    micro_batches = trainer.order.micro_batches(
        window, config.training.accumulate, fabric.global_rank, fabric.world_size
    )
    samples = len(window.indices)
    total = torch.zeros(3, device=fabric.device)
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
    # The wish to stop and the number of good samples travel with the loss: agreeing on them costs no message.
    total[2] = trainer.stop.received is not None
    loss_sum, good, wishes = trainer.machine.total(total).tolist()
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


def _seed_step(seed: int, cursor: int, rank: int) -> None:
    """Make dropout and its kind a function of the position in training, as the data order is."""
    draw = int(hashing.of_bytes(f"{seed}:{cursor}:{rank}".encode())[:15], 16)
    # torch.manual_seed would do the same and costs 190 microseconds; these cost one.
    torch.default_generator.manual_seed(draw)
    if torch.cuda.is_available():
        torch.cuda.default_generators[torch.cuda.current_device()].manual_seed(draw)


def _batches(trainer: Trainer) -> Iterator[Batch]:
    config, fabric = trainer.config, trainer.machine.fabric
    micro_batch = config.training.batch_size // config.training.accumulate // fabric.world_size
    warn_of_little_shared_memory(config.image.size, micro_batch, config.data.workers)
    samples = TrainingSamples(
        trainer.folder,
        trainer.signature.preprocessing,
        config.augment,
        config.training.seed,
        config.data.on_bad_sample,
    )
    return training_batches(
        samples,
        trainer.order,
        cursor=trainer.progress.cursor,
        accumulate=config.training.accumulate,
        rank=fabric.global_rank,
        world_size=fabric.world_size,
        workers=config.data.workers,
    )


def _save(trainer: Trainer) -> None:
    trainer.machine.share_buffers(trainer.module)
    average = trainer.ema.values if trainer.ema else None
    tensors = checkpoint.tensors_of(trainer.module, trainer.optimizer.optimizer, average)
    checkpoint.save(
        trainer.machine, trainer.run, trainer.config, trainer.signature, trainer.progress, tensors
    )


def _validate(trainer: Trainer, outputs: Outputs) -> None:
    """Score the weights and their average on the validation split. The checkpoint of this step is on disk already."""
    for weights in _unscored(trainer):
        with ExitStack() as stack:
            if weights == "ema":
                assert trainer.ema
                stack.enter_context(trainer.ema.applied_to(trainer.module))
            _validate_weights(trainer, outputs, weights)
    wish = torch.tensor(float(trainer.stop.received is not None), device=trainer.machine.device)
    if trainer.machine.total(wish).item():
        raise _stopped(trainer)


def _validate_weights(trainer: Trainer, outputs: Outputs, weights: Weights) -> None:
    fabric, progress = trainer.machine.fabric, trainer.progress
    trainer.machine.share_buffers(trainer.module)
    batches = plain_batches(
        PlainSamples(trainer.folder, "val", trainer.signature.preprocessing),
        trainer.config.training.batch_size,
        rank=fabric.global_rank,
        world_size=fabric.world_size,
        workers=trainer.config.data.workers,
    )
    with execution.eager():
        result = score(trainer.module, batches, trainer.machine)
    epoch = progress.cursor // trainer.order.samples - 1
    outputs.show.epoch(epoch, progress.step, weights, result)
    if outputs.board:
        line = {"kind": "evaluation", "step": progress.step, "epoch": epoch, "samples": progress.cursor}
        line |= {"checkpoint": progress.name, "split": "val", "weights": weights}
        append_metrics(trainer.run, {**line, "loss": result.loss, "accuracy": result.accuracy})
        outputs.board.add_scalar(f"val/loss/{weights}", result.loss, progress.step)
        outputs.board.add_scalar(f"val/accuracy/{weights}", result.accuracy, progress.step)


def _say_what_was_skipped(trainer: Trainer) -> None:
    bad, seen = trainer.progress.bad_samples, trainer.progress.cursor
    if bad and trainer.machine.is_first:
        logger.warning(
            "WARNING: %d of the %d samples that training drew could not be decoded and counted for nothing "
            "(data.on_bad_sample: skip); `make data` names them all",
            bad,
            seen,
        )


def _stopped(trainer: Trainer) -> Preempted:
    return Preempted(f"stopped at step {trainer.progress.step}; start again to continue there")


def _is_finished(trainer: Trainer) -> bool:
    """All epochs trained, or no gain for as long as training was to be patient; and the last weights scored."""
    patience = trainer.config.training.patience
    if not _at_epoch_end(trainer) or _unscored(trainer):
        return False
    waited = trainer.machine.decide(epochs_without_gain(trainer.run))
    return trainer.progress.cursor == trainer.order.end or (patience is not None and waited >= patience)


def _at_epoch_end(trainer: Trainer) -> bool:
    return trainer.progress.cursor > 0 and trainer.progress.cursor % trainer.order.samples == 0


def _unscored(trainer: Trainer) -> list[Weights]:
    """The weights of this step that have no score yet; the same on every rank.

    One of two may have one: training can be killed between them.
    """
    kinds: list[Weights] = ["raw", "ema"] if trainer.ema else ["raw"]
    scored = {
        line["weights"]
        for line in read_metrics(trainer.run)
        if line["kind"] == "evaluation" and line["samples"] == trainer.progress.cursor
    }
    return trainer.machine.decide([weights for weights in kinds if weights not in scored])


def _is_due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0


def _show_step(trainer: Trainer, window: Window, outputs: Outputs, figures: dict[str, float]) -> None:
    progress, training, meter = trainer.progress, trainer.config.training, trainer.meter
    meter.count(len(window.indices))
    outputs.show.step(progress.step, figures["loss"], figures["lr"], meter.images_per_second)
    if _is_due(progress.step, training.log_every):
        line = {"kind": "train", "step": progress.step, "epoch": window.epoch, "samples": progress.cursor}
        figures = {**figures, **meter.read()}
        if outputs.board:
            append_metrics(trainer.run, {**line, **figures})
            for name, value in figures.items():
                outputs.board.add_scalar(f"train/{name}", value, progress.step)
    if outputs.profiler:
        outputs.profiler.step()


def _layer_norms(trainer: Trainer) -> dict[str, float]:
    """Of the gradient that the next step takes, where they are to be logged; all ranks take part."""
    due = _is_due(trainer.progress.step + 1, trainer.config.training.log_layers_every)
    return health.layer_norms(trainer.module) if due else {}


def _log_layers(trainer: Trainer, outputs: Outputs, norms: dict[str, float]) -> None:
    if outputs.board is None or not norms:
        return
    step, cursor = trainer.progress.step, trainer.progress.cursor
    append_metrics(trainer.run, {"kind": "layers", "step": step, "samples": cursor, "gradient_norms": norms})
    for name, norm in norms.items():
        outputs.board.add_scalar(f"gradient_norm/{name}", norm, step)
    for sentence in health.ill_layers(norms):
        logger.warning("WARNING: step %d: %s", step, sentence)

"""Training: one loop, top to bottom.

The loop holds no hidden state. What it needs to continue is the model, the optimiser, the loss scale and two
integers; the order of samples, augmentation, dropout and the learning rate are functions of these.
"""

import logging
import math
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.tensorboard import SummaryWriter

from slipway import hashing, sealed
from slipway.contract import Signature
from slipway.errors import SlipwayError
from train import checkpoint
from train.checkpoint import Progress
from train.config import Config
from train.display import Display, display
from train.evaluate import Score, score
from train.folder import ImageFolder
from train.hardware import Machine, launch
from train.loader import Batch, PlainSamples, TrainingSamples, plain_batches, training_batches
from train.model import build_model
from train.optimizer import build_optimizer, learning_rate, set_learning_rate
from train.order import Order, Window
from train.runs import Run, append_metrics, describe, forget_metrics_after, read_metrics, run_for

logger = logging.getLogger(__name__)


class DivergedError(SlipwayError):
    """The loss or the gradient is not finite. Decided by all ranks together."""


@dataclass(kw_only=True)
class Trainer:
    """Everything one rank works with. `module` is the plain model, `model` the one wrapped for its strategy."""

    config: Config
    run: Run
    folder: ImageFolder
    machine: Machine
    signature: Signature
    order: Order
    module: nn.Module
    model: Any
    optimizer: Any
    progress: Progress


def fit(config: Config, folder: ImageFolder) -> Path:
    """Train, or continue, or find finished, the run that `config` and `folder` determine; returns its directory.

    Raises:
        DivergedError: the loss is no longer finite.
        SealError: a checkpoint could not be written.
        DataError: an image cannot be decoded; the message names it.
    """
    run = run_for(config, folder)
    machine = launch(config.hardware, config.training)
    with ExitStack() as stack:
        if machine.fabric.is_global_zero:
            stack.enter_context(sealed.only_one(run.directory, f"run {run.directory.name}"))
        machine.fabric.barrier()
        trainer = _prepare(config, run, folder, machine)
        if _is_finished(trainer):
            logger.info("trained already: %s", run.directory)
        else:
            _train(trainer)
    return run.directory


def _prepare(config: Config, run: Run, folder: ImageFolder, machine: Machine) -> Trainer:
    torch.manual_seed(config.training.seed)
    signature = checkpoint.signature_for(config, folder)
    module = build_model(config.model, len(folder.classes), signature.mean, signature.std)
    optimizer = build_optimizer(module, config.optimizer)
    model, wrapped = machine.fabric.setup(module, optimizer)
    trainer = Trainer(
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
        ),
        module=module,
        model=model,
        optimizer=wrapped,
        progress=Progress(),
    )
    if directory := checkpoint.newest(run):
        _restore(trainer, directory)
    return trainer


def _restore(trainer: Trainer, directory: Path) -> None:
    state = checkpoint.load_state(directory)
    trainer.module.load_state_dict(state["model"], strict=True)
    trainer.optimizer.load_state_dict(state["optimizer"])
    trainer.machine.precision.load_state_dict(state["precision"])
    trainer.progress = checkpoint.load_progress(directory)


def _is_finished(trainer: Trainer) -> bool:
    return trainer.progress.cursor == trainer.order.end and _is_validated(trainer)


def _train(trainer: Trainer) -> None:
    fabric, order, config = trainer.machine.fabric, trainer.order, trainer.config
    if fabric.is_global_zero:
        describe(trainer.run, config, trainer.folder, trainer.machine)
        forget_metrics_after(trainer.run, trainer.progress.step)
        if trainer.progress.step:
            logger.info("continuing %s at step %d", trainer.run.directory.name, trainer.progress.step)
    with ExitStack() as stack:
        show = stack.enter_context(display(order.steps, config.training.epochs, speaks=fabric.is_global_zero))
        board = SummaryWriter(str(trainer.run.directory / "tensorboard")) if fabric.is_global_zero else None
        if board:
            stack.callback(board.close)
        if _at_epoch_end(trainer) and not _is_validated(trainer):
            _validate(trainer, show, board)
        batches = _batches(trainer)
        for window in order.windows(trainer.progress.cursor):
            _step(trainer, window, batches, show, board)
            if _at_epoch_end(trainer):
                _save(trainer)
                _validate(trainer, show, board)
            elif (
                config.training.checkpoint_every
                and trainer.progress.step % config.training.checkpoint_every == 0
            ):
                _save(trainer)


def _step(
    trainer: Trainer, window: Window, batches: Iterator[Batch], show: Display, board: SummaryWriter | None
) -> None:
    """One optimiser step over one window of samples, or, on overflow, none at all."""
    config, fabric = trainer.config, trainer.machine.fabric
    started = time.perf_counter()
    _seed_step(config.training.seed, window.end, fabric.global_rank)
    rate = learning_rate(trainer.progress.step, trainer.order.steps, config.optimizer)
    set_learning_rate(trainer.optimizer, rate)
    loss = _accumulate_gradients(trainer, window, batches)
    # error_if_nonfinite would raise on the overflow that a GradScaler is there to skip.
    clipped = fabric.clip_gradients(
        trainer.model,
        trainer.optimizer,
        max_norm=config.optimizer.clip_norm or math.inf,
        error_if_nonfinite=False,
    )
    assert clipped is not None
    norm = clipped.item()
    scaled = getattr(trainer.machine.precision, "scaler", None) is not None
    # Both numbers are sums over all ranks, so every rank decides alike.
    if not math.isfinite(loss) or not (math.isfinite(norm) or scaled):
        raise DivergedError(
            f"step {trainer.progress.step}, epoch {window.epoch}: the loss is {loss} and the gradient norm {norm}. "
            f"Lower optimizer.lr ({config.optimizer.lr:g}) or set optimizer.clip_norm; checkpoints are intact"
        )
    trainer.optimizer.step()
    trainer.optimizer.zero_grad()
    progress = replace(trainer.progress, cursor=window.end)
    if not math.isfinite(norm):
        trainer.progress = replace(progress, skipped=progress.skipped + 1)
        return
    trainer.progress = replace(progress, step=progress.step + 1)
    images_per_second = len(window.indices) / (time.perf_counter() - started)
    show.step(trainer.progress.step, loss, rate, images_per_second)
    if board and trainer.progress.step % config.training.log_every == 0:
        _log(
            trainer,
            window,
            board,
            loss=loss,
            lr=rate,
            gradient_norm=norm,
            images_per_second=images_per_second,
        )


def _accumulate_gradients(trainer: Trainer, window: Window, batches: Iterator[Batch]) -> float:
    """Leave the gradient of the window's mean loss in the model; returns that loss, the same on every rank."""
    config, fabric = trainer.config, trainer.machine.fabric
    count = len(
        trainer.order.micro_batches(window, config.training.accumulate, fabric.global_rank, fabric.world_size)
    )
    total = torch.zeros((), device=fabric.device)
    for number in range(count):
        batch = next(batches).to(fabric.device)
        with fabric.no_backward_sync(trainer.model, enabled=number < count - 1):
            logits = trainer.model(batch.images)
            losses = cross_entropy(
                logits, batch.labels, reduction="none", label_smoothing=config.training.label_smoothing
            )
            # Divided by the samples of the whole window, so that a small last micro-batch or rank weighs what
            # it holds. DDP averages over ranks: multiplying by their number turns that into the sum.
            loss = (losses * batch.weights).sum() / len(window.indices)
            fabric.backward(loss * fabric.world_size)
        total += loss.detach()
    return trainer.machine.total(total).item()


def _seed_step(seed: int, cursor: int, rank: int) -> None:
    """Make dropout and its kind a function of the position in training, as the data order is."""
    draw = int(hashing.of_bytes(f"{seed}:{cursor}:{rank}".encode())[:15], 16)
    # torch.manual_seed would do the same and costs 190 microseconds; these cost one.
    torch.default_generator.manual_seed(draw)
    if torch.cuda.is_available():
        torch.cuda.default_generators[torch.cuda.current_device()].manual_seed(draw)


def _batches(trainer: Trainer) -> Iterator[Batch]:
    config, fabric = trainer.config, trainer.machine.fabric
    samples = TrainingSamples(
        trainer.folder, trainer.signature.preprocessing, config.augment, config.training.seed
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
    if trainer.machine.fabric.is_global_zero:
        state = {
            "model": trainer.module.state_dict(),
            "optimizer": trainer.optimizer.state_dict(),
            "precision": trainer.machine.precision.state_dict(),
        }
        checkpoint.save(trainer.run, trainer.config, trainer.signature, trainer.progress, state)
    trainer.machine.fabric.barrier()


def _validate(trainer: Trainer, show: Display, board: SummaryWriter | None) -> Score:
    fabric, progress = trainer.machine.fabric, trainer.progress
    samples = PlainSamples(trainer.folder, "val", trainer.signature.preprocessing)
    batches = plain_batches(
        samples,
        trainer.config.training.batch_size,
        rank=fabric.global_rank,
        world_size=fabric.world_size,
        workers=trainer.config.data.workers,
    )
    result = score(trainer.module, batches, trainer.machine)
    epoch = progress.cursor // trainer.order.samples - 1
    show.epoch(epoch, progress.step, result)
    if board:
        line = {"kind": "evaluation", "step": progress.step, "epoch": epoch, "split": "val"}
        append_metrics(trainer.run, {**line, "loss": result.loss, "accuracy": result.accuracy})
        board.add_scalar("val/loss", result.loss, progress.step)
        board.add_scalar("val/accuracy", result.accuracy, progress.step)
    return result


def _at_epoch_end(trainer: Trainer) -> bool:
    return trainer.progress.cursor > 0 and trainer.progress.cursor % trainer.order.samples == 0


def _is_validated(trainer: Trainer) -> bool:
    lines = read_metrics(trainer.run)
    return any(line["kind"] == "evaluation" and line["step"] == trainer.progress.step for line in lines)


def _log(trainer: Trainer, window: Window, board: SummaryWriter, **figures: float) -> None:
    progress = trainer.progress
    line = {"kind": "train", "step": progress.step, "epoch": window.epoch, "samples": progress.cursor}
    append_metrics(trainer.run, {**line, **figures})
    for name, value in figures.items():
        board.add_scalar(f"train/{name}", value, progress.step)

"""Training: one loop, top to bottom.

The loop holds no hidden state. What it needs to continue is the model, its moving average, the optimiser, the loss
scale and two integers; the order of samples, augmentation, dropout and the learning rate are functions of these.
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
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy
from torch.utils.tensorboard import SummaryWriter

from slipway import hashing, sealed
from slipway.contract import Signature
from slipway.errors import SlipwayError
from train import checkpoint
from train.checkpoint import Progress, Weights
from train.config import Config
from train.dataset import Dataset
from train.display import Display, display
from train.ema import Average
from train.evaluate import score
from train.hardware import Machine, launch
from train.loader import Batch, PlainSamples, TrainingSamples, plain_batches, training_batches
from train.model import build_model
from train.optimizer import build_optimizer, learning_rate, set_learning_rate
from train.order import Order, Window
from train.preemption import Preempted, StopRequest, stop_requests
from train.runs import Run, append_metrics, describe, forget_metrics_after, read_metrics, run_for

logger = logging.getLogger(__name__)


class DivergedError(SlipwayError):
    """The loss or the gradient is not finite. Decided by all ranks together."""


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


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """Where progress is shown and logged. `board` is there on the first rank only."""

    show: Display
    board: SummaryWriter | None


def fit(config: Config, folder: Dataset) -> Path:
    """Train, or continue, or find finished, the run that `config` and `folder` determine; returns its directory.

    Raises:
        Preempted: SIGTERM or SIGUSR1 came; the state was saved, and the next call continues there.
        DivergedError: the loss is no longer finite.
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
        trainer = _prepare(config, run, folder, machine, stop)
        _restore_newest(trainer)
        if trainer.progress.cursor == trainer.order.end and not _unscored(trainer):
            logger.info("trained already: %s", run.directory)
        else:
            _train(trainer)
        _say_what_was_skipped(trainer)
    machine.leave()
    return run.directory


def _prepare(config: Config, run: Run, folder: Dataset, machine: Machine, stop: StopRequest) -> Trainer:
    torch.manual_seed(config.training.seed)
    signature = checkpoint.signature_for(config, folder)
    module = build_model(config.model, len(folder.classes), signature.mean, signature.std)
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
        ),
        module=module,
        model=model,
        optimizer=optimizer,
        ema=None if config.training.ema is None else Average(module, config.training.ema),
        progress=Progress(),
        stop=stop,
    )


def _restore_newest(trainer: Trainer) -> None:
    directory = trainer.machine.decide(checkpoint.newest(trainer.run) if trainer.machine.is_first else None)
    if directory is None:
        return
    average = trainer.ema.values if trainer.ema else None
    plain_optimizer = trainer.optimizer.optimizer
    trainer.progress = checkpoint.restore(
        directory, trainer.machine, trainer.module, plain_optimizer, average
    )
    if trainer.progress.loss_scale:
        trainer.machine.precision.load_state_dict(trainer.progress.loss_scale)


def _train(trainer: Trainer) -> None:
    order, config = trainer.order, trainer.config
    with ExitStack() as stack:
        outputs = _open_outputs(trainer, stack)
        if _at_epoch_end(trainer):
            _validate(trainer, outputs)  # what was not scored before training stopped, if anything
        batches = _batches(trainer)
        for window in order.windows(trainer.progress.cursor):
            stopping = _step(trainer, window, batches, outputs)
            at_end = _at_epoch_end(trainer)
            if at_end or stopping or _is_due(trainer.progress.step, config.training.checkpoint_every):
                _save(trainer)
            if stopping:
                raise _stopped(trainer)
            if at_end:
                _validate(trainer, outputs)


def _open_outputs(trainer: Trainer, stack: ExitStack) -> Outputs:
    """Describe the run, forget what was logged behind the checkpoint it continues from, and open its displays."""
    machine, run, config = trainer.machine, trainer.run, trainer.config
    show = stack.enter_context(display(trainer.order.steps, config.training.epochs, speaks=machine.is_first))
    if not machine.is_first:
        return Outputs(show=show, board=None)
    describe(run, config, trainer.folder, machine)
    forget_metrics_after(run, trainer.progress.step)
    if trainer.progress.step:
        logger.info("continuing %s at step %d", run.directory.name, trainer.progress.step)
    board = SummaryWriter(str(run.directory / "tensorboard"))
    stack.callback(board.close)
    return Outputs(show=show, board=board)


def _step(trainer: Trainer, window: Window, batches: Iterator[Batch], outputs: Outputs) -> bool:
    """One optimiser step over one window of samples, or none at all: on overflow, or when no sample is good.

    Returns whether any rank was asked to stop.
    """
    config, progress = trainer.config, trainer.progress
    started = time.perf_counter()
    _seed_step(config.training.seed, window.end, trainer.machine.fabric.global_rank)
    rate = learning_rate(progress.step, trainer.order.steps, config.optimizer)
    set_learning_rate(trainer.optimizer, rate)
    loss, bad, stopping = _accumulate_gradients(trainer, window, batches)
    progress = replace(progress, bad_samples=progress.bad_samples + bad)
    if bad == len(window.indices):  # nothing to learn from: as little moves as on overflow
        trainer.optimizer.zero_grad()
        trainer.progress = replace(progress, cursor=window.end, skipped=progress.skipped + 1)
        return stopping
    norm = _clip(trainer)
    scaler = getattr(trainer.machine.precision, "scaler", None)
    # Both numbers are the same on every rank, so all decide alike.
    if not math.isfinite(loss) or not (math.isfinite(norm) or scaler):
        raise DivergedError(
            f"step {progress.step}, epoch {window.epoch}: the loss is {loss} and the gradient norm {norm}. "
            f"Lower optimizer.lr ({config.optimizer.lr:g}) or set optimizer.clip_norm; checkpoints are intact"
        )
    trainer.optimizer.step()
    trainer.optimizer.zero_grad()
    loss_scale = trainer.machine.precision.state_dict() if scaler else {}
    trainer.progress = replace(progress, cursor=window.end, loss_scale=loss_scale)
    if not math.isfinite(norm):
        trainer.progress = replace(trainer.progress, skipped=progress.skipped + 1)
        return stopping
    trainer.progress = replace(trainer.progress, step=progress.step + 1)
    if trainer.ema:
        trainer.ema.update(trainer.module)
    images_per_second = len(window.indices) / (time.perf_counter() - started)
    outputs.show.step(trainer.progress.step, loss, rate, images_per_second)
    if outputs.board and _is_due(trainer.progress.step, config.training.log_every):
        figures = {"loss": loss, "lr": rate, "gradient_norm": norm, "images_per_second": images_per_second}
        _log(trainer, window, outputs.board, figures)
    return stopping


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
        batch = next(batches).to(fabric.device)
        # Around every backward, also the last: Fabric leaves FSDP2's synchronisation off otherwise.
        with fabric.no_backward_sync(trainer.model, enabled=number < len(micro_batches) - 1):
            logits = trainer.model(batch.images)
            losses = cross_entropy(
                logits, batch.labels, reduction="none", label_smoothing=config.training.label_smoothing
            )
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
    result = score(trainer.module, batches, trainer.machine)
    epoch = progress.cursor // trainer.order.samples - 1
    outputs.show.epoch(epoch, progress.step, weights, result)
    if outputs.board:
        line = {"kind": "evaluation", "step": progress.step, "epoch": epoch, "split": "val"}
        line |= {"weights": weights, "loss": result.loss, "accuracy": result.accuracy}
        append_metrics(trainer.run, line)
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
        if line["kind"] == "evaluation" and line["step"] == trainer.progress.step
    }
    return trainer.machine.decide([weights for weights in kinds if weights not in scored])


def _is_due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0


def _log(trainer: Trainer, window: Window, board: SummaryWriter, figures: dict[str, float]) -> None:
    progress = trainer.progress
    line = {"kind": "train", "step": progress.step, "epoch": window.epoch, "samples": progress.cursor}
    append_metrics(trainer.run, {**line, **figures})
    for name, value in figures.items():
        board.add_scalar(f"train/{name}", value, progress.step)

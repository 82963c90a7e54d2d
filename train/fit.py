"""Training: one loop, top to bottom.

The loop holds no hidden state. What it needs to continue is the model, its moving average, the optimiser, and a few
numbers (`checkpoint.Progress`); the order of samples, augmentation, dropout and the learning rate follow from these.
Windows that were rolled back for are passed over: `bad_steps.jsonl`, beside the checkpoints, names them.
"""

import logging
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import torch

from slipway import sealed
from train import checkpoint, execution, health, warm_start
from train.board import board, require_installed
from train.checkpoint import Progress, Weights
from train.compilation import needs_warm_up, warm_up
from train.config import Config
from train.dataset import Dataset
from train.display import display
from train.ema import Average
from train.evaluate import score
from train.exposition import Exposition, says_that_it_runs
from train.hardware import Machine, launch
from train.health import DivergedError
from train.instruments import profiling
from train.layers import pulse_of
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
from train.model import build_model
from train.optimizer import build_optimizer
from train.order import Order
from train.parameters import freeze
from train.preemption import Preempted, StopRequest, ended_at_once, stop_requests
from train.runs import (
    Run,
    append_metrics,
    describe,
    epochs_without_gain,
    forget_metrics_after,
    read_metrics,
    run_for,
)
from train.saver import Saver
from train.step import RolledBackError, is_due, step
from train.trainer import Outputs, Trainer

# At whether another process still trains the run.
SECONDS_BETWEEN_LOOKS = 1.0

logger = logging.getLogger(__name__)


def fit(config: Config, dataset: Dataset) -> Path:
    """Train, or continue, or find finished, the run that `config` and `dataset` determine; returns its directory.

    Raises:
        Preempted: SIGTERM or SIGUSR1 came; the state was saved, and the next call continues there.
        DivergedError: the loss went bad, and `training.on_bad_loss` is stop, or it did so too often.
        SealError: a checkpoint could not be written.
        DataError: an image cannot be decoded; the message names it.
        BoardError: a tracker of `run.loggers` is not installed, or cannot be opened.
        SlipwayError: what the run logs cannot be written; said by the first rank, which writes it.
    """
    require_installed(config.run.loggers)
    run = run_for(config, dataset)
    with ended_at_once():
        machine = launch(config.hardware, config.training)
    with ExitStack() as stack:
        stop = stack.enter_context(stop_requests())
        _wait_for_others(run, machine, stop, stack)
        newest = machine.decide(lambda: checkpoint.newest(run))
        trainer = prepare(config, run, dataset, machine, stop, is_new=newest is None)
        stack.callback(trainer.saver.close)
        if newest:
            _restore(trainer, newest)
        if _is_finished(trainer):
            logger.info("trained already: %s", run.directory)
            _say_that_it_ended(trainer)
        else:
            with worker_deaths_in_words():
                _train(trainer)
        _say_what_was_skipped(trainer)
    machine.leave()
    return run.directory


def _wait_for_others(run: Run, machine: Machine, stop: StopRequest, stack: ExitStack) -> None:
    """Be the only ones who train this run, until `stack` ends.

    All ranks ask again and again: they may wait longer than one of them may wait for another.
    """
    name = f"run {run.directory.name}"

    def is_ours() -> bool:
        try:
            stack.enter_context(sealed.only_one(run.directory, name, waits=False))
        except sealed.BusyError:
            return False
        return True

    said = not machine.is_first
    while not machine.decide(is_ours):
        if not said:
            logger.info("another process is busy with %s; waiting for it", name)
            said = True
        time.sleep(SECONDS_BETWEEN_LOOKS)
        if machine.largest(stop.received is not None):
            raise Preempted(f"stopped while another process was busy with {name}; start again")


def prepare(
    config: Config, run: Run, dataset: Dataset, machine: Machine, stop: StopRequest, *, is_new: bool
) -> Trainer:
    torch.manual_seed(config.training.seed)
    signature = checkpoint.signature_for(config, dataset)
    module = build_model(config.model, len(dataset.classes), config.image.size, signature.mean, signature.std)
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
        dataset=dataset,
        machine=machine,
        signature=signature,
        order=Order(
            samples=len(dataset.splits["train"]),
            batch_size=config.training.batch_size,
            epochs=config.training.epochs,
            seed=config.training.seed,
            fingerprint=dataset.fingerprint,
            avoided=machine.decide(lambda: health.avoided(run)),
        ),
        module=module,
        model=model,
        optimizer=optimizer,
        ema=None if config.training.ema is None else Average(module, config.training.ema),
        saver=Saver(machine, run, config, signature),
        progress=Progress(precision=machine.precision.precision, loss_scale=machine.precision.state_dict()),
        stop=stop,
        meter=Meter(machine.device),
        pulse=pulse_of(module, config.training.log_layers_every, machine.device),
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
    trainer.machine.precision.load_state_dict(trainer.progress.loss_scale)


def _train(trainer: Trainer) -> None:
    with ExitStack() as stack:
        stack.enter_context(torch.autograd.set_detect_anomaly(trainer.config.debug.anomaly))
        outputs = _open_outputs(trainer, stack)
        if _at_epoch_end(trainer):
            _validate(trainer, outputs)  # what was not scored before training stopped, if anything
        if needs_warm_up(trainer.config.hardware, trainer.machine) and not _is_finished(trainer):
            warm_up(trainer)
        while not _is_finished(trainer):
            try:
                _work_off(trainer, outputs)
            except RolledBackError:
                _roll_back(trainer)


def _work_off(trainer: Trainer, outputs: Outputs) -> None:
    """Every window from where training stands to its end."""
    batches = trainer.meter.timed(batches_of(trainer))
    for window in trainer.order.windows(trainer.progress.cursor):
        before = trainer.progress.step
        stopping = step(trainer, window, batches, outputs)
        at_end, taken = _at_epoch_end(trainer), trainer.progress.step > before
        due = taken and is_due(trainer.progress.step, trainer.config.training.checkpoint_every)
        if at_end or stopping or due:
            _save(trainer)
        if stopping:
            _stop(trainer, "saved")
        if at_end:
            _validate(trainer, outputs)
            trainer.meter.end_epoch()
            if _is_finished(trainer):
                return


def _open_outputs(trainer: Trainer, stack: ExitStack) -> Outputs:
    """Describe the run, forget what was logged behind the checkpoint it continues from, and open its displays."""
    machine, run, config = trainer.machine, trainer.run, trainer.config
    steps, done = trainer.order.steps, trainer.progress.step
    show = stack.enter_context(display(steps, config.training.epochs, done=done, speaks=machine.is_first))
    if not machine.is_first:
        return Outputs(show=show, board=None)
    describe(run, config, trainer.dataset, machine)
    forget_metrics_after(run, trainer.progress.cursor)
    if trainer.progress.step:
        logger.info("continuing %s at step %d", run.directory.name, trainer.progress.step)
    return Outputs(
        show=show,
        board=stack.enter_context(board(run, config, trainer.progress.step)),
        exposition=stack.enter_context(Exposition(run.directory, run.checkpoints, trainer.order.end)),
        profiler=stack.enter_context(profiling(config.debug, run)),
    )


def _roll_back(trainer: Trainer) -> None:
    """Return to the last checkpoint, and from there pass over what led away from it."""
    machine, run = trainer.machine, trainer.run
    trainer.saver.finish()
    directory = machine.decide(lambda: checkpoint.newest(run))
    if directory is None:
        raise DivergedError(
            "training.on_bad_loss is rollback, but there is no checkpoint yet; set training.checkpoint_every"
        )
    _restore(trainer, directory)
    avoided = machine.decide(lambda: health.avoided(run))
    trainer.order = replace(trainer.order, avoided=avoided)
    if machine.is_first:
        forget_metrics_after(run, trainer.progress.cursor)
        logger.info("back at step %d", trainer.progress.step)


def batches_of(trainer: Trainer) -> Iterator[Batch]:
    """Every micro-batch of this rank from where training stands to its end."""
    config, fabric = trainer.config, trainer.machine.fabric
    workers_here = config.data.workers * trainer.machine.ranks_here
    if fabric.local_rank == 0:
        warn_of_little_shared_memory(config.image.size, trainer.micro_batch, workers_here)
    samples = TrainingSamples(
        trainer.dataset,
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
    trainer.saver.save(trainer.progress, tensors)


def _validate(trainer: Trainer, outputs: Outputs) -> None:
    """Score the weights and their average on the validation split."""
    for weights in _unscored(trainer):
        with ExitStack() as stack:
            if weights == "ema":
                assert trainer.ema
                stack.enter_context(trainer.ema.applied_to(trainer.module))
            _validate_weights(trainer, outputs, weights)
    _stop_if_asked(trainer)


def _validate_weights(trainer: Trainer, outputs: Outputs, weights: Weights) -> None:
    fabric, progress = trainer.machine.fabric, trainer.progress
    trainer.machine.share_buffers(trainer.module)
    batches = plain_batches(
        PlainSamples(trainer.dataset, "val", trainer.signature.preprocessing),
        trainer.micro_batch,
        rank=fabric.global_rank,
        world_size=fabric.world_size,
        workers=trainer.config.data.workers,
    )
    with execution.eager():
        result = score(trainer.module, _unless_stopped(trainer, batches), trainer.machine)
    trainer.saver.finish()  # a score names a checkpoint that is there
    epoch = progress.cursor // trainer.order.samples - 1
    outputs.show.epoch(epoch, progress.step, weights, result)
    if outputs.board:
        line = {"kind": "evaluation", "step": progress.step, "epoch": epoch, "samples": progress.cursor}
        line |= {"checkpoint": progress.name, "split": "val", "weights": weights}
        append_metrics(trainer.run, {**line, "loss": result.loss, "accuracy": result.accuracy})
        figures = {f"val/loss/{weights}": result.loss, f"val/accuracy/{weights}": result.accuracy}
        outputs.board.log(figures, progress.step)
    if outputs.exposition:
        figures = {f"val_loss_{weights}": result.loss, f"val_accuracy_{weights}": result.accuracy}
        outputs.exposition.update(progress.step, progress.cursor, figures)


def _unless_stopped(trainer: Trainer, batches: Iterator[Batch]) -> Iterator[Batch]:
    """The same batches. A validation may take longer than a scheduler waits, and its checkpoint is there already."""
    for batch in batches:
        _stop_if_asked(trainer)
        yield batch


def _stop_if_asked(trainer: Trainer) -> None:
    """Outside of steps, which agree on it by themselves; all ranks take part."""
    if trainer.machine.largest(trainer.stop.received is not None):
        _stop(trainer, "in its validation,")


def _say_that_it_ended(trainer: Trainer) -> None:
    """To Prometheus, which was told that it runs if it was stopped or killed after its last score."""
    run, progress = trainer.run, trainer.progress
    if trainer.machine.is_first and says_that_it_runs(run.directory):
        with Exposition(run.directory, run.checkpoints, trainer.order.end) as last:
            last.update(progress.step, progress.cursor, {})


def _say_what_was_skipped(trainer: Trainer) -> None:
    bad, seen = trainer.progress.bad_samples, trainer.progress.cursor
    if bad and trainer.machine.is_first:
        logger.warning(
            "WARNING: %d of the %d samples that training drew could not be decoded and counted for nothing "
            "(data.on_bad_sample: skip); `make data` names them all",
            bad,
            seen,
        )


def _stop(trainer: Trainer, what: str) -> NoReturn:
    """On all ranks. How long it took to save tells how long a scheduler has to wait."""
    trainer.saver.finish()
    seconds = trainer.machine.largest(trainer.stop.seconds_ago)
    raise Preempted(
        f"stopped at step {trainer.progress.step}, {what} {seconds:.1f} s after it was asked to; "
        "start again to continue there"
    )


def _is_finished(trainer: Trainer) -> bool:
    """All epochs trained, or no gain for as long as training was to be patient; and the last weights scored."""
    patience = trainer.config.training.patience
    if not _at_epoch_end(trainer) or _unscored(trainer):
        return False
    waited = trainer.machine.decide(lambda: epochs_without_gain(trainer.run))
    return trainer.progress.cursor == trainer.order.end or (patience is not None and waited >= patience)


def _at_epoch_end(trainer: Trainer) -> bool:
    return trainer.progress.cursor > 0 and trainer.progress.cursor % trainer.order.samples == 0


def _unscored(trainer: Trainer) -> list[Weights]:
    """The weights of this step that have no score yet; the same on every rank.

    One of two may have one: training can be killed between them.
    """
    kinds: list[Weights] = ["raw", "ema"] if trainer.ema else ["raw"]

    def unscored() -> list[Weights]:
        here = (line for line in read_metrics(trainer.run) if line["samples"] == trainer.progress.cursor)
        scored = {line["weights"] for line in here if line["kind"] == "evaluation"}
        return [weights for weights in kinds if weights not in scored]

    return trainer.machine.decide(unscored)

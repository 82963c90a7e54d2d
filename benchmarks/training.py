"""Images a second: our training step and our data path beside others that do the same work.

    python -m benchmarks.training [--rounds 12] [--sizes 32 224]

The step: ResNet-18 in float32, AdamW, clipping, on batches that are in memory already; ours, a bare PyTorch loop, that
loop with timm's optimiser and clipping, and Lightning's Trainer without loggers and bars. The data path: JPEG files to
augmented batches, ours, torchvision's ImageFolder with transforms.v2, and timm's loader, in this process. Saving: for
how long a checkpoint holds training up, written in the background and waited for. Contenders take turns, so that what
else runs on the machine slows all of them alike; what counts is the median of the ratios of each turn. Exits with 1
when a ratio is below its target.

timm's training script is in no package; of what it is made of, this takes the parts that are. timm's loader normalises
as well, which ours and torchvision's leave to the network.
"""

import argparse
import logging
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

import lightning
import torch
from timm.data import ImageDataset, create_loader
from timm.optim import create_optimizer_v2
from timm.utils import dispatch_clip_grad
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from benchmarks import results
from benchmarks.photographs import FILES, write_photographs
from benchmarks.results import Ratio
from slipway.config import load
from train import checkpoint
from train.config import Config, OptimizerConfig
from train.dataset import Dataset
from train.display import display
from train.fit import prepare
from train.folder import read_folder
from train.hardware import launch
from train.loader import Batch, TrainingSamples, training_batches
from train.model import build_model
from train.optimizer import build_optimizer
from train.order import Order
from train.preemption import StopRequest
from train.runs import run_for
from train.step import step
from train.trainer import Outputs, Trainer

# Ours divided by theirs, at least. Trainer is shown for what it costs, and is no target.
STEP_TARGET, DATA_TARGET = 0.98, 1.0
# How long a checkpoint in the background holds training up, at most, as a share of one that is waited for.
STALL_TARGET = 0.10
BATCH = {32: 64, 224: 16}
STEPS = 4  # of each contender in a turn

Turn = Callable[[], float]
"""Does its work once; returns images a second."""


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.training", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=12, help="turns of each contender (default: 12)")
    parser.add_argument("--sizes", type=int, nargs="+", default=list(BATCH), choices=list(BATCH))
    results.add_option(parser)
    options = parser.parse_args(arguments)
    warnings.filterwarnings("ignore")  # of libraries, about what is meant here
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    found: list[Ratio] = []
    with tempfile.TemporaryDirectory() as scratch:
        root = write_photographs(Path(scratch) / "images")
        for size in options.sizes:
            print(f"step, {size} pixels, batch {BATCH[size]}, {torch.get_num_threads()} threads")
            config = configuration(root, Path(scratch) / "runs", size)
            contenders = step_contenders(config)
            found += compare(f"step, {size} pixels", contenders, "bare loop", STEP_TARGET, options.rounds)
        print("data path, 224 pixels, one process, one thread")
        torch.set_num_threads(1)
        contenders = data_contenders(configuration(root, Path(scratch) / "runs", 224))
        found += compare("data path", contenders, "torchvision", DATA_TARGET, options.rounds)
        print("saving a checkpoint of ResNet-18 and AdamW")
        found.append(compare_stalls(configuration(root, Path(scratch) / "runs", 224), options.rounds))
    results.append(options.json, "training", found)
    return int(any(ratio.missed for ratio in found))


def compare(
    what: str, contenders: dict[str, Turn], reference: str, target: float, rounds: int
) -> list[Ratio]:
    """Print everybody's speed and our ratio to it; returns the ratios, that to `reference` with its target."""
    speeds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds + 1):
        for name, turn in contenders.items():
            speeds[name].append(turn())
    ours = speeds["slipway"][1:]  # the first turn warms up
    ratios = {name: median(a / b for a, b in zip(ours, speeds[name][1:], strict=True)) for name in contenders}
    for name, ratio in ratios.items():
        aim = f"target {target:.2f}" if name == reference else "no target"
        print(f"  {name:18} {median(speeds[name][1:]):8.1f} images/s   ours/theirs {ratio:4.2f} ({aim})")
    if ratios[reference] < target:
        print(f"missed: {ratios[reference]:.3f} of {reference}, {target:.2f} wanted", file=sys.stderr)
    return [
        Ratio(name=f"{what}: ours / {name}", value=ratio, target=target if name == reference else None)
        for name, ratio in ratios.items()
        if name != "slipway"
    ]


def configuration(root: Path, runs: Path, size: int) -> Config:
    return load(
        Config,
        None,
        {
            "run.directory": str(runs),
            "data.root": str(root),
            "data.workers": "0",
            "image.size": str(size),
            "image.resize": str(size),
            "model.stem": "small" if size == 32 else "standard",
            "training.batch_size": str(BATCH[size]),
            "training.epochs": "1000",
            "hardware.deterministic": "false",
        },
    )


def step_contenders(config: Config) -> dict[str, Turn]:
    batch, settings = random_batch(config), config.optimizer
    count = len(batch.labels)
    bare, timms = network(config), network(config)
    timm_optimizer = create_optimizer_v2(timms, settings.name, settings.lr, settings.weight_decay)
    return {
        "slipway": timed(our_steps(our_trainer(config), batch), count),
        "bare loop": timed(plain_steps(bare, build_optimizer(bare, settings), clip_grad_norm_, batch), count),
        "timm's parts": timed(plain_steps(timms, timm_optimizer, dispatch_clip_grad, batch), count),
        "Lightning Trainer": trainer_steps(config, batch),
    }


def random_batch(config: Config) -> Batch:
    count, size = config.training.batch_size, config.image.size
    images = torch.randint(0, 256, (count, 3, size, size), dtype=torch.uint8)
    return Batch(images=images, labels=torch.randint(0, 2, (count,)), weights=torch.ones(count))


def timed(steps: Iterator[None], images: int) -> Turn:
    def turn() -> float:
        started = time.perf_counter()
        for _ in range(STEPS):
            next(steps)
        return STEPS * images / (time.perf_counter() - started)

    return turn


def our_trainer(config: Config) -> Trainer:
    dataset = read_folder(config.data)
    machine = launch(config.hardware, config.training)
    return prepare(config, run_for(config, dataset), dataset, machine, StopRequest(), is_new=True)


def our_steps(trainer: Trainer, batch: Batch) -> Iterator[None]:
    trainer.order = order = Order(
        samples=len(batch.labels), batch_size=len(batch.labels), epochs=10**6, seed=0, fingerprint=""
    )
    with display(order.steps, order.epochs, speaks=False) as show:
        for window in order.windows(0):
            step(trainer, window, iter([batch]), Outputs(show=show, board=None))
            yield


def plain_steps(
    model: nn.Module, optimizer: torch.optim.Optimizer, clip: Callable[..., object], batch: Batch
) -> Iterator[None]:
    while True:
        loss = cross_entropy(model(batch.images), batch.labels)
        loss.backward()  # type: ignore[no-untyped-call]
        clip(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()  # ours knows it after each step as well, to stop where it is not finite
        yield


def network(config: Config) -> nn.Module:
    return build_model(config.model, 2, config.image.size, config.image.mean, config.image.std)


class Module(lightning.LightningModule):
    def __init__(self, model: nn.Module, config: OptimizerConfig) -> None:
        super().__init__()
        self.model, self.config = model, config

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        images, labels = batch
        return cross_entropy(self.model(images), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return build_optimizer(self.model, self.config)


class Clock(lightning.Callback):
    """Seconds from the first batch to the end of the last: what the Trainer does before and after is not counted."""

    started = seconds = 0.0

    def on_train_batch_start(
        self, _trainer: lightning.Trainer, _module: lightning.LightningModule, _batch: object, batch_idx: int
    ) -> None:
        if batch_idx == 0:
            self.started = time.perf_counter()

    def on_train_batch_end(self, *_arguments: object) -> None:
        self.seconds = time.perf_counter() - self.started


def trainer_steps(config: Config, batch: Batch) -> Turn:
    module = Module(network(config), config.optimizer)
    data: DataLoader[Any] = DataLoader([(batch.images, batch.labels)] * STEPS, batch_size=None)  # type: ignore[arg-type]

    def turn() -> float:
        clock = Clock()
        trainer = lightning.Trainer(
            accelerator="cpu",
            max_epochs=1,
            logger=False,
            callbacks=[clock],
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            gradient_clip_val=1.0,
        )
        trainer.fit(module, data)
        return STEPS * len(batch.labels) / clock.seconds

    return turn


def data_contenders(config: Config) -> dict[str, Turn]:
    ours = cycle_batches(config, read_folder(config.data))
    size = config.image.size
    transforms = v2.Compose(
        [
            v2.RandomResizedCrop(size, scale=(config.augment.min_scale, 1.0), antialias=True),
            v2.RandomHorizontalFlip(),
            v2.PILToTensor(),
        ]
    )
    folder = ImageFolder(str(config.data.root / "train"), transforms)
    theirs = endless(DataLoader(folder, batch_size=config.training.batch_size, shuffle=True))
    contenders = {"slipway": ours, "torchvision": theirs, "timm's parts": endless(timm_loader(config))}
    return {name: loaded(batches, config.training.batch_size) for name, batches in contenders.items()}


def timm_loader(config: Config) -> Iterable[Any]:
    size, augment = config.image.size, config.augment
    return create_loader(
        ImageDataset(str(config.data.root / "train")),
        input_size=(3, size, size),
        batch_size=config.training.batch_size,
        is_training=True,
        scale=(augment.min_scale, 1.0),
        ratio=(1 / augment.max_stretch, augment.max_stretch),
        hflip=augment.flip,
        color_jitter=None,
        num_workers=0,
        persistent_workers=False,
        device=torch.device("cpu"),
    )


def loaded(batches: Iterator[Any], size: int) -> Turn:
    """A turn is an epoch, because timm's loader is a batch ahead except at its end."""

    def turn() -> float:
        started = time.perf_counter()
        for _ in range(FILES // size):
            next(batches)
        return FILES / (time.perf_counter() - started)

    return turn


def endless(loader: Iterable[Any]) -> Iterator[Any]:
    """Epoch after epoch. Not itertools.cycle: that would keep the first one, and be done with reading files."""
    while True:
        yield from loader


def compare_stalls(config: Config, rounds: int) -> Ratio:
    """Print how long either way of saving holds training up; returns the background's share, with its target."""
    ways = [stalls(config, background=background) for background in (False, True)]
    seconds = [(next(ways[0]), next(ways[1])) for _ in range(rounds + 1)][1:]
    share = median(behind / waited for waited, behind in seconds)
    waited, behind = (1000 * median(times) for times in zip(*seconds, strict=True))
    print(f"  waited for {waited:8.0f} ms, in the background {behind:.0f} ms   share {share:4.2f}", end=" ")
    print(f"(target {STALL_TARGET:.2f})")
    if share > STALL_TARGET:
        print(f"missed: {share:.3f} of a save that is waited for, {STALL_TARGET:.2f} wanted", file=sys.stderr)
    return Ratio(
        name="stall of a save, background / waited for", value=share, better="lower", target=STALL_TARGET
    )


def stalls(config: Config, *, background: bool) -> Iterator[float]:
    """Seconds for which each of many checkpoints holds training up; the rest of a background one is not timed."""
    run = replace(config.run, directory=config.run.directory / f"background-{background}")
    hardware = replace(config.hardware, background_saving=background)
    trainer = our_trainer(replace(config, run=run, hardware=hardware))
    next(our_steps(trainer, random_batch(config)))  # AdamW has its moments from then on
    for number in count(1):
        progress = replace(trainer.progress, step=number)
        tensors = checkpoint.tensors_of(trainer.module, trainer.optimizer.optimizer, None)
        started = time.perf_counter()
        trainer.saver.save(progress, tensors)
        yield time.perf_counter() - started
        trainer.saver.finish()


def cycle_batches(config: Config, dataset: Dataset) -> Iterator[Batch]:
    samples = TrainingSamples(dataset, config.image.preprocessing(), config.augment, 0)
    order = Order(
        samples=len(dataset.splits["train"]),
        batch_size=config.training.batch_size,
        epochs=config.training.epochs,
        seed=0,
        fingerprint=dataset.fingerprint,
    )
    return training_batches(samples, order, cursor=0, accumulate=1, rank=0, world_size=1, workers=0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""A trainer of a linear model, and the data that it steps over."""

from pathlib import Path

import torch
from torch import nn

from train.checkpoint import Progress, signature_for
from train.config import Config, HardwareConfig, TrainingConfig
from train.dataset import Dataset, Sample
from train.display import _Silence
from train.folder import Files
from train.hardware import launch
from train.loader import Batch
from train.meter import Meter
from train.order import Order
from train.preemption import StopRequest
from train.runs import Run
from train.saver import Saver
from train.trainer import Outputs, Trainer


class Linear(nn.Module):
    """Logits are linear in the mean of each channel, so a full-batch gradient is easy to state."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.linear = nn.Linear(3, 3)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.linear(image.float().mean(dim=(2, 3)) / 255)
        return logits


def trainer_for(config: Config, tmp_path: Path, module: nn.Module, samples: int, precision: str) -> Trainer:
    machine = launch(HardwareConfig(accelerator="cpu"), TrainingConfig(precision=precision))  # type: ignore[arg-type]
    groups = [{"params": list(module.parameters()), "lr_scale": 1.0}]
    model, optimizer = machine.fabric.setup(module, torch.optim.SGD(groups, lr=1.0))
    order = Order(
        samples=samples, batch_size=config.training.batch_size, epochs=50, seed=0, fingerprint="fixed"
    )
    run = Run(directory=tmp_path, inputs="")
    dataset = Dataset(
        storage=Files(tmp_path),
        classes=("ant", "bee", "cat"),
        splits={"train": tuple(Sample(file=f"{n}.png", sha256="", label=0) for n in range(samples))},
        fingerprint="fixed",
    )
    signature = signature_for(config, dataset)
    return Trainer(
        config=config,
        run=run,
        dataset=dataset,
        machine=machine,
        signature=signature,
        order=order,
        module=module,
        model=model,
        optimizer=optimizer,
        ema=None,
        saver=Saver(machine, run, config, signature),
        progress=Progress(precision=precision),
        stop=StopRequest(),
        meter=Meter(machine.device),
        pulse=None,
    )


SILENT = Outputs(show=_Silence(), board=None)


def data_for(order: Order, accumulate: int, images: torch.Tensor, labels: torch.Tensor) -> list[Batch]:
    batches = []
    for window in order.windows(0):
        for draws in order.micro_batches(window, accumulate, 0, 1):
            index = torch.tensor([draw.index for draw in draws if draw.weight])
            batches.append(Batch(images=images[index], labels=labels[index], weights=torch.ones(len(index))))
    return batches

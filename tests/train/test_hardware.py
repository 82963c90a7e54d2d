import pytest
import torch

from train.config import HardwareConfig, TrainingConfig
from train.hardware import HardwareError, launch

CPU = HardwareConfig(accelerator="cpu")


def test_fp16_on_a_cpu_keeps_its_name_and_has_a_scaler() -> None:
    """Case B23: by name, Fabric would run bfloat16 without a scaler and mention it in one log line."""
    machine = launch(CPU, TrainingConfig(precision="16-mixed"))
    assert machine.precision.precision == "16-mixed"
    assert isinstance(machine.precision.scaler, torch.amp.GradScaler)  # type: ignore[attr-defined]


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_effective_precision_is_the_requested_one(precision: str) -> None:
    machine = launch(CPU, TrainingConfig(precision=precision))  # type: ignore[arg-type]
    assert machine.precision.precision == precision


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for what a machine with CUDA has")
def test_missing_cuda_is_said_before_anything_starts() -> None:
    with pytest.raises(HardwareError, match="finds no CUDA device"):
        launch(HardwareConfig(accelerator="cuda"), TrainingConfig())


def test_batch_that_does_not_divide_is_refused() -> None:
    with pytest.raises(HardwareError, match="64 does not divide into 1 ranks x 5 micro-batches"):
        launch(CPU, TrainingConfig(accumulate=5))

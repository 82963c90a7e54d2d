import pytest
import torch

from train.config import HardwareConfig, TrainingConfig
from train.hardware import HardwareError, _launched, effective_precision, launch

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


def test_auto_precision_is_what_the_device_has_built_in() -> None:
    assert effective_precision("16-mixed", "cpu") == "16-mixed"
    assert effective_precision("auto", "cpu") in ("32-true", "bf16-mixed")
    assert launch(CPU, TrainingConfig(precision="auto")).precision.precision == effective_precision(
        "auto", "cpu"
    )


def test_tasks_of_srun_train_together_and_not_each_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    monkeypatch.setenv("SLURM_STEP_NUM_NODES", "2")
    assert _launched(devices=1) == (4, 2)
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "1")  # a shell on a node
    assert _launched(devices=2) == (2, 2)
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "3")
    with pytest.raises(HardwareError, match="3 tasks on 2 nodes"):
        _launched(devices=1)
    monkeypatch.setenv("WORLD_SIZE", "2")  # Fabric, to a process that it started for hardware.devices
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "1")
    assert _launched(devices=2) == (2, 2)
    monkeypatch.setenv("WORLD_SIZE", "8")  # torchrun in each task of srun
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert _launched(devices=1) == (8, 4)


def test_replicas_that_do_not_divide_the_processes_are_refused() -> None:
    hardware = HardwareConfig(accelerator="cpu", strategy="fsdp2", replicas=2)
    with pytest.raises(HardwareError, match=r"1 processes do not divide into hardware\.replicas 2"):
        launch(hardware, TrainingConfig())

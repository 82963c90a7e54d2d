"""What an artefact that is compiled for a GPU records of it. No GPU is needed: PyTorch's answers are given."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from train import gpu
from train.formats import aoti


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(torch.version, "cuda", "13.0")


@pytest.mark.usefixtures("h200")
def test_capability_name_and_cuda_are_recorded() -> None:
    assert gpu.found() == {"name": "NVIDIA H200", "capability": "9.0", "cuda": "13.0"}


def test_no_gpu_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.found() is None


@pytest.mark.usefixtures("h200")
@pytest.mark.parametrize(("device", "extra"), [("cpu", set()), ("cuda", {"gpu"})])
def test_compiled_package_requires_the_gpu_that_its_model_was_on(device: str, extra: set[str]) -> None:
    """Case C10."""
    source: Any = SimpleNamespace(
        classifier=SimpleNamespace(scale=SimpleNamespace(device=torch.device(device)))
    )
    required = aoti.requires(source)
    assert required.keys() == {"machine", "torch", "instructions", *extra}
    assert required.get("gpu", gpu.found()) == gpu.found()

import time
from collections.abc import Iterator

import pytest
import torch

from train import meter as meters
from train.meter import LEAK_EPOCHS, Meter

CPU = torch.device("cpu")


def slowly() -> Iterator[int]:
    for number in range(3):
        time.sleep(0.02)
        yield number


def test_waiting_for_data_is_told_apart_from_working() -> None:
    meter = Meter(CPU)
    assert list(meter.timed(slowly())) == [0, 1, 2]
    waited = meter.read()["data_wait"]
    time.sleep(0.05)
    assert waited > 0.5
    assert meter.read()["data_wait"] == 0.0


def test_reading_starts_anew() -> None:
    meter = Meter(CPU)
    meter.count(64)
    assert meter.read()["images_per_second"] > 0
    assert meter.memory_mb > 50
    assert meter.read()["images_per_second"] == 0


def sizes(monkeypatch: pytest.MonkeyPatch, megabytes: list[int]) -> None:
    readings = iter(megabytes)
    monkeypatch.setattr(meters, "memory", lambda device: {"memory_mb": next(readings)})


def test_memory_that_grows_every_epoch_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    growing = [100 + 10 * epoch for epoch in range(LEAK_EPOCHS + 1)]
    meter = Meter(CPU)
    sizes(monkeypatch, growing)
    for _ in growing:
        meter.end_epoch()
    assert "from 100 to 150 MB. Look for tensors that are kept together with their graph" in caplog.text


@pytest.mark.parametrize(
    "megabytes", [[100, 110, 120, 119, 130, 140, 150], [1000, 1001, 1002, 1003, 1004, 1005]]
)
def test_memory_that_settles_is_no_leak(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, megabytes: list[int]
) -> None:
    meter = Meter(CPU)
    sizes(monkeypatch, megabytes)
    for _ in megabytes:
        meter.end_epoch()
    assert not caplog.records

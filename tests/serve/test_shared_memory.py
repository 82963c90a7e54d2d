"""Shared memory of dead servers is removed, and nobody else's."""

import os
from pathlib import Path

import pytest

from serve import shared_memory


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(shared_memory, "DIRECTORY", tmp_path)
    return tmp_path


def left_in(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def test_it_stays_while_somebody_holds_what_he_inherited(directory: Path) -> None:
    with shared_memory.owned("slipway-1") as ownership:
        inherited = os.dup(ownership)  # as a child has it
    (directory / "slipway-1-region").touch()
    shared_memory.remove_abandoned()
    assert left_in(directory) == {"slipway-1.lock", "slipway-1-region"}
    os.close(inherited)
    shared_memory.remove_abandoned()
    assert left_in(directory) == set()


def test_what_is_not_ours_or_has_no_lock_stays(directory: Path) -> None:
    others = {"triton_python_backend_shm_region_1", "slipway-2-region", "other.lock"}
    for name in others:
        (directory / name).touch()
    shared_memory.remove_abandoned()
    assert left_in(directory) == others

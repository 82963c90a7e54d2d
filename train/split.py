"""Splits as a pure function of content hash and seed: adding a file never moves another one."""

from typing import Literal

from slipway import hashing

Split = Literal["train", "val", "test"]
SPLITS: tuple[Split, ...] = ("train", "val", "test")


def split_of(content_sha256: str, val_fraction: float, test_fraction: float, seed: int) -> Split:
    """Where a file belongs. Equal contents land on the same side, whatever they are called."""
    draw = int(hashing.of_bytes(f"{seed}:{content_sha256}".encode())[:16], 16) / 2**64
    if draw < test_fraction:
        return "test"
    return "val" if draw < test_fraction + val_fraction else "train"

"""SHA-256 of files, bytes and plain data: one definition of "the same"."""

import hashlib
import json
from pathlib import Path
from typing import Any


def of_bytes(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def of_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def of_data(data: Any) -> str:
    """Hash of JSON-like data, independent of key order and spacing. NaN is refused: it is not JSON."""
    text = json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return of_bytes(text.encode())

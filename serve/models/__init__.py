"""The models that Triton runs in Python. Every release carries its own copy of this code."""

import json
from pathlib import Path
from typing import Any

# The id of requests that are no client's, but ask whether the service is well.
PROBE = "slipway-probe"
# The code of errors that are nobody's but ours.
INTERNAL = "INTERNAL"


def directory_of(args: dict[str, str]) -> Path:
    """Of the version that Triton loads, from what it gives to `initialize`: all that the model needs lies there."""
    return Path(args["model_repository"]) / args["model_version"]


def serving_of(directory: Path) -> dict[str, Any]:
    """What serve/repository.py wrote down for the models of a version: see `_write_serving` there."""
    content: dict[str, Any] = json.loads((directory / "serving.json").read_bytes())
    return content

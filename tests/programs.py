"""What tests use and no wheel brings: programs (requirements/debian.txt), and what only root may do."""

import os
from typing import NoReturn

import pytest

from scripts import programs


def require(*names: str) -> None:
    """Skip the test, saying why, where one of these programs is missing. In CI, which installs them, fail."""
    missing = [name for name in names if not programs.is_there(name)]
    if missing:
        cannot_run(f"{', '.join(missing)} not found; `make programs` installs it")


def cannot_run(reason: str) -> NoReturn:
    """Skip the test, saying why. In CI, where a test that never runs would pass for one that does, fail."""
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)

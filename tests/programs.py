"""Programs that tests use and that no wheel brings: requirements/debian.txt."""

import os

import pytest

from scripts import programs


def require(*names: str) -> None:
    """Skip the test, saying why, where one of these programs is missing. In CI, which installs them, fail."""
    missing = [name for name in names if not programs.is_there(name)]
    if not missing:
        return
    reason = f"{', '.join(missing)} not found; `make programs` installs it"
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)

"""Options of the test command, and how many threads its processes compute with."""

import os

import pytest
from hypothesis import HealthCheck, settings

# The networks of the tests are small: a second thread costs them more than it brings, and on a busy machine each would
# wait for the other to be given a core. Set here, before anything imports a library that counts the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# MLflow asks its makers for settings when it is imported.
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")

# The same examples in every run, however slow the machine: a red build must mean that something has changed.
settings.register_profile(
    "slipway",
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("slipway")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--kills", type=int, default=2, help="how often each training run is killed (default: 2)"
    )
    parser.addoption(
        "--whole-matrix",
        action="store_true",
        help="train in every combination of strategy, precision and the rest",
    )
    parser.addoption(
        "--rounds",
        type=int,
        default=1,
        help="how often a service meets each fault (default: 1; more assert times)",
    )
    parser.addoption(
        "--soak-minutes",
        type=float,
        default=1,
        help="how long a service is asked without a pause (default: 1; from 10 on its memory must not grow)",
    )
    parser.addoption(
        "--write-golden-curve",
        action="store_true",
        help="write down the loss curve of the default configuration, instead of holding training against it",
    )

"""Whoever runs the server: somebody asks it for golden images, and shows what came of it."""

import re
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from serve.release import Release
from serve.server import Server
from tests.serve.test_metrics import value
from tests.serve.tools import wait_until

pytestmark = pytest.mark.integration


def in_log(log: Path, pattern: re.Pattern[str]) -> bool:
    return pattern.search(log.read_text()) is not None


def test_it_says_whether_golden_images_are_answered_well(
    release: Release, server: Server, tmp_path: Path
) -> None:
    """By the release that a link leads to: when that is another, or none, the server is the wrong one."""
    link, log = tmp_path / "current", tmp_path / "log"
    link.symlink_to(release.directory)
    command = [sys.executable, "-m", "serve", "watch", "--release", str(link), "--port", "0"]
    command += [
        "--http",
        server.http,
        "--grpc",
        server.grpc,
        "--metrics",
        server.metrics,
        "--probe-seconds",
        "1",
    ]
    with log.open("wb") as output:
        watch = subprocess.Popen(command, stderr=output)
    try:
        wait_until(lambda: "golden images are answered well" in log.read_text())
        (url,) = re.findall(r"metrics are at http://(\S+/metrics)$", log.read_text(), re.MULTILINE)
        wait_until(lambda: value(url, "slipway_golden_probe_good") == 1)
        link.unlink()
        wait_until(lambda: value(url, "slipway_golden_probe_good") == 0)
        assert value(url, "slipway_golden_probes_total", result="bad") >= 1
        wait_until(lambda: f"WARNING: {link}: no release is published there" in log.read_text())
        link.symlink_to(release.directory)
        wait_until(lambda: value(url, "slipway_golden_probe_good") == 1)
        fresh = tmp_path / "fresh"
        for target, reason in ((link, "Symlink loop"), ("x" * 256, "File name too long")):
            fresh.symlink_to(target)
            fresh.replace(link)
            wait_until(lambda: value(url, "slipway_golden_probe_good") == 0)
            warning = re.compile(f"WARNING: {link}: cannot be followed to a release .*{reason}")
            wait_until(partial(in_log, log, warning))
            fresh.symlink_to(release.directory)
            fresh.replace(link)
            wait_until(lambda: value(url, "slipway_golden_probe_good") == 1)
    finally:
        watch.send_signal(signal.SIGTERM)
        try:
            assert watch.wait(60) == 0
        finally:
            watch.kill()
            watch.wait()
    assert log.read_text().endswith("stopped\n")

"""A check of a data set that is killed goes on where it was."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

COUNT = 600


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Images that take long enough to decode that a check can be killed in the middle."""
    random = np.random.default_rng(0)
    noise = random.integers(0, 256, (300, 400, 3), dtype=np.uint8)
    for number in range(COUNT):
        split = ("train", "train", "val", "test")[number % 4]
        path = tmp_path / "images" / split / f"class {number // 4 % 2}" / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.roll(noise, divmod(number, 400), axis=(0, 1))).save(path)
    return tmp_path / "images"


def command(folder: Path) -> list[str]:
    runs = folder.parent / "runs"
    options = ["--data.root", str(folder), "--run.directory", str(runs)]
    return [sys.executable, "-m", "train", "data", "check", *options]


def lines(folder: Path) -> list[bytes]:
    paths = (folder.parent / "runs").glob(".examined/*.jsonl")
    return [line for path in paths for line in path.read_bytes().splitlines(keepends=True)]


@pytest.mark.integration
def test_killed_check_goes_on_and_decodes_each_image_once(folder: Path) -> None:
    process = subprocess.Popen(command(folder), stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not lines(folder) and process.poll() is None:
        assert time.monotonic() < deadline, "nothing was written down"
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = [line for line in lines(folder) if line.endswith(b"\n")]
    assert before
    done = subprocess.run(command(folder), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, f"{folder}\n"), done.stderr
    after = lines(folder)
    # All that was whole is still there, in its place: none was decoded a second time.
    assert after[: len(before)] == before
    whole = {line for line in after if line.startswith(b'{"sha256"') and line.endswith(b"}\n")}
    assert len(whole) == COUNT

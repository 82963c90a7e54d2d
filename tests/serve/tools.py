"""What the tests of serving share besides fixtures."""

import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnxruntime
import psutil
from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from serve.client import CLIENTS
from serve.protocol import Answer, ServingError
from serve.release import KIND, Release, open_release
from serve.server import START_ATTEMPTS, START_SECONDS, Server
from slipway import sealed
from slipway.contract import Signature
from slipway.paths import PROJECT_ROOT
from slipway.preprocessing import preprocess

TRAIN = PROJECT_ROOT / ".venv" / "train"
SERVE = PROJECT_ROOT / ".venv" / "serve"
TINY_BUNDLE = PROJECT_ROOT / "tests" / "tiny_bundle.py"
CPUS = 2
# What the server of `slow_release` takes its time over, before it refuses it as no image.
SLOW = b"slow"
SLOW_SECONDS = 4
# Far more than anything takes on a slow machine, in seconds: a start of Triton that hangs is given up, and repeated.
PATIENCE = START_ATTEMPTS * START_SECONDS + 60


@dataclass(frozen=True)
class Oracle:
    """Offline answers."""

    session: onnxruntime.InferenceSession
    signature: Signature

    def pixels(self, image: bytes) -> npt.NDArray[np.uint8]:
        return preprocess(image, self.signature.preprocessing)

    def probabilities(self, image: bytes) -> npt.NDArray[np.float32]:
        return self.session.run(["probabilities"], {"image": self.pixels(image)[None]})[0][0]

    def label(self, image: bytes) -> str:
        return self.signature.classes[int(self.probabilities(image).argmax())]


def make_bundle(destination: Path, *options: str) -> Path:
    command = [str(TRAIN / "bin" / "python"), str(TINY_BUNDLE), str(destination), *options]
    subprocess.run(command, check=True)
    return destination


def variant(release: Release, directory: Path, edit: Callable[[Path], None]) -> Release:
    """A release that differs from another in what `edit(its models)` does, sealed again."""
    with sealed.stage(directory, kind=KIND) as staging:
        shutil.copytree(
            release.directory, staging, dirs_exist_ok=True, ignore=shutil.ignore_patterns(sealed.MANIFEST)
        )
        for path in staging.rglob("*"):
            path.chmod(0o755 if path.is_dir() else 0o644)
        edit(staging / "models")
    return open_release(directory)


def edit_config(model: Path, edit: Callable[[ModelConfig], object]) -> None:
    path = model / "config.pbtxt"
    config = text_format.Parse(path.read_text(), ModelConfig())
    edit(config)
    path.write_text(text_format.MessageToString(config))


def edit_text(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def ask_together(
    protocol: str, server: Server, images: Sequence[bytes], deadline_seconds: float = 30
) -> list[Answer | ServingError]:
    """Send all images at the same moment, each in a request of its own."""
    together = threading.Barrier(len(images), timeout=deadline_seconds)

    def ask(image: bytes) -> Answer | ServingError:
        url = server.urls[protocol]
        with CLIENTS[protocol](
            url, connect_seconds=deadline_seconds, deadline_seconds=deadline_seconds
        ) as client:
            client.server_version()  # connects
            together.wait()
            try:
                (answer,) = client.classify([image])
            except ServingError as error:
                return error
            return answer

    with ThreadPoolExecutor(len(images)) as pool:
        return list(pool.map(ask, images))


def model_processes(server: Server) -> dict[int, str]:
    """Process id -> command line of the processes that run the models."""
    children = {child.pid: command_of(child) for child in psutil.Process(server.pid).children()}
    return {pid: command for pid, command in children.items() if "triton_python_backend_stub" in command}


def command_of(process: psutil.Process) -> str:
    """Empty if it has just ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


def still_running(pid: int) -> bool:
    """Whether a process is alive; one that is dead and not yet collected is not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until(condition: Callable[[], bool], deadline_seconds: float = PATIENCE) -> None:
    deadline = time.monotonic() + deadline_seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def wait_until_gone(processes: Iterable[int]) -> None:
    own = list(processes)
    wait_until(lambda: not any(still_running(pid) for pid in own))

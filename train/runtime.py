"""An artefact on its real runtime, in a process of its own, alone in a directory of its own."""

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError
from onnx.shape_inference import InferenceError

from slipway.artefact import Artefact, require_runs_here
from slipway.errors import SlipwayError
from train import float16, gpu, runtime_worker

Answers = dict[str, npt.NDArray[np.float32]]


class RuntimeFailure(SlipwayError):
    """An artefact that its runtime does not load, or cannot answer with."""


class Runtime:
    """See `running`. loaded_ms: from the start of the worker's code, its libraries included, until it was ready."""

    def __init__(self, artefact: Artefact, process: subprocess.Popen[bytes], said: IO[bytes]) -> None:
        """said: the file that the process has for its stderr. Raises RuntimeFailure."""
        self.artefact = artefact
        self._process, self._said = process, said
        self.loaded_ms: float = self._receive()[0]["loaded_ms"]

    def answer(self, pixels: npt.NDArray[np.uint8]) -> Answers:
        """The outputs of one batch, uint8 [n, 3, S, S], by name. Raises RuntimeFailure."""
        return self._ask(pixels, 1)[1]

    def milliseconds(self, pixels: npt.NDArray[np.uint8], repeat: int) -> list[float]:
        """How long each of `repeat` answers to the same batch took, measured inside the process."""
        times: list[float] = self._ask(pixels, repeat)[0]["milliseconds"]
        return times

    def _ask(self, pixels: npt.NDArray[np.uint8], repeat: int) -> tuple[dict[str, Any], Answers]:
        assert self._process.stdin is not None
        try:
            runtime_worker.write(self._process.stdin, {"repeat": repeat}, {"image": pixels})
        except BrokenPipeError:
            raise self._died() from None
        content, answers = self._receive()
        if "error" in content:
            raise RuntimeFailure(
                f"{self.artefact.file}: {self.artefact.runtime} cannot answer a batch of {len(pixels)}: "
                f"{content['error'].strip().splitlines()[0]}"
            )
        return content, answers

    def _receive(self) -> tuple[dict[str, Any], Answers]:
        assert self._process.stdout is not None
        received = runtime_worker.read(self._process.stdout)
        if received is None:
            raise self._died()
        return received

    def _died(self) -> RuntimeFailure:
        code = self._process.wait()
        self._said.seek(0)
        lines = self._said.read().decode(errors="replace").strip().splitlines()
        last = f": {lines[-1]}" if lines else ""
        return RuntimeFailure(
            f"{self.artefact.file}: {self.artefact.runtime} ended with exit code {code} in a process of its own{last}"
        )


@contextmanager
def running(directory: Path, artefact: Artefact, threads: int) -> Iterator[Runtime]:
    """Load a copy of an artefact's files in a new process, which ends with the block.

    directory: what the artefact's files are relative to. threads: how many the runtime computes with.
    What is for GPUs is computed here as one of them would, on the CPU: see float16.py.

    Raises:
        ArtefactError: it was built for another machine; nothing is loaded.
        RuntimeFailure: the runtime refuses it, or dies of it.
    """
    require_runs_here(artefact, gpu.found() if "gpu" in artefact.requires else None)
    with tempfile.TemporaryDirectory() as alone, (Path(alone) / "stderr").open("w+b") as said:
        for name in artefact.files:
            shutil.copyfile(directory / name, Path(alone) / name)
        if artefact.for_gpus:
            _round_as_gpus_do(Path(alone) / artefact.file)
        task = {
            "runtime": artefact.runtime,
            "file": artefact.file,
            "settings": dict(artefact.settings),
            "threads": threads,
        }
        process = subprocess.Popen(
            [sys.executable, "-I", runtime_worker.__file__, json.dumps(task)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=said,
            cwd=alone,
        )
        try:
            yield Runtime(artefact, process, said)
        finally:
            process.kill()
            process.communicate()


def _round_as_gpus_do(file: Path) -> None:
    try:
        float16.write_roundings_out(file)
    except (DecodeError, InferenceError) as error:
        raise RuntimeFailure(f"{file.name}: is no sound ONNX file: {error}") from error

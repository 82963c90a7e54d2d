"""The runtimes that a server can answer with: an exported model's file -> a function of pixels.

In a release this file lies beside the code of the classifier. Only the runtime that a release needs is imported.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

Logits = npt.NDArray[np.float32]
# uint8 [n, 3, S, S] -> logits and probabilities, float32 [n, classes] each.
Run = Callable[[npt.NDArray[np.uint8]], tuple[Logits, Logits]]


def load(name: str, file: Path, settings: Mapping[str, str], threads: int) -> Run:
    """Load a model that `threads` threads compute; `name` is a key of RUNTIMES.

    settings: what the runtime must be told to compute as the artefact was proven to.
    """
    return RUNTIMES[name](file, settings, threads)


def _onnxruntime(file: Path, _settings: Mapping[str, str], threads: int) -> Run:
    import onnxruntime  # noqa: PLC0415 - only the runtime that is needed

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    # Threads that spin while they wait take CPU time from preprocessing, which works in between.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])

    def run(pixels: npt.NDArray[np.uint8]) -> tuple[Logits, Logits]:
        logits, probabilities = session.run(["logits", "probabilities"], {"image": pixels})
        return logits, probabilities

    return run


def _openvino(file: Path, settings: Mapping[str, str], threads: int) -> Run:
    import openvino  # noqa: PLC0415

    how = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": threads, **settings}
    # It would tie threads to cores, and every instance of a server to the same ones.
    how["ENABLE_CPU_PINNING"] = False
    model = openvino.Core().compile_model(file, "CPU", how)

    def run(pixels: npt.NDArray[np.uint8]) -> tuple[Logits, Logits]:
        answers = model([pixels])
        # Copies: what it answers lies in memory that the next answer is written to.
        return np.array(answers["logits"]), np.array(answers["probabilities"])

    return run


RUNTIMES = {"onnxruntime": _onnxruntime, "openvino": _openvino}

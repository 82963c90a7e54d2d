"""The answers of one artefact, from a process that holds its runtime and nothing of ours.

    python -I runtime_worker.py '{"runtime": "onnxruntime", "file": "model.onnx", "settings": {}, "threads": 2}'

Run by its path, it shares no code with what made the artefact; whatever answers here will answer in a server.
On stdin and stdout: a line of JSON, then the bytes of the arrays that it describes.
"""

import json
import os
import sys
import time
import warnings
from collections.abc import Callable
from typing import IO, Any

import numpy as np

Answers = dict[str, np.ndarray[Any, Any]]
Run = Callable[[np.ndarray[Any, Any]], Answers]


def onnxruntime(file: str, _settings: dict[str, str], threads: int) -> Run:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    (image,) = (each.name for each in session.get_inputs())
    return lambda pixels: dict(zip(names, session.run(names, {image: pixels}), strict=True))


def openvino(file: str, settings: dict[str, str], threads: int) -> Run:
    import openvino

    how = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": threads, **settings}
    model = openvino.Core().compile_model(file, "CPU", how)

    def run(pixels: np.ndarray[Any, Any]) -> Answers:
        answers = model([pixels])
        return {output.get_any_name(): np.array(answers[output]) for output in model.outputs}

    return run


def torch_export(file: str, _settings: dict[str, str], threads: int) -> Run:
    import torch

    torch.set_num_threads(threads)
    return _of_torch(torch.export.load(file).module())


def torchscript(file: str, _settings: dict[str, str], threads: int) -> Run:
    import torch

    torch.set_num_threads(threads)
    warnings.simplefilter("ignore")  # that it is deprecated was said when it was exported
    return _of_torch(torch.jit.load(file))  # type: ignore[no-untyped-call]


def aoti(file: str, _settings: dict[str, str], threads: int) -> Run:
    import torch
    from torch._inductor import aoti_load_package

    torch.set_num_threads(threads)
    return _of_torch(aoti_load_package(file))


def _of_torch(model: Callable[..., Any]) -> Run:
    import torch

    def run(pixels: np.ndarray[Any, Any]) -> Answers:
        with torch.inference_mode():
            return {name: answer.numpy() for name, answer in model(torch.from_numpy(pixels)).items()}

    return run


RUNTIMES = {
    "onnxruntime": onnxruntime,
    "openvino": openvino,
    "torch.export": torch_export,
    "torchscript": torchscript,
    "aoti": aoti,
}


def main() -> None:
    started = time.perf_counter()
    # An artefact that needs the code of the model is no artefact: importing it fails here, installed or not.
    sys.modules.update({"train": None, "torchvision": None})  # type: ignore[dict-item]
    # What a library prints goes to stderr; stdout is for answers only.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    task = json.loads(sys.argv[1])
    run = RUNTIMES[task["runtime"]](task["file"], task["settings"], task["threads"])
    write(answers, {"loaded_ms": 1000 * (time.perf_counter() - started)}, {})
    while (request := read(sys.stdin.buffer)) is not None:
        asked, arrays = request
        try:
            said, milliseconds = _answer(run, arrays["image"], asked["repeat"])
            write(answers, {"milliseconds": milliseconds}, said)
        except Exception as error:  # noqa: BLE001 - whatever the runtime raises is its answer
            write(answers, {"error": f"{type(error).__name__}: {error}"}, {})


def _answer(run: Run, pixels: np.ndarray[Any, Any], repeat: int) -> tuple[Answers, list[float]]:
    milliseconds = []
    for _ in range(repeat):
        began = time.perf_counter()
        said = run(pixels)
        milliseconds.append(1000 * (time.perf_counter() - began))
    return said, milliseconds


def write(stream: IO[bytes], content: dict[str, Any], arrays: Answers) -> None:
    shapes = {name: [array.dtype.str, list(array.shape)] for name, array in arrays.items()}
    stream.write(json.dumps({"content": content, "arrays": shapes}).encode() + b"\n")
    stream.writelines(np.ascontiguousarray(array).tobytes() for array in arrays.values())
    stream.flush()


def read(stream: IO[bytes]) -> tuple[dict[str, Any], Answers] | None:
    """What `write` wrote; None at the end of the stream, wherever it comes."""
    line = stream.readline()
    if not line.endswith(b"\n"):
        return None
    head = json.loads(line)
    arrays = {}
    for name, (dtype, shape) in head["arrays"].items():
        size = np.dtype(dtype).itemsize * int(np.prod(shape))
        data = stream.read(size)
        if len(data) < size:
            return None
        arrays[name] = np.frombuffer(bytearray(data), dtype).reshape(shape)  # writable, as PyTorch wants it
    return head["content"], arrays


if __name__ == "__main__":
    main()

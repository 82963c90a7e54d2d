"""Model -> a package of compiled code (AOTInductor), for this kind of CPU and this version of PyTorch only."""

import copy
import io
import os
import platform
import shutil
from pathlib import Path
from typing import Any

import torch
from torch._inductor import aoti_compile_and_package

from slipway.artefact import instructions
from train import gpu
from train.model import require_eval
from train.servable import ExportError, Servable, Source, capture, first_line, lowered


def write(source: Source, path: Path, precision: str) -> None:
    """Raises TrainingModeError, and ExportError where there is no C++ compiler or it fails."""
    require_eval(source.classifier)
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        raise ExportError(
            f"{path.name} is compiled C++, and there is no {compiler} here; install it (Debian and Ubuntu: g++), "
            "name another in the environment variable CXX, or leave aoti out of export.formats"
        )
    # A copy, because the layout that compiled convolutions like best is set in place.
    model = copy.deepcopy(source.classifier)
    if precision == "bfloat16":
        model = lowered(model, torch.bfloat16)
    servable = Servable(model).eval().to(memory_format=torch.channels_last)
    with torch.no_grad():
        program = capture(servable, source.image_size, source.max_batch)
        content = io.BytesIO()  # where PyTorch cannot write a file, it aborts the process
        try:
            aoti_compile_and_package(program, package_path=content, inductor_configs={"freezing": True})
        except RuntimeError as error:  # what the compiler says is a page, and goes to stderr
            raise ExportError(
                f"{path.name} cannot be compiled with {compiler}: {first_line(error)}"
            ) from error
    path.write_bytes(content.getvalue())


def requires(source: Source) -> dict[str, Any]:
    """It is compiled for everything this CPU can do, and for the GPU that the model is on, if it is on one."""
    version: str = torch.__version__.partition("+")[0]
    needed = {"machine": platform.machine(), "torch": version, "instructions": instructions()}
    device = source.classifier.scale.device
    return needed if device.type == "cpu" else {**needed, "gpu": gpu.described(device)}

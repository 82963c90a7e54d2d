"""Model -> a package of compiled code (AOTInductor), for this kind of CPU and this version of PyTorch only."""

import os
import platform
import shutil
from pathlib import Path
from typing import Any

import torch
from torch._inductor import aoti_compile_and_package

from slipway.artefact import instructions
from train.model import require_eval
from train.servable import ExportError, LowPrecision, Servable, Source, capture, first_line


def write(source: Source, path: Path, precision: str) -> None:
    """Raises TrainingModeError, and ExportError where there is no C++ compiler or it fails."""
    require_eval(source.classifier)
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        raise ExportError(
            f"{path.name} is compiled C++, and there is no {compiler} here; install it (Debian and Ubuntu: g++), "
            "name another in the environment variable CXX, or leave aoti out of export.formats"
        )
    low = precision == "bfloat16"
    model = LowPrecision(source.classifier, torch.bfloat16) if low else source.classifier
    servable = Servable(model).eval().to(memory_format=torch.channels_last)
    with torch.no_grad():
        program = capture(servable, source.image_size, source.max_batch)
        try:
            aoti_compile_and_package(program, package_path=str(path), inductor_configs={"freezing": True})
        except RuntimeError as error:  # what the compiler says is a page, and goes to stderr
            raise ExportError(f"{path.name} cannot be compiled with {compiler}: {first_line(error)}") from error


def requires() -> dict[str, Any]:
    """It is compiled for everything this CPU can do, against the interfaces of this PyTorch."""
    version: str = torch.__version__.partition("+")[0]
    return {"machine": platform.machine(), "torch": version, "instructions": instructions()}

"""Model -> the program of torch.export, for PyTorch without the code of the model."""

import io
from pathlib import Path

import torch

from train.model import require_eval
from train.servable import Servable, Source, capture


def write(source: Source, path: Path, _precision: str) -> None:
    """Raises TrainingModeError, ExportError."""
    require_eval(source.classifier)
    program = capture(Servable(source.classifier).eval(), source.image_size, source.max_batch)
    content = io.BytesIO()  # where PyTorch cannot write a file, it aborts the process
    torch.export.save(program, content)
    path.write_bytes(content.getvalue())

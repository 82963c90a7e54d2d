"""Model -> TorchScript, for servers that cannot load anything newer. PyTorch has deprecated it."""

import logging
import warnings
from pathlib import Path

import torch
from torch.jit._trace import TracerWarning

from train.model import require_eval
from train.servable import ExportError, Servable, Source

logger = logging.getLogger(__name__)


def write(source: Source, path: Path, _precision: str) -> None:
    """Raises TrainingModeError, and ExportError where tracing would freeze a branch or the batch size."""
    require_eval(source.classifier)
    logger.info(
        "TorchScript is deprecated by PyTorch; keep it only for servers that load neither ONNX nor .pt2"
    )
    example, other = (
        torch.zeros(rows, 3, source.image_size, source.image_size, dtype=torch.uint8) for rows in (2, 3)
    )
    # Each call repeats, at length, what is said above; as errors, warnings from C come out mangled.
    with warnings.catch_warnings(record=True) as said, torch.no_grad():
        warnings.simplefilter("always")
        servable = Servable(source.classifier).eval()
        traced = torch.jit.trace(servable, example, strict=False, check_trace=False)  # type: ignore[no-untyped-call]
        for each in said:
            if issubclass(each.category, TracerWarning):
                raise ExportError(
                    "the model cannot be traced: its code takes a value of the example for a constant "
                    f"({str(each.message).splitlines()[0]})"
                )
        traced = torch.jit.freeze(traced)
        try:
            rows = {len(answer) for answer in traced(other).values()}
        except RuntimeError as error:
            raise ExportError(
                f"the traced model fails on a batch of {len(other)}: its code takes the batch size of the example "
                f"for a constant ({str(error).strip().splitlines()[-1]})"
            ) from error
        if rows != {len(other)}:
            raise ExportError(
                f"the traced model gives {rows} answers for {len(other)} images: its batch is frozen"
            )
        # Where PyTorch cannot write a file, it aborts the process.
        path.write_bytes(traced.save_to_buffer())

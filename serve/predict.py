"""Ask a running server about image files."""

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

from serve.client import CLIENTS, RefusedInput, Unreachable
from slipway.errors import SlipwayError, UsageError

logger = logging.getLogger(__name__)


def run(paths: Sequence[Path], url: str, protocol: str) -> Iterator[str]:
    """Yield a line with label and probability for each file, as the answers come.

    Raises:
        UsageError: a path is not a file; nothing was sent.
        ServingError: the server could not answer.
        SlipwayError: there is no server; or, in the end, some files were refused while the others were answered.
    """
    for path in paths:
        if not path.is_file():
            raise UsageError(f"{path}: is not a file")
    refused = 0
    with CLIENTS[protocol](url) as client:
        for path in paths:
            try:
                (answer,) = client.classify([path.read_bytes()])
            except Unreachable as error:
                raise SlipwayError(f"{error}; `make serve` starts one") from None
            except RefusedInput as error:
                logger.error("%s: %s", path, error)
                refused += 1
            else:
                yield f"{path}: {answer.label} ({answer.probability:.1%})"
    if refused:
        raise SlipwayError(f"{refused} of {len(paths)} files were refused")

"""Before hours of training: decode every image once, and name all that cannot be."""

import logging
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from rich.console import Console
from rich.progress import track

from slipway.contract import Preprocessing
from slipway.preprocessing import ImageError, decode
from train.dataset import DataError, Dataset, Sample

SHOWN = 20

logger = logging.getLogger(__name__)


def require_decodable(folder: Dataset, rules: Preprocessing) -> None:
    """Decode every file of every split, on all cores.

    Fully, because a check of headers passes a truncated file (case A07). Raises DataError naming each bad file with
    the reason, a line each, the first 20 of them.
    """
    problems = list(_problems(folder, rules))
    if problems:
        more = [f"and {len(problems) - SHOWN} more"] if len(problems) > SHOWN else []
        raise DataError(
            "\n       ".join(
                [*problems[:SHOWN], *more, f"{len(problems)} images cannot be used; mend or remove them"]
            )
        )
    logger.info("%d images of %d classes decode", _count(folder), len(folder.classes))


def _problems(folder: Dataset, rules: Preprocessing) -> Iterator[str]:
    samples = [sample for split in folder.splits.values() for sample in split]
    # Threads are enough: Pillow decodes without holding Python's lock.
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found = pool.map(partial(_problem, folder, rules), samples)
        console = Console(stderr=True)
        for problem in track(
            found,
            "decoding",
            total=len(samples),
            console=console,
            disable=not console.is_terminal,
            transient=True,
        ):
            if problem:
                yield problem


def _problem(folder: Dataset, rules: Preprocessing, sample: Sample) -> str | None:
    try:
        decode(folder.read(sample), rules)
    except ImageError as error:
        return f"{folder.where(sample)}: {error}"
    except DataError as error:
        return str(error)
    return None


def _count(folder: Dataset) -> int:
    return sum(len(samples) for samples in folder.splits.values())

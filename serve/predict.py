"""Ask a running server about image files, and write a line for each: as text, CSV, or JSON."""

import asyncio
import csv
import glob
import io
import json
import logging
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from serve.async_client import ASYNC_CLIENTS, AsyncClient
from serve.protocol import (
    MAX_REQUEST_BYTES,
    Answer,
    NotAllowed,
    Overloaded,
    Patience,
    RefusedInput,
    Unreachable,
    too_many_bytes,
)
from slipway.errors import SlipwayError, UsageError

# Requests at once: enough for the server to make batches of them.
CONCURRENT = 8
# How long a file waits for a server that has no room for it: bulk requests give way for as long as others wait.
OVERLOADED_SECONDS = 600.0
# How often a file is sent again that could not be sent: a server that is not there is not waited for.
RETRIES = 3
# What to do where no server answers.
HINTS = {
    "http": "`make serve` starts one",
    "https": "`make gateway` starts one, and --certificates names whose certificates to believe",
}
COLUMNS = ("file", "label", "probability", "release", "error")

# Opens a client of the server that is asked.
Connect = Callable[[], AsyncClient]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Row:
    """What was said about a file: an answer, or an error."""

    file: Path
    answer: Answer | None = None
    error: str = ""


def run(
    inputs: Sequence[str],
    url: str,
    protocol: str,
    form: str,
    write: Callable[[str], object],
    *,
    api_key: str = "",
    certificates: Path | None = None,
) -> None:
    """`write` a line for each file, in order, as the answers come; a progress bar goes to a terminal on stderr.

    Args:
        inputs: files, folders (every file in them), and patterns such as "photos/**/*.jpg".
        url, api_key, certificates: those of serve.protocol.ClientSettings.
        form: one of FORMS.

    Raises:
        UsageError: an input is or matches no file, or a key would be sent without TLS; nothing was sent.
        ServingError: the server could not answer, or had no room for a file for OVERLOADED_SECONDS.
        SlipwayError: there is no server, or it does not know the key; or, in the end, some files were refused while
            the others were answered.
    """
    files = [file for entry in inputs for file in find_files(entry)]
    connect = partial(
        ASYNC_CLIENTS[protocol],
        url,
        api_key=api_key,
        certificates=certificates,
        priority="bulk",
        max_image_bytes=MAX_REQUEST_BYTES,  # what the model's own limit is, the server knows
    )
    try:
        refused = asyncio.run(_run(files, connect, form, write))
    except Unreachable as error:
        raise SlipwayError(f"{error}; {HINTS['https' if url.startswith('https://') else 'http']}") from None
    except NotAllowed as error:
        raise SlipwayError(f"{error}; a key comes from --api-key-file, or SLIPWAY_API_KEY") from None
    if refused:
        raise SlipwayError(f"{refused} of {len(files)} files were refused")


def find_files(entry: str) -> list[Path]:
    """The files that one argument means, in the order of their names; hidden ones only if they are named."""
    path = Path(entry)
    if path.is_file():
        return [path]
    if path.is_dir():
        found = [file for file in sorted(path.rglob("*")) if file.is_file()]
        files = [file for file in found if not any(p.startswith(".") for p in file.relative_to(path).parts)]
        problem = "holds no files"
    else:
        matches = sorted(glob.glob(entry, recursive=True))  # noqa: PTH207 - Path.glob takes no absolute pattern
        files = [Path(match) for match in matches if Path(match).is_file()]
        problem = "matches no file" if glob.has_magic(entry) else "is not a file"
    if not files:
        raise UsageError(f"{entry}: {problem}")
    return files


async def _run(files: Sequence[Path], connect: Connect, form: str, write: Callable[[str], object]) -> int:
    """Returns how many files were refused."""
    header, line = FORMS[form]
    refused = 0
    if header:
        write(header)
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        disable=not sys.stderr.isatty(),
        transient=True,
    )
    with progress:
        task = progress.add_task("asking", total=len(files))
        wait = partial(progress.update, task, description="waiting until the server has room")
        async for row in _rows(files, connect, wait):
            if row.error:
                refused += 1
                logger.error("%s: %s", row.file, row.error)
            if text := line(row):
                write(text)
            progress.update(task, description="asking", advance=1)
    return refused


async def _rows(files: Sequence[Path], connect: Connect, wait: Callable[[], object]) -> AsyncIterator[Row]:
    """In the order of the files, with a few requests under way at any time. `wait` is called when one has to wait."""
    under_way: deque[asyncio.Task[Row]] = deque()
    async with connect() as client:
        try:
            for file in files:
                under_way.append(asyncio.create_task(_ask(client, file, wait)))
                if len(under_way) == CONCURRENT:
                    yield await under_way.popleft()
            while under_way:
                yield await under_way.popleft()
        finally:
            for task in under_way:
                task.cancel()
            await asyncio.gather(*under_way, return_exceptions=True)


async def _ask(client: AsyncClient, file: Path, wait: Callable[[], object]) -> Row:
    try:
        answer = await _classify(client, await asyncio.to_thread(_read, file), wait)
    except RefusedInput as error:
        return Row(file=file, error=str(error))
    except OSError as error:
        return Row(file=file, error=f"cannot be read ({error.strerror})")
    return Row(file=file, answer=answer)


def _read(file: Path) -> bytes:
    """Raises RefusedInput, before it is read, for what no request has room for; OSError if it cannot be read."""
    if (size := file.stat().st_size) > MAX_REQUEST_BYTES:
        raise too_many_bytes("the file has", size, MAX_REQUEST_BYTES)
    return file.read_bytes()


async def _classify(client: AsyncClient, image: bytes, wait: Callable[[], object]) -> Answer:
    """Ask until there is room. Each try has a deadline of its own: one for all would run out while a try waits."""
    room = Patience(OVERLOADED_SECONDS, retries=sys.maxsize)
    server = Patience(OVERLOADED_SECONDS, RETRIES)
    while True:
        try:
            (answer,) = await client.classify([image])
        except Overloaded as error:
            wait()
            await asyncio.sleep(room.pause_after(error))
        except Unreachable as error:
            await asyncio.sleep(server.pause_after(error))
        else:
            return answer


def _text(row: Row) -> str:
    return f"{row.file}: {row.answer.label} ({row.answer.probability:.1%})" if row.answer else ""


def _csv(row: Row) -> str:
    own = row.answer
    answer = [own.label, f"{own.probability:.6f}", own.release] if own else ["", "", ""]
    return _csv_line([str(row.file), *answer, row.error])


def _csv_line(cells: Sequence[str]) -> str:
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="").writerow(cells)
    return buffer.getvalue()


def _json(row: Row) -> str:
    content: dict[str, object] = {"file": str(row.file)}
    if row.answer is None:
        content |= {"error": row.error}
    else:
        content |= {
            "label": row.answer.label,
            "probability": row.answer.probability,
            "probabilities": [float(value) for value in row.answer.probabilities],
            "release": row.answer.release,
        }
    # In ASCII: where stdout is not UTF-8, Python would write what it cannot as \xe9, which is no JSON.
    return json.dumps(content)


# Name -> the line that comes first, if one does, and the line of a row, empty where it has none.
FORMS: dict[str, tuple[str, Callable[[Row], str]]] = {
    "text": ("", _text),
    "csv": (_csv_line(COLUMNS), _csv),
    "json": ("", _json),
}

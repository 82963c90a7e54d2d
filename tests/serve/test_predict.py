"""Many files at once, in order, in a form that other programs read."""

import asyncio
import csv
import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import pytest

from serve import predict, protocol
from serve.async_client import ASYNC_CLIENTS, AsyncHttpClient
from serve.front import Front
from serve.predict import CONCURRENT, RETRIES, Row, find_files
from serve.protocol import Answer, Overloaded, ServingError, Unreachable
from serve.release import Release
from serve.server import LOOPBACK, Server, free_ports
from slipway.errors import SlipwayError, UsageError
from tests import images


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two folders with an image of each colour in one and what is no image in the other, and hidden files."""
    for k in range(12):
        (tmp_path / "good" / f"{k:02}.png").parent.mkdir(exist_ok=True)
        (tmp_path / "good" / f"{k:02}.png").write_bytes(images.flat(k))
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "page, with a comma.png").write_bytes(b"<html>")
    (tmp_path / "good" / ".DS_Store").write_bytes(b"hidden")
    (tmp_path / ".thumbnails").mkdir()
    (tmp_path / ".thumbnails" / "a.png").write_bytes(b"hidden")
    return tmp_path


def test_a_file_a_folder_and_a_pattern_name_files(folder: Path) -> None:
    first = folder / "good" / "00.png"
    assert find_files(str(first)) == [first]
    assert find_files(str(folder / "good" / ".DS_Store")) == [folder / "good" / ".DS_Store"]
    assert [file.name for file in find_files(str(folder))][:2] == ["page, with a comma.png", "00.png"]
    assert len(find_files(str(folder))) == 13
    assert find_files(f"{folder}/**/0?.png") == [folder / "good" / f"0{k}.png" for k in range(10)]


@pytest.mark.parametrize(
    ("entry", "words"),
    [("none", "is not a file"), ("*.none", "matches no file"), ("empty", "holds no files")],
)
def test_what_names_no_file_is_wrong_usage(tmp_path: Path, entry: str, words: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match=words):
        find_files(str(tmp_path / entry))


def lines_of(folder: Path, server: Server, protocol: str, form: str) -> list[str]:
    lines: list[str] = []
    with pytest.raises(SlipwayError, match="1 of 13 files were refused"):
        predict.run([str(folder)], server.urls[protocol], protocol, form, lines.append)
    return lines


@pytest.mark.integration
def test_every_form_has_every_file_in_order(
    folder: Path, server: Server, release: Release, protocol: str, caplog: pytest.LogCaptureFixture
) -> None:
    names = [str(folder / "good" / f"{k:02}.png") for k in range(12)]
    assert len(names) > CONCURRENT
    labels = [str(k) for k in range(12)]

    text = lines_of(folder, server, protocol, "text")
    assert [line.split(" (")[0] for line in text] == [f"{n}: {k}" for n, k in zip(names, labels, strict=True)]
    assert "page, with a comma.png: NOT_AN_IMAGE" in caplog.text

    bad, *good = csv.DictReader(lines_of(folder, server, protocol, "csv"))
    assert bad["file"] == str(folder / "bad" / "page, with a comma.png")
    assert (bad["label"], bad["error"].split(":")[0]) == ("", "NOT_AN_IMAGE")
    assert [(row["file"], row["label"]) for row in good] == list(zip(names, labels, strict=True))
    assert {row["release"] for row in good} == {release.identity}

    first, *rest = map(json.loads, lines_of(folder, server, protocol, "json"))
    assert first["error"].startswith("NOT_AN_IMAGE")
    assert [(row["file"], row["label"]) for row in rest] == list(zip(names, labels, strict=True))
    assert all(max(row["probabilities"]) == row["probability"] for row in rest)


class Refusing(AsyncHttpClient):
    """Asks no server: is refused with these errors, one by one, and answered then."""

    errors: ClassVar[list[ServingError]]

    async def _classify(self, tensor: npt.NDArray[np.object_], top: int, seconds: float) -> list[Answer]:
        if self.errors:
            raise self.errors.pop()
        probabilities = np.ones(1, dtype=np.float32)
        return [Answer(top=(("7", 1.0),), probabilities=probabilities, release="tiny/1", model_version="1")]


@pytest.fixture
def refusing(monkeypatch: pytest.MonkeyPatch) -> type[Refusing]:
    monkeypatch.setattr(protocol, "LONGEST_PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(protocol, "FIRST_PAUSE_SECONDS", 0.0)
    monkeypatch.setitem(ASYNC_CLIENTS, "http", Refusing)
    return Refusing


def predicted(file: Path) -> list[str]:
    lines: list[str] = []
    predict.run([str(file)], f"{LOOPBACK}:1", "http", "text", lines.append)
    return lines


def test_a_saturated_server_is_asked_again_and_one_that_is_away_is_not_for_long(
    folder: Path, refusing: type[Refusing], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = folder / "good" / "07.png"
    refusing.errors = [Overloaded("busy") for _ in range(100)] + [Unreachable("away", sent=False)] * RETRIES
    assert predicted(file) == [f"{file}: 7 (100.0%)"]

    refusing.errors = [Unreachable("away", sent=False)] * (RETRIES + 1)
    with pytest.raises(SlipwayError, match="away; `make serve` starts one"):
        predicted(file)

    monkeypatch.setattr(predict, "OVERLOADED_SECONDS", 0.0)
    monkeypatch.setattr(protocol, "FIRST_PAUSE_SECONDS", 1.0)
    refusing.errors = [Overloaded("busy")]
    with pytest.raises(Overloaded, match="busy"):
        predicted(file)


@pytest.mark.integration
def test_a_server_that_is_replaced_is_waited_for(folder: Path, server: Server, protocol: str) -> None:
    """Over both protocols: nothing is behind HAProxy until somebody waits for it."""
    file = folder / "good" / "07.png"

    async def ask(front: Front) -> list[Row]:
        connect = partial(ASYNC_CLIENTS[protocol], front.urls[protocol])
        rows = predict._rows([file], connect, wait=partial(front.point_at, server))
        return [row async for row in rows]

    with Front(free_ports()) as front:
        (row,) = asyncio.run(ask(front))
    assert row.answer is not None
    assert row.answer.label == "7"


def test_a_file_larger_than_any_request_is_refused_unread_and_the_others_are_answered(
    folder: Path, refusing: type[Refusing], caplog: pytest.LogCaptureFixture
) -> None:
    """Case D17: no machine has memory for all of it."""
    video = folder / "good" / "00.mp4"
    video.touch()
    os.truncate(video, 2**40)
    refusing.errors = []
    lines: list[str] = []
    with pytest.raises(SlipwayError, match="1 of 2 files were refused"):
        predict.run(
            [str(video), str(folder / "good" / "07.png")], f"{LOOPBACK}:1", "http", "text", lines.append
        )
    assert lines == [f"{folder / 'good' / '07.png'}: 7 (100.0%)"]
    words = "the file has 1,099,511,627,776 bytes; the limit is 268,435,456. It was not sent"
    assert f"{video}: TOO_MANY_BYTES: {words}" in caplog.text


@pytest.mark.parametrize("name", [b"caf\xc3\xa9.png", b"caf\xe9.png"], ids=["UTF-8", "Latin-1"])
def test_json_is_ascii_whatever_a_file_is_called(
    tmp_path: Path, refusing: type[Refusing], name: bytes
) -> None:
    """So it is JSON in every encoding of stdout, and has the file's name, byte for byte."""
    file = tmp_path / os.fsdecode(name)
    file.write_bytes(images.flat(7))
    refusing.errors = []
    lines: list[str] = []
    predict.run([str(file)], f"{LOOPBACK}:1", "http", "json", lines.append)
    assert lines[0].isascii()
    assert os.fsencode(Path(json.loads(lines[0])["file"]).name) == name


def test_on_a_terminal_it_says_that_it_waits(
    folder: Path,
    refusing: type[Refusing],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr(protocol, "FIRST_PAUSE_SECONDS", 2.0)  # the bar is drawn ten times a second
    refusing.errors = [Overloaded("busy")]
    assert len(predicted(folder / "good" / "07.png")) == 1
    assert "waiting until the server has room" in capsys.readouterr().err


def test_without_a_server_it_says_how_to_start_one(folder: Path, protocol: str) -> None:
    url = f"{LOOPBACK}:{free_ports().http}"
    with pytest.raises(SlipwayError, match=r"no server answers there over .*; `make serve` starts one"):
        predict.run([str(folder)], url, protocol, "text", print)

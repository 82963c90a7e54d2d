"""Many files at once, in order, in a form that other programs read."""

import csv
import json
from pathlib import Path

import pytest

from serve import predict
from serve.predict import CONCURRENT, find_files
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


def test_without_a_server_it_says_how_to_start_one(folder: Path, protocol: str) -> None:
    url = f"{LOOPBACK}:{free_ports().http}"
    with pytest.raises(SlipwayError, match=r"no server answers there over .*; `make serve` starts one"):
        predict.run([str(folder)], url, protocol, "text", print)

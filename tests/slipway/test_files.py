from pathlib import Path

import pytest

from slipway.errors import SlipwayError
from slipway.files import write_whole, writing


def test_what_was_there_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "ä.json"
    for text in ("old", "neü\n"):
        write_whole(path, text)
        assert path.read_text(encoding="utf-8") == text
    assert list(tmp_path.iterdir()) == [path]


def test_what_was_there_stays_where_writing_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    write_whole(path, "old")

    def full(_descriptor: int) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_whole(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_place_that_is_not_there_yet_is_named_with_the_free_space(tmp_path: Path) -> None:
    path = tmp_path / "not" / "there" / "a.json"
    with (
        pytest.raises(SlipwayError, match=rf"{path}: cannot be written \(.*\); [1-9]\d* MB are free there"),
        writing(path),
    ):
        path.write_text("")

import os
from pathlib import Path

import pytest

from slipway.errors import SlipwayError
from slipway.files import abandoned, owned, write_whole, writing


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


def test_only_files_of_ones_own_whose_owners_have_ended_are_abandoned(tmp_path: Path) -> None:
    """In a folder that everybody may write to, a pipe would hold us up, and a link lead somewhere else."""
    with owned(tmp_path / "ended"):
        pass
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "ended")
    (tmp_path / "folder").mkdir()
    with owned(tmp_path / "alive"):
        assert list(abandoned(sorted(tmp_path.iterdir()))) == [tmp_path / "ended"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_nobody_elses_file_is_abandoned(tmp_path: Path) -> None:
    with owned(tmp_path / "planted"):
        pass
    os.chown(tmp_path / "planted", 65534, 65534)
    assert list(abandoned(tmp_path.iterdir())) == []


def test_what_is_abandoned_is_held_while_it_is_dealt_with(tmp_path: Path) -> None:
    with owned(tmp_path / "ended"):
        pass
    for _ in abandoned(tmp_path.iterdir()):
        assert list(abandoned(tmp_path.iterdir())) == []
    assert list(abandoned(tmp_path.iterdir())) == [tmp_path / "ended"]

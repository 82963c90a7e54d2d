"""Keys are given away once and kept as hashes."""

import stat
from pathlib import Path

import pytest

from deploy.gateway import keys
from slipway.errors import SlipwayError, UsageError


def test_a_key_is_kept_as_its_hash_in_a_file_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "new folder" / "keys.conf"
    key = keys.add("alice", file)
    assert file.read_text() == f'"{keys.digest(key)}" alice;\n'
    assert key not in file.read_text()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_keys_are_added_to_those_that_are_there(tmp_path: Path) -> None:
    file = tmp_path / "keys.conf"
    made = [keys.add(name, file) for name in ("alice", "alice", "bob")]
    assert len(set(made)) == 3
    assert [line.split()[1] for line in file.read_text().splitlines()] == ["alice;", "alice;", "bob;"]


@pytest.mark.parametrize("name", ["", "a b", "a;b", 'a"', "$uri", "-a", "default", "include", "a" * 65, "é"])
def test_what_nginx_could_misread_is_no_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="is no name for a client"):
        keys.add(name, tmp_path / "keys.conf")
    assert not (tmp_path / "keys.conf").exists()


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "keys.conf").mkdir()
    with pytest.raises(SlipwayError, match=r"keys\.conf: the key cannot be added"):
        keys.add("alice", tmp_path / "keys.conf")

import json
from pathlib import Path

import pytest

from slipway.contract import Preprocessing
from tests.train.conftest import MakeFolder, data_config
from train import examine as module
from train.dataset import DataError, Dataset
from train.examine import examine
from train.folder import read_folder
from train.image_facts import Facts, Refusal, facts_of

RULES = Preprocessing(image_size=16, resize_size=16)


@pytest.fixture
def root(make_folder: MakeFolder) -> Path:
    return make_folder()


@pytest.fixture
def folder(root: Path) -> Dataset:
    return read_folder(data_config(root))


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What is really decoded, in order."""
    seen: list[bytes] = []

    def watched(data: bytes, rules: Preprocessing) -> Facts | Refusal:
        seen.append(data)
        return facts_of(data, rules)

    monkeypatch.setattr(module, "facts_of", watched)
    return seen


def remembered(memory: Path) -> Path:
    (path,) = memory.glob("*.jsonl")
    return path


def test_second_check_decodes_nothing(folder: Dataset, tmp_path: Path, decoded: list[bytes]) -> None:
    first = examine(folder, RULES, tmp_path / "memory")
    assert len(decoded) == len(first) == 39
    decoded.clear()
    assert examine(folder, RULES, tmp_path / "memory") == first
    assert not decoded


def test_one_new_file_costs_one_decode(
    folder: Dataset, root: Path, tmp_path: Path, decoded: list[bytes]
) -> None:
    examine(folder, RULES, tmp_path / "memory")
    decoded.clear()
    (root / "train" / "ant" / "new.png").write_bytes(b"no image")
    found = examine(read_folder(data_config(root)), RULES, tmp_path / "memory")
    assert decoded == [b"no image"]
    assert [facts.code for facts in found.values() if isinstance(facts, Refusal)] == ["NOT_AN_IMAGE"]


def test_equal_contents_are_decoded_once(
    folder: Dataset, root: Path, tmp_path: Path, decoded: list[bytes]
) -> None:
    copy = root / folder.splits["val"][0].file
    copy.write_bytes((root / folder.splits["train"][0].file).read_bytes())
    examine(read_folder(data_config(root)), RULES, tmp_path / "memory")
    assert len(decoded) == 38


def test_other_rules_are_another_question(folder: Dataset, tmp_path: Path, decoded: list[bytes]) -> None:
    examine(folder, RULES, tmp_path / "memory")
    strict = Preprocessing(image_size=16, resize_size=16, max_pixels=100)
    found = examine(folder, strict, tmp_path / "memory")
    assert all(isinstance(facts, Refusal) for facts in found.values())


@pytest.mark.parametrize("cut", [2, 40, 200])
def test_killed_check_continues_and_forgets_only_the_line_it_was_writing(
    folder: Dataset, tmp_path: Path, decoded: list[bytes], cut: int
) -> None:
    first = examine(folder, RULES, tmp_path / "memory")
    path = remembered(tmp_path / "memory")
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:20])[:-cut])
    for expected in (20, 0):
        decoded.clear()
        assert examine(folder, RULES, tmp_path / "memory") == first
        assert len(decoded) == expected


def test_line_of_something_else_is_no_fact(
    folder: Dataset, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = examine(folder, RULES, tmp_path / "memory")
    path = remembered(tmp_path / "memory")
    lines = path.read_text().splitlines()
    lines[0], lines[1], lines[2] = "[]", "{}", json.dumps({**json.loads(lines[2]), "thumb": "?"})
    path.write_text("\n".join(lines))
    caplog.set_level("INFO")
    assert examine(folder, RULES, tmp_path / "memory") == first
    assert "3 lines were cut short" in caplog.text


def test_image_folder_is_left_as_it_was(folder: Dataset, root: Path, tmp_path: Path) -> None:
    before = sorted(root.rglob("*"))
    examine(folder, RULES, tmp_path / "memory")
    assert sorted(root.rglob("*")) == before


def test_file_changed_meanwhile_is_not_remembered_as_what_it_was(
    folder: Dataset, root: Path, tmp_path: Path
) -> None:
    (root / folder.splits["test"][-1].file).write_bytes(b"other")
    with pytest.raises(DataError, match=r"test/cat/2.png: changed while the data set was being checked"):
        examine(folder, RULES, tmp_path / "memory")


def test_file_that_cannot_be_read_is_asked_for_again(
    folder: Dataset, root: Path, tmp_path: Path, decoded: list[bytes]
) -> None:
    sample = folder.splits["test"][0]
    data = (root / sample.file).read_bytes()
    (root / sample.file).unlink()
    found = examine(folder, RULES, tmp_path / "memory")[sample.sha256]
    assert found == Refusal("UNREADABLE", "cannot be read (No such file or directory)")
    (root / sample.file).write_bytes(data)
    assert isinstance(examine(folder, RULES, tmp_path / "memory")[sample.sha256], Facts)

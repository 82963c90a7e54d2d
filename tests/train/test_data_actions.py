"""`python -m train data check | stats | split | show`, as a person calls it."""

import csv
import io
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from slipway import sealed
from slipway.errors import SlipwayError, UsageError
from tests.train.conftest import MakeConfig, MakeFolder, data_config, save_image
from train.__main__ import main
from train.config import DataConfig
from train.data_actions import copy_split
from train.dataset import DataError, Dataset
from train.doctor import diagnose
from train.doctor_tables import print_tables
from train.examine import examine
from train.folder import read_folder
from train.sources import read_dataset

Call = Callable[..., Path]


@pytest.fixture
def call(tmp_path: Path) -> Call:
    def run(action: str, root: Path, *arguments: str) -> Path:
        options = ["--data.root", str(root), "--run.directory", str(tmp_path / "runs"), "--run.name", "tiny"]
        made = main(["data", *([action] if action else []), *options, "--image.size", "16", *arguments])
        assert isinstance(made, Path)
        return made

    return run


@pytest.fixture
def flat(tmp_path: Path) -> Path:
    root = tmp_path / "flat"
    random = np.random.default_rng(2)
    for name in ("a", 'b, "c"'):
        (root / name / "deep").mkdir(parents=True)
        for number in range(40):
            save_image(root / name / ("deep" if number % 2 else "") / f"{number}.png", (50, 60, 70), random)
    return root


def contents(dataset: Dataset) -> dict[str, list[tuple[int, str]]]:
    return {split: sorted((s.label, s.sha256) for s in found) for split, found in dataset.splits.items()}


@pytest.mark.parametrize("action", ["", "check"])
def test_plain_data_checks_and_names_the_folder(call: Call, make_folder: MakeFolder, action: str) -> None:
    root = make_folder()
    assert call(action, root) == root
    (root / "val" / "ant" / "0.png").write_bytes(b"")
    with pytest.raises(DataError, match="EMPTY"):
        call(action, root)


def test_debugging_with_one_batch_is_no_leak(call: Call, make_folder: MakeFolder) -> None:
    """`overfit` validates on what it trains on; the data set is checked as it is."""
    root = make_folder()
    assert call("check", root, "--debug.mode", "overfit") == root


def test_stats_writes_everything_and_shows_tables(
    call: Call, make_folder: MakeFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = make_folder()
    (root / "val" / "ant" / "0.png").write_bytes(b"")
    shutil.copy(root / "train" / "ant" / "0.png", root / "test" / "ant" / "leak.png")
    path = call("stats", root)
    assert path == tmp_path / "runs" / "tiny-data" / "doctor.json"
    record = json.loads(path.read_bytes())
    assert record["refused"][0]["file"] == "val/ant/0.png"
    assert {finding["severity"] for finding in record["findings"]} == {"error"}
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "PNG: 39" in printed.err
    assert "mean: [" in printed.err


def test_odd_class_names_do_not_format_the_table(
    make_config: MakeConfig, make_folder: MakeFolder, tmp_path: Path
) -> None:
    config = make_config(make_folder(("[bold]", "b[red]")))
    folder = read_folder(config.data)
    found = examine(folder, config.image.preprocessing(), tmp_path / "memory")
    screen = io.StringIO()
    print_tables(diagnose(folder, found, 16), [], Console(file=screen, width=100))
    assert "[bold]" in screen.getvalue()
    assert "b[red]" in screen.getvalue()


def test_split_writes_which_file_falls_where(call: Call, flat: Path) -> None:
    path = call("split", flat)
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 80
    assert {row["class"] for row in rows} == {"a", 'b, "c"'}
    samples = {s.file: split for split, found in read_folder(data_config(flat)).splits.items() for s in found}
    assert {row["file"]: row["split"] for row in rows} == samples


def test_split_is_the_same_again_and_a_new_file_moves_no_other(call: Call, flat: Path) -> None:
    """Case A09."""
    before = call("split", flat).read_text().splitlines()
    assert call("split", flat).read_text().splitlines() == before
    save_image(flat / "a" / "another.png", (50, 60, 70), np.random.default_rng(3))
    after = call("split", flat).read_text().splitlines()
    assert len(after) == len(before) + 1
    assert set(before) < set(after)


def test_copied_split_is_an_ordinary_folder_with_the_same_splits(
    call: Call, flat: Path, tmp_path: Path
) -> None:
    to = tmp_path / "made" / "split"
    assert call("split", flat, "--to", str(to)) == to
    before, after = read_folder(data_config(flat)), read_folder(data_config(to))
    assert before.classes == after.classes
    assert {split: [(s.label, s.sha256) for s in samples] for split, samples in before.splits.items()} == {
        split: [(s.label, s.sha256) for s in samples] for split, samples in after.splits.items()
    }
    with pytest.raises(sealed.SealError, match="is already there"):
        call("split", flat, "--to", str(to))


def test_table_of_images_is_copied_to_a_folder(flat: Path, tmp_path: Path) -> None:
    rows = [(path.relative_to(tmp_path), path.relative_to(flat).parts[0]) for path in flat.rglob("*.png")]
    table = tmp_path / "images.csv"
    with table.open("w", newline="") as file:
        csv.writer(file).writerows([("path", "label"), *rows])
    listed = read_dataset(DataConfig(source="manifest", root=table))
    copied = read_folder(data_config(copy_split(tmp_path / "copy", listed)))
    assert contents(copied) == contents(listed)


def test_folder_with_splits_is_copied_as_it_is(make_folder: MakeFolder, tmp_path: Path) -> None:
    folder = read_folder(data_config(make_folder()))
    copied = read_folder(data_config(copy_split(tmp_path / "copy", folder)))
    assert copied.fingerprint == folder.fingerprint


def test_copy_inside_the_folder_would_be_a_class(call: Call, flat: Path) -> None:
    with pytest.raises(UsageError, match=r"lies inside .* where it would be taken for a class"):
        call("split", flat, "--to", str(flat / "split"))


def test_to_goes_with_split_alone(call: Call, flat: Path) -> None:
    with pytest.raises(UsageError, match="--to goes with `data split`, not with `data stats`"):
        call("stats", flat, "--to", "elsewhere")


def test_show_writes_a_page_with_every_class(call: Call, make_folder: MakeFolder, tmp_path: Path) -> None:
    path = call("show", make_folder())
    assert path == tmp_path / "runs" / "tiny-data" / "doctor.html"
    assert all(name in path.read_text() for name in ("ant", "bee", "cat"))


@pytest.mark.parametrize("action", ["check", "stats", "split"])
def test_runs_directory_that_is_a_file_is_named(
    call: Call, make_folder: MakeFolder, tmp_path: Path, action: str
) -> None:
    (tmp_path / "runs").write_text("no directory")
    with pytest.raises(SlipwayError, match=rf"^{tmp_path}/runs/.*cannot be written"):
        call(action, make_folder())


def test_looking_at_data_does_not_wait_for_torch() -> None:
    code = "import sys, train.data_actions; sys.exit('torch' in sys.modules or 'sklearn' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)

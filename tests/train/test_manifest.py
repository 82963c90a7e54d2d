"""A table means what the folder means that it lists."""

import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pyarrow as pa
import pytest
from pyarrow import parquet

from tests.train.conftest import MakeFolder, data_config
from tests.train.sources import rows_of, upload, write_csv
from train import storage
from train.config import DataConfig
from train.dataset import DataError
from train.folder import read_folder
from train.manifest import read_manifest

HEADER = ("path", "label", "split")


def config_of(table: Path) -> DataConfig:
    return DataConfig(source="manifest", root=table)


def write_parquet(path: Path, rows: list[tuple[str, str, str]]) -> Path:
    parquet.write_table(pa.Table.from_pylist([dict(zip(HEADER, row, strict=True)) for row in rows]), path)
    return path


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_table_holds_what_the_folder_holds(make_folder: MakeFolder, kind: str) -> None:
    root = make_folder()
    rows = rows_of(root)
    table = (
        write_csv(root / "table.csv", [HEADER, *rows])
        if kind == "csv"
        else write_parquet(root / "table.parquet", rows)
    )
    dataset, folder = read_manifest(config_of(table)), read_folder(data_config(root))
    assert dataset.fingerprint == folder.fingerprint
    for split, samples in folder.splits.items():
        assert [dataset.read(sample) for sample in dataset.splits[split]] == [
            folder.read(sample) for sample in samples
        ]


class OnceBusy(SimpleHTTPRequestHandler):
    """Serves a folder, but the first request for each address gets 503."""

    asked: ClassVar[set[str]] = set()

    def do_GET(self) -> None:
        if self.path not in self.asked:
            self.asked.add(self.path)
            self.send_error(503)
        else:
            super().do_GET()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def web(make_folder: MakeFolder) -> Iterator[tuple[str, Path]]:
    """The address of a real server, and the folder that it serves."""
    root = make_folder(val=1, test=1)
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(OnceBusy, directory=root)) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", root
        server.shutdown()
        thread.join()


def test_images_may_lie_in_the_web(web: tuple[str, Path], tmp_path: Path) -> None:
    """A busy server is asked again; what an address is signed with is no part of a name."""
    address, root = web
    rows = [(f"{address}/{path}?signature=secret", *rest) for path, *rest in rows_of(root)]
    dataset = read_manifest(config_of(write_csv(tmp_path / "web.csv", [HEADER, *rows])))
    folder = read_folder(data_config(root))
    for split, samples in dataset.splits.items():
        assert sorted(map(dataset.read, samples)) == sorted(map(folder.read, folder.splits[split]))
        assert all(sample.file.startswith("127.0.0.1:") for sample in samples)
        assert not any("secret" in sample.file + dataset.where(sample) for sample in samples)


@pytest.mark.parametrize(
    ("path", "complaint"),
    [("gone.png", r"/gone\.png: cannot be read \(HTTP 404\)"), (":1/x.png", "cannot be read")],
    ids=["missing", "no server"],
)
def test_image_missing_in_the_web_is_named_without_its_signature(
    web: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, complaint: str
) -> None:
    monkeypatch.setattr(storage, "PATIENCE", 0)
    place = f"http://127.0.0.1{path}" if path.startswith(":") else f"{web[0]}/{path}"
    OnceBusy.asked.add("/gone.png?signature=secret")
    table = write_csv(tmp_path / "web.csv", [HEADER, (f"{place}?signature=secret", "ant", "train")])
    with pytest.raises(DataError, match=complaint) as caught:
        read_manifest(config_of(table))
    assert "secret" not in str(caught.value)


def test_image_signed_twice_is_named_without_its_signatures(tmp_path: Path) -> None:
    place = "https://images.example/a.png"
    rows = [(f"{place}?signature=secret{number}", "ant", "train") for number in (1, 2)]
    with pytest.raises(DataError, match=rf"row 3: lists {place}, which an earlier row lists as {place}$"):
        read_manifest(config_of(write_csv(tmp_path / "web.csv", [HEADER, *rows])))


def test_paths_are_relative_to_the_table_absolute_or_in_s3(
    make_folder: MakeFolder, tmp_path: Path, s3: None
) -> None:
    root = make_folder(val=1, test=1)
    upload(root, "mixed")
    rows = rows_of(root)
    places = ["../images/{}", f"{root}/{{}}", "s3://mixed/{}"]
    (tmp_path / "tables").mkdir()
    table = write_csv(
        tmp_path / "tables" / "mixed.csv",
        [HEADER, *((places[n % 3].format(path), *rest) for n, (path, *rest) in enumerate(rows))],
    )
    dataset, folder = read_manifest(config_of(table)), read_folder(data_config(root))
    for split, samples in dataset.splits.items():
        assert sorted(map(dataset.read, samples)) == sorted(map(folder.read, folder.splits[split]))
        assert all(not sample.file.startswith(("/", ".")) for sample in samples)


def test_table_without_splits_is_split_by_content(make_folder: MakeFolder) -> None:
    """Case A09: as the same images in a folder would be."""
    root = make_folder(train=30, val=10, test=10)
    rows = rows_of(root)
    table = write_csv(root / "table.csv", [HEADER[:2], *(row[:2] for row in rows)])
    before = read_manifest(config_of(table))
    assert all(before.splits.values())
    write_csv(table, [HEADER[:2], *(row[:2] for row in rows[:-1])])
    after = read_manifest(config_of(table))
    for split, samples in before.splits.items():
        assert {s.file for s in samples} - {s.file for s in after.splits[split]} <= {rows[-1][0]}


def test_class_list_gives_the_order_of_numbers(make_folder: MakeFolder, tmp_path: Path) -> None:
    """Case A03: class 2 is at index 2, because the list says so."""
    root = make_folder(tuple(str(number) for number in range(12)), train=2, val=1, test=1)
    table = write_csv(root / "table.csv", [HEADER, *rows_of(root)])
    names = tuple(str(number) for number in range(12))
    (tmp_path / "classes.txt").write_text("\n".join(names) + "\n")
    for config in (
        DataConfig(source="manifest", root=table, classes=tmp_path / "classes.txt"),
        DataConfig(root=root, classes=tmp_path / "classes.txt"),
    ):
        dataset = (read_manifest if config.source == "manifest" else read_folder)(config)
        assert dataset.classes == names
        assert all(dataset.classes[s.label] == Path(s.file).parent.name for s in dataset.splits["train"])


@pytest.mark.parametrize(
    ("listed", "message"),
    [
        ("ant\nbee\n", r"/(train|val|test)/cat: is a class that the list .*classes\.txt does not have"),
        ("ant\nbee\ncat\ndog\n", r"classes\.txt: lists 'dog', but .* has no training image of it"),
        ("ant\nbee\ncat\nant\n", r"classes\.txt: lists the class 'ant' twice"),
    ],
)
def test_class_list_that_does_not_fit_is_refused(
    make_folder: MakeFolder, tmp_path: Path, listed: str, message: str
) -> None:
    (tmp_path / "classes.txt").write_text(listed)
    with pytest.raises(DataError, match=message):
        read_folder(DataConfig(root=make_folder(), classes=tmp_path / "classes.txt"))


def test_missing_class_list_is_named(make_folder: MakeFolder, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere\.txt: cannot be read as a class list \(data\.classes\)"):
        read_folder(DataConfig(root=make_folder(), classes=tmp_path / "nowhere.txt"))


BAD_TABLES: list[tuple[list[tuple[str, ...]], str]] = [
    ([("path", "class"), ("a.png", "a")], "has no column 'label'; found path, class"),
    (
        [("path", "label", "colour"), ("a.png", "a", "red")],
        "the column 'colour' is none of path, label, split",
    ),
    ([HEADER, ("train/ant/0.png", "ant", "validation")], "row 2: the split is 'validation'; it must be"),
    ([HEADER, ("train/ant/0.png", "ant", "")], "row 2: the split is ''; it must be"),
    ([HEADER, ("train/ant/0.png", "", "train")], "row 2: path and label must not be empty"),
    (
        [HEADER, ("train/ant/0.png", "ant", "train"), ("train/./ant/0.png", "bee", "val")],
        r"row 3: lists train/\./ant/0\.png, which an earlier row lists as train/ant/0\.png",
    ),
    (
        [HEADER, ("nowhere.png", "ant", "train")],
        r"lists nowhere\.png, but .*/nowhere\.png cannot be read \(No such",
    ),
    ([HEADER, ("train/ant/0.png", "ant")], "row 2: has another number of values than the header"),
    (
        [HEADER, ("train/ant/0.png", "ant", "train", "x")],
        "row 2: has another number of values than the header",
    ),
    ([], "has no column 'label'; found none"),
]


@pytest.mark.parametrize(("rows", "message"), BAD_TABLES)
def test_bad_table_is_refused_with_its_row(
    make_folder: MakeFolder, rows: list[tuple[str, ...]], message: str
) -> None:
    table = write_csv(make_folder() / "table.csv", rows)
    with pytest.raises(DataError, match=rf"table\.csv.*{message}"):
        read_manifest(config_of(table))


def test_file_that_is_no_table_is_refused(tmp_path: Path) -> None:
    for name, message in (
        ("table.xlsx", "is neither .csv nor .parquet"),
        ("table.parquet", "cannot be read as Parquet"),
        ("table.csv", "cannot be read as CSV in UTF-8"),
    ):
        (tmp_path / name).write_bytes(b"\xff\xfe no table")
        with pytest.raises(DataError, match=message):
            read_manifest(config_of(tmp_path / name))
    with pytest.raises(DataError, match=r"there is no such file; set data\.root"):
        read_manifest(config_of(tmp_path / "nowhere.csv"))


def test_table_of_a_spreadsheet_is_read(make_folder: MakeFolder) -> None:
    """A byte order mark in front, CRLF, quotes, and names in any script (case A16)."""
    root = make_folder()
    odd = root / "train" / "ant" / 'a, "b" 图.png'
    (root / "train" / "ant" / "0.png").rename(odd)
    table = write_csv(root / "table.csv", [HEADER, *rows_of(root)])
    table.write_bytes(b"\xef\xbb\xbf" + table.read_bytes())
    dataset = read_manifest(config_of(table))
    assert odd.relative_to(root).as_posix() in {sample.file for sample in dataset.splits["train"]}

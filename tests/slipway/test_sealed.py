"""A reader sees a complete directory or none, whatever was killed when, and notices every changed byte (case B03)."""

import fcntl
import json
import logging
import os
import random
import select
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from slipway import hashing, sealed
from slipway.sealed import SealError

KIND = "checkpoint"


def publish(destination: Path, files: dict[str, bytes] | None = None, inputs: str = "") -> Path:
    with sealed.stage(destination, kind=KIND, inputs=inputs) as staging:
        for name, content in (files or {"state.pt": b"weights", "deep/er/labels.txt": b"ant\nbee\n"}).items():
            (staging / name).parent.mkdir(parents=True, exist_ok=True)
            (staging / name).write_bytes(content)
    return destination


def change(path: Path, content: bytes) -> None:
    """Overwrite a read-only file, as a failing disk does."""
    path.chmod(0o644)
    path.write_bytes(content)


def change_manifest(directory: Path, edit: Callable[[Any], None]) -> None:
    content = json.loads((directory / sealed.MANIFEST).read_bytes())
    edit(content)
    change(directory / sealed.MANIFEST, json.dumps(content).encode())


def staging_in(parent: Path) -> list[str]:
    return [path.name for path in parent.iterdir() if path.name.startswith(sealed.STAGING_PREFIX)]


Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start Python programs that talk through pipes; none outlives the test."""
    running: list[subprocess.Popen[str]] = []
    # Without the measuring of coverage: what is killed, or has no disk left, cannot write its data.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")}

    def start_program(program: str, *arguments: object) -> subprocess.Popen[str]:
        running.append(
            subprocess.Popen(
                [sys.executable, "-c", program, *map(str, arguments)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=environment,
            )
        )
        return running[-1]

    yield start_program
    for process in running:
        process.kill()
        process.communicate()


# Sealed and verified


def test_what_was_sealed_verifies(tmp_path: Path) -> None:
    directory = publish(tmp_path / "runs" / "1", inputs="abc")
    manifest = sealed.verify(directory, KIND)
    assert (manifest.kind, manifest.inputs) == (KIND, "abc")
    assert manifest.seal == hashing.of_file(directory / "manifest.json")
    assert manifest.files == {
        "state.pt": hashing.of_bytes(b"weights"),
        "deep/er/labels.txt": hashing.of_bytes(b"ant\nbee\n"),
    }
    assert staging_in(directory.parent) == []


def test_same_content_has_the_same_seal_wherever_it_lies(tmp_path: Path) -> None:
    seals = {sealed.verify(publish(tmp_path / name), KIND).seal for name in ("1", "2", "a b/ü")}
    seals.add(sealed.verify(shutil.copytree(tmp_path / "1", tmp_path / "copy"), KIND).seal)
    assert len(seals) == 1
    other = sealed.verify(publish(tmp_path / "3", {"state.pt": b"other weights"}), KIND).seal
    assert other not in seals


def test_any_file_name_can_be_sealed(tmp_path: Path) -> None:
    """Case A16."""
    names = ("kla sse ä/图.png", "a\nb", "'\"", "manifest.json.bak", "deep/manifest.json", ".hidden", "-rf")
    directory = publish(tmp_path / "1", {name: name.encode() for name in names})
    assert sealed.verify(directory, KIND).files.keys() == set(names)
    change(directory / "deep/manifest.json", b"")
    with pytest.raises(SealError):
        sealed.verify(directory, KIND)


def test_sealed_files_are_read_only(tmp_path: Path) -> None:
    directory = publish(tmp_path / "1")
    files = [path for path in directory.rglob("*") if path.is_file()]
    assert len(files) == 3
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o444 for path in files)


def test_every_flipped_byte_is_noticed(tmp_path: Path) -> None:
    content = bytes(range(64))
    directory = publish(tmp_path / "1", {"state.pt": content})
    for position in range(len(content)):
        flipped = bytearray(content)
        flipped[position] ^= 1
        change(directory / "state.pt", bytes(flipped))
        with pytest.raises(SealError, match=r"1/state\.pt: differs from the manifest"):
            sealed.verify(directory, KIND)
    change(directory / "state.pt", content)
    sealed.verify(directory, KIND)


def test_missing_file_is_named(tmp_path: Path) -> None:
    directory = publish(tmp_path / "1")
    (directory / "deep/er/labels.txt").unlink()
    with pytest.raises(SealError, match=r"1/deep/er/labels\.txt: is listed in the manifest but missing"):
        sealed.verify(directory, KIND)


@pytest.mark.parametrize("name", ["extra.txt", "deep/extra.txt", ".hidden", "deep/manifest.json"])
def test_added_file_is_named(tmp_path: Path, name: str) -> None:
    directory = publish(tmp_path / "1")
    (directory / name).write_bytes(b"")
    with pytest.raises(SealError, match=f"1/{name}: is not listed in the manifest"):
        sealed.verify(directory, KIND)


def test_link_is_no_substitute_for_a_file(tmp_path: Path) -> None:
    """Its target can change after the seal was checked."""
    directory = publish(tmp_path / "1")
    (directory / "state.pt").unlink()
    (tmp_path / "elsewhere").write_bytes(b"weights")
    (directory / "state.pt").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SealError, match=r"1/state\.pt"):
        sealed.verify(directory, KIND)


def test_link_is_no_substitute_for_a_folder(tmp_path: Path) -> None:
    directory = publish(tmp_path / "1")
    (directory / "deep").rename(tmp_path / "elsewhere")
    (directory / "deep").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SealError, match="1/deep"):
        sealed.verify(directory, KIND)


def test_added_link_to_a_folder_is_named(tmp_path: Path) -> None:
    directory = publish(tmp_path / "1")
    (directory / "more").symlink_to(tmp_path)
    with pytest.raises(SealError, match="1/more: is not listed in the manifest"):
        sealed.verify(directory, KIND)


@pytest.mark.parametrize("target", ["state.pt", "/nowhere"])
def test_links_are_not_sealed(tmp_path: Path, target: str) -> None:
    def publish_link() -> None:
        with sealed.stage(tmp_path / "1", kind=KIND) as staging:
            (staging / "state.pt").write_bytes(b"weights")
            (staging / "link").symlink_to(target)

    with pytest.raises(SealError, match="a sealed directory holds files, not links"):
        publish_link()
    assert list(tmp_path.iterdir()) == []


def test_what_was_sealed_elsewhere_is_received_as_it_is(tmp_path: Path) -> None:
    """And what is not as its manifest says is not received."""
    there = publish(tmp_path / "there" / "1", inputs="abc")
    for damage in (True, False):
        with (
            pytest.raises(SealError, match="differs from the manifest") if damage else nullcontext(),
            sealed.receive(tmp_path / "here" / "1", kind=KIND) as staging,
        ):
            shutil.copytree(there, staging, dirs_exist_ok=True)
            if damage:
                change(staging / "state.pt", b"wrights")
        assert staging_in(tmp_path / "here") == []
        assert (tmp_path / "here" / "1").exists() is not damage
    assert sealed.verify(tmp_path / "here" / "1", KIND) == sealed.read_manifest(there)
    with pytest.raises(SealError, match="is already there"), sealed.receive(there, kind=KIND) as staging:
        shutil.copytree(tmp_path / "here" / "1", staging, dirs_exist_ok=True)


def test_another_kind_is_refused(tmp_path: Path) -> None:
    directory = publish(tmp_path / "1")
    with pytest.raises(SealError, match="1: is a sealed checkpoint, not a bundle"):
        sealed.verify(directory, "bundle")


def test_directory_without_manifest_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(SealError, match=r"is not a sealed directory \(no manifest\.json\)"):
            sealed.verify(path, KIND)


@pytest.mark.parametrize("name", ["../outside", "/etc/hostname", "deep/../../outside"])
def test_manifest_cannot_point_outside(tmp_path: Path, name: str) -> None:
    directory = publish(tmp_path / "1")
    (tmp_path / "outside").write_bytes(b"")
    change_manifest(
        directory, lambda content: content["files"].update({name: {"sha256": hashing.of_bytes(b"")}})
    )
    with pytest.raises(SealError, match="which lies outside the directory"):
        sealed.verify(directory, KIND)


@pytest.mark.parametrize(
    "content",
    [b"", b"\0\0\0", b"\xff", b"[]", b"null", b"3", b'{"format": 1}', b"{" * 100_000, b"[" * 100_000],
)
def test_garbage_instead_of_a_manifest_is_refused(tmp_path: Path, content: bytes) -> None:
    directory = publish(tmp_path / "1")
    change(directory / sealed.MANIFEST, content)
    with pytest.raises(SealError, match=r"1/manifest\.json: "):
        sealed.verify(directory, KIND)


def test_manifest_cut_anywhere_is_refused(tmp_path: Path) -> None:
    directory = publish(tmp_path / "1", {"state.pt": b"weights"})
    content = (directory / sealed.MANIFEST).read_bytes()
    for length in range(len(content) - 2):  # the last two are the bracket and the line's end
        change(directory / sealed.MANIFEST, content[:length])
        with pytest.raises(SealError):
            sealed.verify(directory, KIND)


@pytest.mark.parametrize("key", ["format", "kind", "files"])
@pytest.mark.parametrize("value", [None, 3, "text", [], {"state.pt": "hash"}])
def test_manifest_of_another_make_is_refused(tmp_path: Path, key: str, value: object) -> None:
    directory = publish(tmp_path / "1")
    change_manifest(directory, lambda content: content.update({key: value}))
    with pytest.raises(SealError):
        sealed.verify(directory, KIND)


@pytest.mark.parametrize("key", ["format", "kind", "inputs", "files"])
def test_manifest_that_lacks_something_is_refused(tmp_path: Path, key: str) -> None:
    directory = publish(tmp_path / "1")
    change_manifest(directory, lambda content: content.pop(key))
    with pytest.raises(SealError, match=f"cannot be read as a manifest .KeyError.'{key}'"):
        sealed.verify(directory, KIND)


def test_unreadable_file_is_a_damaged_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failing disk gives errors, not other bytes."""

    def fail(path: Path) -> str:
        raise OSError(5, "Input/output error")

    directory = publish(tmp_path / "1")
    monkeypatch.setattr(hashing, "of_file", fail)
    with pytest.raises(SealError, match=r"1/\S+: cannot be read .*Input/output error"):
        sealed.verify(directory, KIND)


def test_a_directory_that_is_removed_while_it_is_verified_is_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = publish(tmp_path / "1", {"deep/state.pt": b"weights"})
    scandir = os.scandir

    def scan(path: Path) -> Any:
        if Path(path).name == "deep" and directory.exists():
            directory.rename(tmp_path / "gone")
        return scandir(path)

    monkeypatch.setattr(os, "scandir", scan)
    with pytest.raises(SealError, match=r"/1: cannot be looked through .*No such file or directory"):
        sealed.verify(directory, KIND)


# Publishing


def test_sealed_directory_is_never_overwritten(tmp_path: Path) -> None:
    directory = publish(tmp_path / "1")
    seal = sealed.verify(directory, KIND).seal
    with pytest.raises(SealError, match="1: is already there; sealed directories are never overwritten"):
        publish(directory, {"state.pt": b"others"})
    assert sealed.verify(directory, KIND).seal == seal
    assert staging_in(tmp_path) == []


def test_empty_directory_in_the_way_is_not_replaced(tmp_path: Path) -> None:
    """rename() would."""
    (tmp_path / "1").mkdir()
    with pytest.raises(SealError, match="is already there"):
        publish(tmp_path / "1")
    assert list((tmp_path / "1").iterdir()) == []


def test_of_two_publishers_exactly_one_wins(tmp_path: Path) -> None:
    def overtaken() -> None:
        with sealed.stage(tmp_path / "1", kind=KIND) as staging:
            (staging / "state.pt").write_bytes(b"late")
            publish(tmp_path / "1", {"state.pt": b"early"})

    with pytest.raises(SealError, match="is already there"):
        overtaken()
    assert (tmp_path / "1/state.pt").read_bytes() == b"early"
    sealed.verify(tmp_path / "1", KIND)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_error_while_writing_leaves_nothing_behind(tmp_path: Path, error: type[BaseException]) -> None:
    def interrupted() -> None:
        with sealed.stage(tmp_path / "1", kind=KIND) as staging:
            (staging / "state.pt").write_bytes(b"weights")
            raise error

    with pytest.raises(error):
        interrupted()
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_visible_before_it_is_complete(tmp_path: Path) -> None:
    with sealed.stage(tmp_path / "1", kind=KIND) as staging:
        (staging / "state.pt").write_bytes(b"weights")
        assert not (tmp_path / "1").exists()
        assert staging.parent == tmp_path  # so that the rename stays within one file system
        assert sealed.sealed_in(tmp_path) == []
    assert sealed.sealed_in(tmp_path) == [tmp_path / "1"]


def test_everything_is_on_disk_before_it_is_visible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A power cut right after the rename must not leave an empty file under the final name."""
    events: list[int | str] = []
    fsync, rename = os.fsync, os.rename

    def note_fsync(descriptor: int) -> None:
        events.append(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    def note_rename(source: Path, destination: Path) -> None:
        events.append("rename")
        rename(source, destination)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "rename", note_rename)
    directory = publish(tmp_path / "1")
    visible = events.index("rename")
    everything = {path.stat().st_ino for path in (directory, *directory.rglob("*"))}
    assert len(everything) == 6
    assert set(events[:visible]) == everything
    assert events[visible + 1 :] == [tmp_path.stat().st_ino]


def test_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(SealError, match=r"file/runs/1: could not be written .* MB are free there"):
        publish(tmp_path / "file" / "runs" / "1")
    assert (tmp_path / "file").read_bytes() == b""


# Killed


DIES_WHEN = """
import os, signal, sys
from pathlib import Path
from slipway import sealed

def die(*arguments):
    os.kill(os.getpid(), signal.SIGKILL)

owner, name, after = {"sealed": sealed, "os": os}[sys.argv[2]], sys.argv[3], sys.argv[4] == "after"
if name:
    original = getattr(owner, name)
    setattr(owner, name, lambda *arguments: (original(*arguments), die()) if after else die())
with sealed.stage(Path(sys.argv[1]), kind="checkpoint") as staging:
    (staging / "state.pt").write_bytes(bytes(1000))
    if not name:
        die()
"""


@pytest.mark.parametrize(
    ("owner", "function", "moment", "published"),
    [
        ("os", "", "", False),
        ("sealed", "_write_manifest", "before", False),
        ("sealed", "write_json", "before", False),
        ("sealed", "write_json", "after", False),
        ("sealed", "_flush", "before", False),
        ("sealed", "fsync", "after", False),
        ("sealed", "_flush", "after", False),
        ("os", "rename", "before", False),
        ("os", "rename", "after", True),
    ],
)
def test_killed_while_writing_leaves_no_directory(
    tmp_path: Path, start: Start, owner: str, function: str, moment: str, *, published: bool
) -> None:
    previous = publish(tmp_path / "step-1")
    process = start(DIES_WHEN, tmp_path / "step-2", owner, function, moment)
    assert process.wait(30) == -signal.SIGKILL
    assert (tmp_path / "step-2").exists() == published
    assert len(staging_in(tmp_path)) == (not published)
    newest = sealed.newest_good(tmp_path, KIND)
    assert newest == (tmp_path / "step-2" if published else previous)
    publish(tmp_path / "step-3")
    assert staging_in(tmp_path) == []


PUBLISHES_FOR_EVER = """
import itertools, os, sys
from pathlib import Path
from slipway import sealed

for number in itertools.count():
    with sealed.stage(Path(sys.argv[1], f"run-{sys.argv[2]}-step-{number}"), kind="checkpoint") as staging:
        for part in range(4):
            (staging / f"{part}.pt").write_bytes(os.urandom(100_000))
    if number == 0:
        print("ready", flush=True)
"""


def test_killed_at_any_moment_leaves_only_whole_directories(tmp_path: Path, start: Start) -> None:
    """Case B03 (a). Each process clears away what the one before it left."""
    moments = random.Random(0)
    abandoned = 0
    for run in range(15):
        process = start(PUBLISHES_FOR_EVER, tmp_path, run)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        assert len(staging_in(tmp_path)) <= 1  # this process's own
        time.sleep(moments.uniform(0, 0.03))
        process.kill()
        assert process.wait(30) == -signal.SIGKILL
        visible = [path for path in tmp_path.iterdir() if not path.name.startswith(".")]
        assert visible
        for directory in visible:
            sealed.verify(directory, KIND)
        abandoned += len(staging_in(tmp_path))
    assert abandoned > 0, "no kill fell into a publication"
    publish(tmp_path / "step-last")
    assert staging_in(tmp_path) == []


def test_directory_that_somebody_is_writing_is_not_taken_for_abandoned(tmp_path: Path, start: Start) -> None:
    """Whatever their process ids: in containers that share a volume, both may be process 1."""
    (tmp_path / ".staging-left-behind").mkdir()
    (tmp_path / ".staging-left-behind" / "state.pt").touch(0o444)
    with sealed.stage(tmp_path / "1", kind=KIND) as staging:
        (staging / "state.pt").write_bytes(b"weights")
        process = start(PUBLISHES_FOR_EVER, tmp_path, 0)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.kill()
        process.wait(30)
        assert ".staging-left-behind" not in staging_in(tmp_path)
        assert staging.name in staging_in(tmp_path)
    sealed.verify(tmp_path / "1", KIND)


@pytest.mark.parametrize("when", ["open", "lock"])
def test_directory_that_is_taken_for_abandoned_before_it_is_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    locked: list[int] = []
    opened, lock = os.open, fcntl.flock

    def remove_at_first() -> None:
        if not locked and staging_in(tmp_path):
            locked.append(0)
            shutil.rmtree(tmp_path / staging_in(tmp_path)[0])

    def open_late(path: Any, flags: int, *arguments: Any, **more: Any) -> int:
        if when == "open" and Path(path).parent == tmp_path:
            remove_at_first()
        return opened(path, flags, *arguments, **more)

    def lock_late(descriptor: int, operation: int) -> None:
        if when == "lock":
            remove_at_first()
        lock(descriptor, operation)

    monkeypatch.setattr(os, "open", open_late)
    monkeypatch.setattr(fcntl, "flock", lock_late)
    with sealed.stage(tmp_path / "1", kind=KIND) as staging:
        assert locked
        with sealed._descriptor(staging) as other, pytest.raises(BlockingIOError):
            lock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        (staging / "state.pt").touch()
    sealed.verify(tmp_path / "1", KIND)


# Disk full


FILLS_THE_DISK = """
import resource, sys
from pathlib import Path
from slipway import command, sealed

def main(arguments):
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(arguments[1]), resource.RLIM_INFINITY))
    with sealed.stage(Path(arguments[0]), kind="checkpoint") as staging:
        for name in range(20):
            (staging / str(name)).write_bytes(bytes(int(arguments[2])))

command.run(main)
"""


@pytest.mark.parametrize(
    ("limit", "size"), [(10_000, 20_000), (500, 100)], ids=["in a file", "in the manifest"]
)
def test_full_disk_publishes_nothing_and_says_so(tmp_path: Path, start: Start, limit: int, size: int) -> None:
    """Case B03 (b)."""
    previous = publish(tmp_path / "step-1")
    process = start(FILLS_THE_DISK, tmp_path / "step-2", limit, size)
    output, errors = process.communicate(timeout=30)
    assert (process.returncode, output) == (1, "")
    (line,) = errors.splitlines()
    assert line.startswith(f"error: {tmp_path}/step-2: could not be written (")
    assert "File too large" in line
    assert " MB are free there. Nothing was published" in line
    assert list(tmp_path.iterdir()) == [previous]
    sealed.verify(previous, KIND)


# Last good


def test_newest_good_passes_over_damaged_ones_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second, third, fourth = (publish(tmp_path / f"step-{number:08d}") for number in (1, 9, 10, 11))
    assert sealed.newest_good(tmp_path, KIND) == fourth
    assert caplog.messages == []
    change(fourth / "state.pt", b"wrights")
    change(third / sealed.MANIFEST, b"")
    assert sealed.newest_good(tmp_path, KIND) == second
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2
    assert [str(path) in message for path, message in zip((fourth, third), caplog.messages, strict=True)] == [
        True
    ] * 2
    for path in (first, second):
        (path / "state.pt").unlink()
    assert sealed.newest_good(tmp_path, KIND) is None


def test_newest_good_of_nothing_is_none(tmp_path: Path) -> None:
    assert sealed.newest_good(tmp_path / "nowhere", KIND) is None
    (tmp_path / "plain").mkdir()
    (tmp_path / "file").touch()
    assert sealed.newest_good(tmp_path, KIND) is None


def test_made_from_finds_equal_inputs_and_no_others(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    publish(tmp_path / "1", inputs="abc")
    again = publish(tmp_path / "2", inputs="abc")
    publish(tmp_path / "3", inputs="abcd")
    assert sealed.made_from(tmp_path, KIND, "abc") == again
    assert sealed.made_from(tmp_path, KIND, "ab") is None
    assert caplog.messages == []
    change(again / "state.pt", b"wrights")
    assert sealed.made_from(tmp_path, KIND, "abc") == tmp_path / "1"
    assert len(caplog.messages) == 1
    assert sealed.made_from(tmp_path, "bundle", "abc") is None


# One at a time


TAKES_THE_LOCK = """
import logging, sys
from pathlib import Path
from slipway import sealed

logging.basicConfig(level=logging.INFO, format="%(message)s")
with sealed.only_one(Path(sys.argv[1]), "the bundles"):
    print("in", flush=True)
    sys.stdin.readline()
"""


def take_lock(start: Start, path: Path) -> subprocess.Popen[str]:
    process = start(TAKES_THE_LOCK, path)
    assert process.stdout is not None
    assert process.stdout.readline() == "in\n"
    return process


@pytest.mark.parametrize("end", ["leaves", "is killed"])
def test_second_process_says_so_and_waits_for_the_first(tmp_path: Path, start: Start, end: str) -> None:
    first = take_lock(start, tmp_path / "bundles" / "digits")
    second = start(TAKES_THE_LOCK, tmp_path / "bundles" / "digits")
    assert first.stdin is not None
    assert second.stdout is not None
    assert second.stderr is not None
    assert second.stderr.readline() == "another process is busy with the bundles; waiting for it\n"
    assert select.select([second.stdout], [], [], 0.1)[0] == []
    if end == "leaves":
        first.stdin.write("\n")
        first.stdin.flush()
    else:
        first.kill()
    assert second.stdout.readline() == "in\n"


def test_work_on_other_paths_goes_on(tmp_path: Path, start: Start) -> None:
    take_lock(start, tmp_path / "digits")
    take_lock(start, tmp_path / "letters")


def test_place_without_room_for_a_lock_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with (
        pytest.raises(SealError, match=r"file/a: cannot be written: its lock cannot be had"),
        sealed.only_one(tmp_path / "file" / "a", "a"),
    ):
        pytest.fail("nobody holds the lock")


def test_error_inside_stays_what_it_is(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="inside"), sealed.only_one(tmp_path / "a", "a"):
        raise OSError("inside")


def test_lock_is_given_back_after_an_error(tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.raises(ValueError, match="inside"), sealed.only_one(tmp_path / "a", "a"):
            raise ValueError("inside")
    (lock,) = tmp_path.iterdir()
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert sealed.sealed_in(tmp_path) == []


# JSON


def test_json_is_written_one_way_and_without_nan(tmp_path: Path) -> None:
    sealed.write_json(tmp_path / "a.json", {"b": [1, 2.5], "a": "ä"})
    assert (
        tmp_path / "a.json"
    ).read_bytes() == '{\n  "a": "ä",\n  "b": [\n    1,\n    2.5\n  ]\n}\n'.encode()
    with pytest.raises(ValueError, match="not JSON compliant"):
        sealed.write_json(tmp_path / "b.json", float("nan"))
    assert not (tmp_path / "b.json").exists()

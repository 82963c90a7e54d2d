"""A release travels whole, through a real S3 server, or does not arrive."""

import re
import shutil
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from unittest.mock import Mock
from urllib.parse import urlsplit

import obstore
import pytest
from obstore.store import S3Store

from serve import remote, repository
from serve.release import Release, open_release
from serve.remote import RemoteError
from serve.server import LOOPBACK, free_ports
from slipway import sealed
from slipway.bundle import Bundle
from slipway.errors import UsageError
from slipway.sealed import SealError
from slipway.signing import SignatureError
from tests.s3 import ACCESS, make_bucket, s3_server
from tests.serve.tools import CPUS, edit_text, variant
from tests.slipway.test_signing import make_keys

pytestmark = pytest.mark.integration

LABELS = "models/classify/labels.txt"


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with s3_server(tmp_path_factory.mktemp("s3") / "log") as url:
        yield url


def let_in(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    for name, value in {**ACCESS, "AWS_ENDPOINT_URL": endpoint}.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def place(s3: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """In a bucket of its own, and what lets us in where that is to come from: the environment."""
    let_in(monkeypatch, s3)
    bucket = f"bucket-{uuid.uuid4()}"
    make_bucket(s3, bucket)
    return f"s3://{bucket}/team/models"


def store_of(address: str) -> S3Store:
    parts = urlsplit(address)
    return S3Store(parts.netloc, prefix=parts.path.strip("/"), client_options={"allow_http": True})


def files_at(address: str) -> dict[str, bytes]:
    """Everything below an address."""
    store = store_of(address)
    found = [entry["path"] for entries in obstore.list(store) for entry in entries]
    return {path: bytes(obstore.get(store, path).bytes()) for path in found}


def files_in(directory: Path) -> dict[str, bytes]:
    return {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }


def nothing_in(repository_directory: Path) -> bool:
    """No release, and nothing of one."""
    return not [
        path for path in repository_directory.rglob("*") if not path.name.endswith(".lock") and path.is_file()
    ]


def test_what_was_pushed_is_pulled_as_it_was(release: Release, place: str, tmp_path: Path) -> None:
    address = remote.push(release.directory, f"{place}/")
    assert address == f"{place}/{release.directory.name}"
    pulled = remote.pull(address, tmp_path)
    assert pulled == tmp_path / "releases" / release.directory.name
    assert files_in(pulled) == files_in(release.directory) == files_at(address)
    assert open_release(pulled).identity == release.identity


def test_both_may_be_done_again(
    release: Release, place: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    address = remote.push(release.directory, place)
    assert remote.push(release.directory, place) == address
    assert f"{address} is there already" in caplog.text
    pulled = remote.pull(address, tmp_path)
    assert remote.pull(address, tmp_path) == pulled
    assert f"{pulled} is here already" in caplog.text


@pytest.fixture
def other(release: Release, tmp_path: Path) -> Release:
    """Another release under the same name."""
    directory = tmp_path / "elsewhere" / release.directory.name
    return variant(
        release, directory, lambda models: edit_text(models / "classify" / "labels.txt", "3\n", "three\n")
    )


def test_no_release_is_overwritten_by_another(
    release: Release, other: Release, place: str, tmp_path: Path
) -> None:
    address = remote.push(release.directory, place)
    before = files_at(address)
    with pytest.raises(RemoteError, match=f"{address}: is another release; releases are never overwritten"):
        remote.push(other.directory, place)
    assert files_at(address) == before
    elsewhere = remote.push(other.directory, f"{place}/elsewhere")
    pulled = remote.pull(address, tmp_path)
    with pytest.raises(RemoteError, match=f"{pulled}: is another release than {elsewhere}"):
        remote.pull(elsewhere, tmp_path)
    assert files_in(pulled) == files_in(release.directory)


def test_a_push_that_is_cut_short_is_no_release_until_it_is_done_again(
    release: Release, other: Release, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless another release has begun to lie there."""
    put, count = obstore.put, 0

    def cut(*arguments: object, **options: object) -> object:
        nonlocal count
        count += 1
        if count > len(sealed.read_manifest(release.directory).files):
            raise KeyboardInterrupt
        return put(*arguments, **options)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(obstore, "put", cut)
        with pytest.raises(KeyboardInterrupt):
            remote.push(release.directory, place)
    address = f"{place}/{release.directory.name}"
    assert files_at(address).keys() == sealed.read_manifest(release.directory).files.keys()
    with pytest.raises(RemoteError, match=r"no release is there \(no manifest\.json\), or not all of it yet"):
        remote.pull(address, tmp_path)
    assert nothing_in(tmp_path / "releases")
    with pytest.raises(RemoteError, match=r"labels\.txt: is there already, and is another"):
        remote.push(other.directory, place)
    # What is there already may be too large for memory: only the manifest is read as a whole.
    with monkeypatch.context() as patch:
        as_a_whole = Mock(wraps=remote._read)
        patch.setattr(remote, "_read", as_a_whole)
        remote.push(release.directory, place)
    assert [call.args[1] for call in as_a_whole.call_args_list] == ["manifest.json"]
    assert files_in(remote.pull(address, tmp_path)) == files_in(release.directory)


@pytest.mark.parametrize("change", ["is changed", "is cut short", "is not there"])
def test_what_is_not_as_the_manifest_says_does_not_arrive(
    release: Release, place: str, tmp_path: Path, change: str
) -> None:
    address = remote.push(release.directory, place)
    store = store_of(address)
    content = bytes(obstore.get(store, LABELS).bytes())
    if change == "is not there":
        obstore.delete(store, LABELS)
        words = f"{address}/{LABELS}: the storage says: .*not found"
    else:
        obstore.put(store, LABELS, content[:-1] if change == "is cut short" else content.upper() + b"x")
        words = f"{address}/{LABELS}: differs from the manifest"
    with pytest.raises(RemoteError, match=words):
        remote.pull(address, tmp_path)
    assert nothing_in(tmp_path)


@pytest.mark.parametrize(
    ("manifest", "words"),
    [
        (b"{", "cannot be read as a manifest"),
        (
            b'{"format": "slipway-sealed/1", "kind": "release", "inputs": "", "files": {"../x": {"sha256": ""}}}',
            "names '../x', which lies outside",
        ),
    ],
)
def test_a_manifest_that_makes_no_sense_is_named_by_its_address(
    place: str, tmp_path: Path, manifest: bytes, words: str
) -> None:
    obstore.put(store_of(place), "tiny-1/manifest.json", manifest)
    with pytest.raises(SealError, match=f"{place}/tiny-1/manifest.json: {words}"):
        remote.pull(f"{place}/tiny-1", tmp_path)
    assert nothing_in(tmp_path)


def test_only_what_its_owner_signed_is_pulled_where_a_key_is_named(
    bundle: Bundle, release: Release, place: str, tmp_path: Path
) -> None:
    """Nor is an older release of the same owner pulled under the name of a new one."""
    private, public = make_keys(tmp_path, "owner")
    _, foreign = make_keys(tmp_path, "somebody")
    signed = repository.publish(bundle.directory, tmp_path / "own", "embedded", CPUS, sign_key=private)
    assert (
        repository.publish(bundle.directory, tmp_path / "own", "embedded", CPUS, sign_key=private) == signed
    )
    address, unsigned = remote.push(signed, place), remote.push(release.directory, f"{place}/unsigned")
    here = tmp_path / "here"
    for wanted, key, words in (
        (unsigned, public, f"^{unsigned}: is not signed"),
        (address, foreign, f"^{address}: is not as the owner of .*somebody.pub signed it"),
    ):
        with pytest.raises(SignatureError, match=words):
            remote.pull(wanted, here, key)
    for name in ("tiny-2", "tiny-1-2", "tiny-1-9f86d081"):
        as_new = remote.push(shutil.copytree(signed, tmp_path / name), place)
        with pytest.raises(RemoteError, match=f"^{as_new}: was published as tiny-1, and is not {name}"):
            remote.pull(as_new, here, public)
    assert nothing_in(here)
    pulled = remote.pull(address, here, public)
    with pytest.raises(SignatureError, match=r"somebody\.pub signed it"):
        remote.pull(address, here, foreign)
    assert files_in(pulled) == files_in(signed)


def test_a_release_that_does_not_say_its_name_is_to_be_published_again(
    release: Release, place: str, tmp_path: Path
) -> None:
    """Nor is it when it lies here already. It is opened as ever."""
    old = variant(
        release,
        tmp_path / "releases" / "tiny-1",
        lambda models: edit_text(models.parent / "release.json", '"name": "tiny-1",', ""),
    )
    assert old.identity == release.identity
    address = remote.push(old.directory, place)
    for here in (tmp_path / "elsewhere", tmp_path):
        with pytest.raises(
            RemoteError, match=f"^{address}: does not say .* published as.*; publish it again"
        ):
            remote.pull(address, here)
    assert nothing_in(tmp_path / "elsewhere")


@contextmanager
def breaking_off(directory: Path, *, always: bool) -> Iterator[tuple[str, list[str]]]:
    """Storage that gives only half of what it is asked for, for the first time or always, and then hangs up.

    Yields its endpoint, and what it was asked for.
    """
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.removeprefix("/bucket/")
            content = (directory.parent / path).read_bytes()
            begin = re.match(r"bytes=(\d+)-", self.headers.get("Range", ""))
            rest = content[int(begin[1]) :] if begin else content
            self.send_response(206 if begin else 200)
            self.send_header("Content-Length", str(len(rest)))
            self.send_header("ETag", '"the same"')
            self.send_header("Last-Modified", "Mon, 30 Nov 2026 00:00:00 GMT")
            if begin:
                self.send_header("Content-Range", f"bytes {begin[1]}-{len(content) - 1}/{len(content)}")
            self.end_headers()
            self.wfile.write(rest[: len(rest) // 2] if always or path not in asked else rest)
            self.close_connection = True
            asked.append(path)

        def log_message(self, *arguments: object) -> None:
            """Says nothing."""

    with ThreadingHTTPServer((LOOPBACK, 0), Handler) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            yield f"http://{LOOPBACK}:{server.server_port}", asked
        finally:
            server.shutdown()


def test_a_transfer_that_breaks_off_goes_on_where_it_stopped(
    release: Release, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with breaking_off(release.directory, always=False) as (endpoint, asked):
        let_in(monkeypatch, endpoint)
        pulled = remote.pull(f"s3://bucket/{release.directory.name}", tmp_path)
    assert files_in(pulled) == files_in(release.directory)
    assert len(asked) > len(set(asked))


def test_a_transfer_that_breaks_off_again_and_again_leaves_nothing(
    release: Release, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with breaking_off(release.directory, always=True) as (endpoint, _):
        let_in(monkeypatch, endpoint)
        with pytest.raises(RemoteError, match="the storage says"):
            remote.pull(f"s3://bucket/{release.directory.name}", tmp_path)
    assert nothing_in(tmp_path)


def test_nobody_there_is_told_without_any_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    let_in(monkeypatch, f"http://{LOOPBACK}:{free_ports().http}")
    with pytest.raises(
        RemoteError, match=r"^s3://bucket/tiny-1/manifest\.json: the storage says: .*"
    ) as refused:
        remote.pull("s3://bucket/tiny-1", tmp_path)
    said = "".join([str(refused.value), *capfd.readouterr()])
    assert "come from AWS_* in the environment" in said
    assert not [value for name, value in ACCESS.items() if "REGION" not in name and value in said]
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "address",
    [
        "bucket/tiny-1",
        "s3://bucket",
        "s3://bucket/.tiny",
        "s3:///a",
        "s3://b/x y",
        "s3://b/../x",
        "s3://b/./x",
        "s3://../x",
        "s3://b/\x7f/x",
    ],
)
def test_what_is_no_address_is_wrong_usage(tmp_path: Path, address: str) -> None:
    with pytest.raises(UsageError, match="is no address of a release; expected s3://bucket/prefix/release"):
        remote.pull(address, tmp_path)

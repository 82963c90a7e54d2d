"""Where a key is named, nothing of a bundle is read before it proved to be signed by the owner of that key."""

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from serve import repository
from slipway import bundle as bundles
from slipway import sealed
from slipway.bundle import Bundle
from slipway.paths import PROJECT_ROOT
from slipway.signing import SIGNATURE, SignatureError, sign
from tests.serve.tools import CPUS
from tests.slipway.test_signing import make_keys


def nothing(staging: Path) -> None:
    """What is done to a bundle before it is sealed again."""


def resealed(bundle: Bundle, destination: Path, change: Callable[[Path], None] = nothing) -> Path:
    """The bundle as somebody would hand it over who changed it and sealed it again."""
    with sealed.stage(destination, kind=bundles.KIND) as staging:
        ignored = shutil.ignore_patterns(sealed.MANIFEST)
        shutil.copytree(bundle.directory, staging, dirs_exist_ok=True, ignore=ignored)
        for path in staging.rglob("*"):
            path.chmod(0o755 if path.is_dir() else 0o644)
        change(staging)
    return destination


@pytest.fixture
def keys(tmp_path: Path) -> tuple[Path, Path]:
    return make_keys(tmp_path, "owner")


def test_bundle_that_its_owner_signed_is_published(
    bundle: Bundle, keys: tuple[Path, Path], tmp_path: Path
) -> None:
    private, public = keys
    signed = resealed(bundle, tmp_path / "tiny" / "1", lambda staging: sign(staging, private))
    release = repository.publish(signed, tmp_path / "repository", "embedded", CPUS, public_key=public)
    assert (release / "release.json").is_file()


def flip_a_byte(staging: Path) -> None:
    model = staging / bundles.MODEL
    content = model.read_bytes()
    model.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def swap_labels(staging: Path) -> None:
    labels = staging / bundles.LABELS
    labels.write_bytes(b"".join(reversed(labels.read_bytes().splitlines(keepends=True))))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda staging: (staging / SIGNATURE).unlink(), "is not signed"),
        (flip_a_byte, r"Hash mismatch for .*model\.onnx"),
        (swap_labels, r"Hash mismatch for .*labels\.txt"),
        (lambda staging: (staging / "more.bin").touch(), r"more\.bin"),
    ],
    ids=["unsigned", "a byte flipped", "labels swapped", "a file added"],
)
def test_what_its_owner_did_not_sign_is_refused_before_anything_of_it_is_read(
    bundle: Bundle,
    keys: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[Path], None],
    words: str,
) -> None:
    private, public = keys

    def sign_and_change(staging: Path) -> None:
        sign(staging, private)
        change(staging)

    changed = resealed(bundle, tmp_path / "tiny" / "1", sign_and_change)
    monkeypatch.setattr(bundles, "open_bundle", lambda _: pytest.fail("it was opened"))
    with pytest.raises(SignatureError, match=words):
        repository.publish(changed, tmp_path / "repository", "embedded", CPUS, public_key=public)
    assert not (tmp_path / "repository").exists()


def test_foreign_key_is_refused_on_the_command_line(
    bundle: Bundle, keys: tuple[Path, Path], tmp_path: Path
) -> None:
    signed = resealed(bundle, tmp_path / "tiny" / "1", lambda staging: sign(staging, keys[0]))
    _, foreign = make_keys(tmp_path, "somebody")
    command = [
        sys.executable,
        "-m",
        "serve",
        "publish",
        "--bundle",
        str(signed),
        "--public-key",
        str(foreign),
    ]
    command += ["--repository", str(tmp_path / "repository")]
    done = subprocess.run(command, cwd=PROJECT_ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch(r"error: .*: is not as the owner of .*somebody\.pub signed it .*\n", done.stderr)
    assert not (tmp_path / "repository").exists()

"""Publishing: complete, proven, self-contained, never overwritten, and switched in one step."""

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from serve import repository
from serve.release import Release, open_release
from serve.repository import PublishError
from slipway import bundle as bundles
from slipway import hashing, sealed
from slipway.bundle import Bundle
from slipway.errors import SlipwayError
from slipway.paths import PROJECT_ROOT
from slipway.preprocessing import preprocess
from slipway.sealed import SealError
from tests.serve.tools import CPUS, make_bundle


def publish(bundle: Bundle, models: Path, *, cpus: int = CPUS) -> Path:
    return repository.publish(bundle.directory, models, "embedded", cpus)


def test_release_carries_the_preprocessing_of_the_package_not_a_copy_that_may_drift(
    bundle: Bundle, tmp_path: Path
) -> None:
    """Case D01."""
    carried = publish(bundle, tmp_path) / "models" / "preprocess" / "1" / "slipway"
    assert {path.name for path in carried.iterdir()} >= {"preprocessing.py", "contract.py"}
    for path in carried.iterdir():
        assert hashing.of_file(path) == hashing.of_file(PROJECT_ROOT / "src" / "slipway" / path.name)


IMPORT_ALONE = """
import sys
sys.path = [path for path in sys.path if path not in {outside}]
sys.path.insert(0, {model})
import serve.models.environment, slipway.bundle, slipway.preprocessing
for name, module in sys.modules.items():
    assert name.split(".")[0] not in ("serve", "slipway") or module.__file__.startswith({model}), name
"""


def test_release_carries_all_code_that_its_preprocessing_runs(release: Release) -> None:
    model = release.models / "preprocess" / "1"
    outside = [str(PROJECT_ROOT), str(PROJECT_ROOT / "src"), ""]
    script = IMPORT_ALONE.format(outside=outside, model=repr(str(model)))
    subprocess.run([sys.executable, "-B", "-c", script], check=True, cwd=model)


def test_labels_are_the_same_bytes_in_bundle_and_release(bundle: Bundle, release: Release) -> None:
    """Case A03."""
    expected = "".join(f"{k}\n" for k in range(12)).encode()
    assert (bundle.directory / "labels.txt").read_bytes() == expected
    for model in ("classifier", "classify"):
        assert (release.models / model / "labels.txt").read_bytes() == expected


def test_publishing_the_same_again_finds_it(bundle: Bundle, tmp_path: Path) -> None:
    first = publish(bundle, tmp_path)
    written = (first / sealed.MANIFEST).stat().st_mtime_ns
    assert publish(bundle, tmp_path) == first
    assert (first / sealed.MANIFEST).stat().st_mtime_ns == written
    assert len(list((tmp_path / "releases").iterdir())) == 1


def test_another_release_of_the_same_version_stands_beside_the_first(bundle: Bundle, tmp_path: Path) -> None:
    first = publish(bundle, tmp_path)
    before = hashing.of_file(first / sealed.MANIFEST)
    second = publish(bundle, tmp_path, cpus=1)
    assert first.name == "tiny-1"
    assert second.name.startswith("tiny-1-")
    assert [open_release(one).name for one in (first, second)] == [first.name, second.name]
    assert hashing.of_file(first / sealed.MANIFEST) == before
    assert publish(bundle, tmp_path) == first


def writable_copy(bundle: Bundle, parent: Path) -> Path:
    copy = parent / "bundles" / "tiny" / "1"
    shutil.copytree(bundle.directory, copy)
    for path in copy.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return copy


@pytest.mark.parametrize("file", ["model.onnx", "golden/noise.jpg", "signature.json"])
def test_a_tampered_bundle_is_refused(bundle: Bundle, tmp_path: Path, file: str) -> None:
    copy = writable_copy(bundle, tmp_path)
    damaged = bytearray((copy / file).read_bytes())
    damaged[len(damaged) // 2] ^= 1
    (copy / file).write_bytes(damaged)
    with pytest.raises(SealError, match=f"{file}: differs from the manifest"):
        repository.publish(copy, tmp_path / "repository", "embedded", CPUS)
    assert not (tmp_path / "repository").exists()


@pytest.mark.parametrize(
    "file", ["models/preprocess/1/slipway/preprocessing.py", "models/classify/config.pbtxt"]
)
def test_a_tampered_release_is_refused(bundle: Bundle, tmp_path: Path, file: str) -> None:
    release = publish(bundle, tmp_path)
    (release / file).chmod(0o644)
    (release / file).write_bytes((release / file).read_bytes() + b"\n")
    with pytest.raises(SealError, match=f"{file}: differs from the manifest"):
        open_release(release)


def test_who_only_asks_its_server_need_not_read_the_model(bundle: Bundle, tmp_path: Path) -> None:
    """All else is verified as ever, and the model has to be there."""
    release = publish(bundle, tmp_path)
    model = release / "models" / "classifier" / "1" / "model.onnx"
    model.chmod(0o644)
    model.write_bytes(b"no model")
    assert open_release(release, with_model=False).directory == release
    with pytest.raises(SealError, match=r"model\.onnx: differs from the manifest"):
        open_release(release)
    model.unlink()
    with pytest.raises(SealError, match=r"model\.onnx: is listed in the manifest but missing"):
        open_release(release, with_model=False)
    model.touch()
    golden = release / "models" / "preprocess" / "1" / "golden" / "noise.jpg"
    golden.chmod(0o644)
    golden.write_bytes(b"no image")
    with pytest.raises(SealError, match=r"noise\.jpg: differs from the manifest"):
        open_release(release, with_model=False)


def test_a_damaged_release_is_published_again_beside_it(bundle: Bundle, tmp_path: Path) -> None:
    first = publish(bundle, tmp_path)
    (first / "release.json").unlink()
    second = publish(bundle, tmp_path)
    assert second != first
    assert open_release(second).directory == second


def test_an_onnx_file_that_is_too_new_for_the_server_is_refused_with_both_numbers(
    tmp_path: Path,
) -> None:
    """Case C04."""
    directory = make_bundle(tmp_path / "bundles" / "tiny" / "1", "--ir-version", "99")
    with pytest.raises(
        PublishError, match=r"model\.onnx: has ONNX IR version 99, but Triton .* reads at most 10"
    ):
        repository.publish(directory, tmp_path / "repository", "embedded", CPUS)
    assert not (tmp_path / "repository" / "releases").exists()


def test_a_golden_image_that_decodes_to_other_pixels_here_is_refused(
    bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundles, "preprocess", lambda data, rules: 255 - preprocess(data, rules))
    with pytest.raises(PublishError, match="decodes to other pixels here"):
        publish(bundle, tmp_path)


def test_nothing_published_says_which_command_does_it(tmp_path: Path) -> None:
    with pytest.raises(SlipwayError, match="no release is published there; `make publish` does that"):
        open_release(tmp_path / "current")


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        pytest.param("current", "Symlink loop", id="to itself"),
        pytest.param("x" * 256, "File name too long", id="nowhere that could be"),
    ],
)
def test_a_link_that_the_file_system_cannot_follow_is_no_release(
    tmp_path: Path, target: str, reason: str
) -> None:
    link = tmp_path / "current"
    link.symlink_to(target)
    with pytest.raises(SlipwayError, match=f"{link}: cannot be followed to a release .*{reason}"):
        open_release(link)


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO, errno.ESTALE])
def test_a_file_system_that_is_away_is_no_release(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """As NFS may be for a moment."""

    def away(*_: object, **__: object) -> os.stat_result:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, "lstat", away)
        patch.setattr(os, "stat", away)
        with pytest.raises(SlipwayError, match=f"current: cannot be followed .*{os.strerror(number)}"):
            open_release(tmp_path / "current")


def test_container_release_needs_no_python_for_the_model(bundle: Bundle, tmp_path: Path) -> None:
    release = open_release(repository.publish(bundle.directory, tmp_path, "container", CPUS))
    classifier = release.models / "classifier"
    assert sorted(path.name for path in (classifier / "1").iterdir()) == ["model.onnx"]
    assert hashing.of_file(classifier / "1" / "model.onnx") == hashing.of_file(
        bundle.directory / bundles.MODEL
    )
    assert 'backend: "onnxruntime"' in (classifier / "config.pbtxt").read_text()
    assert (release.models / "preprocess" / "1" / "model.py").is_file()

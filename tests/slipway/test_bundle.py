"""Nothing of a bundle is believed before all of it is verified."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from slipway import bundle, hashing, sealed
from slipway.bundle import Bundle, BundleError, Golden, open_bundle
from slipway.contract import Preprocessing, Signature
from slipway.preprocessing import preprocess
from slipway.sealed import SealError
from tests.images import encode
from tests.slipway import images

SIGNATURE = Signature(
    name="digits",
    classes=("0", "1", "10", "2"),
    preprocessing=Preprocessing(image_size=16, resize_size=16),
    mean=(0.5, 0.5, 0.5),
    std=(0.25, 0.25, 0.25),
    max_batch=8,
)
LOGITS = np.array([0.1, -2.5, 1e-30, 3.4028235e38], np.float32)


def nothing(staging: Path) -> None:
    """What is done to a bundle before it is sealed."""


def make_bundle(destination: Path, before_sealing: Callable[[Path], None] = nothing) -> Path:
    with sealed.stage(destination, kind=bundle.KIND) as staging:
        (staging / bundle.MODEL).write_bytes(b"a model")
        SIGNATURE.save(staging / bundle.SIGNATURE)
        (staging / bundle.LABELS).write_bytes(bundle.labels(SIGNATURE))
        sealed.write_json(staging / bundle.PARITY, {"verdict": "passed"})
        (staging / bundle.GOLDEN).mkdir()
        answers = []
        for name, encoding in (("a.png", "PNG"), ("b c.jpg", "JPEG")):
            path = staging / bundle.GOLDEN / name
            path.write_bytes(encode(images.photo(20, 16), encoding))
            pixels = preprocess(path.read_bytes(), SIGNATURE.preprocessing)
            answers.append(
                Golden(path=path, pixels_sha256=hashing.of_bytes(pixels.tobytes()), logits=LOGITS, label="2")
            )
        bundle.write_golden_answers(staging, answers)
        before_sealing(staging)
    return destination


def test_opened_bundle_says_what_it_is(tmp_path: Path) -> None:
    directory = make_bundle(tmp_path / "digits" / "12")
    opened = open_bundle(directory)
    assert opened.signature == SIGNATURE
    assert opened.version == 12
    assert opened.seal == hashing.of_file(directory / "manifest.json")
    assert opened.release == f"digits/12@{opened.seal[:12]}"


def test_golden_inputs_lead_to_their_recorded_pixels_and_answers(tmp_path: Path) -> None:
    """The bundle carries its own proof: whoever opens it can run the golden inputs again."""
    opened = open_bundle(make_bundle(tmp_path / "1"))
    assert [golden.path.name for golden in opened.golden] == ["a.png", "b c.jpg"]
    for golden in opened.golden:
        pixels = preprocess(golden.path.read_bytes(), opened.signature.preprocessing)
        assert hashing.of_bytes(pixels.tobytes()) == golden.pixels_sha256
        assert golden.logits.dtype == np.float32
        assert golden.logits.tobytes() == LOGITS.tobytes()
        assert golden.label == "2"


def test_answer_that_is_no_number_is_not_written(tmp_path: Path) -> None:
    (tmp_path / "golden").mkdir()
    golden = Golden(path=tmp_path / "a.png", pixels_sha256="", logits=LOGITS * np.float32(np.nan), label="2")
    with pytest.raises(ValueError, match="not JSON compliant"):
        bundle.write_golden_answers(tmp_path, [golden])


@pytest.mark.parametrize(
    "name",
    ["model.onnx", "signature.json", "labels.txt", "parity.json", "golden/a.png", "golden/answers.json"],
)
def test_nothing_is_believed_before_everything_is_verified(tmp_path: Path, name: str) -> None:
    directory = make_bundle(tmp_path / "1")
    (directory / name).chmod(0o644)
    (directory / name).write_bytes(b"no JSON either")
    with pytest.raises(SealError, match=f"1/{name}: differs from the manifest"):
        open_bundle(directory)


def test_other_sealed_directories_are_no_bundles(tmp_path: Path) -> None:
    with sealed.stage(tmp_path / "1", kind="checkpoint") as staging:
        (staging / "state.pt").write_bytes(b"")
    with pytest.raises(SealError, match="is a sealed checkpoint, not a bundle"):
        open_bundle(tmp_path / "1")


@pytest.mark.parametrize(
    "content", ["0\n1\n2\n10\n", "0\n1\n10\n", "0\n1\n10\n2", "0\r\n1\r\n10\r\n2\r\n", ""]
)
def test_labels_in_another_order_are_refused(tmp_path: Path, content: str) -> None:
    """Case A03: sorted as text, 10 comes before 2; the contract's order counts."""

    def write_labels(staging: Path) -> None:
        (staging / bundle.LABELS).write_bytes(content.encode())

    directory = make_bundle(tmp_path / "1", write_labels)
    with pytest.raises(
        BundleError, match=r"labels\.txt: the class names differ from those in signature\.json"
    ):
        open_bundle(directory)


def test_label_file_holds_one_name_a_line_in_index_order() -> None:
    assert bundle.labels(replace(SIGNATURE, classes=("b", "ä", "a b"))) == "b\nä\na b\n".encode()


@pytest.mark.parametrize("verdict", ["failed", "", None, True])
def test_bundle_that_did_not_pass_the_parity_gate_is_refused(tmp_path: Path, verdict: object) -> None:
    def write_verdict(staging: Path) -> None:
        (staging / bundle.PARITY).write_text(json.dumps({"verdict": verdict}), encoding="utf-8")

    directory = make_bundle(tmp_path / "1", write_verdict)
    with pytest.raises(BundleError, match=r"parity\.json: the parity gate did not pass"):
        open_bundle(directory)


@pytest.mark.parametrize("name", ["0", "01", "-1", "1.0", "latest", "²", "１"])  # noqa: RUF001
def test_directory_that_triton_would_not_take_for_a_version_is_refused(tmp_path: Path, name: str) -> None:
    directory = make_bundle(tmp_path / name)
    with pytest.raises(BundleError, match="a bundle's directory is its version number"):
        open_bundle(directory)


def test_bundle_is_known_by_its_directory_when_that_is_where_one_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case E05."""
    monkeypatch.chdir(make_bundle(tmp_path / "12"))
    assert open_bundle(Path()).version == 12


@pytest.mark.parametrize("name", ["../other.png", "/dev/zero", "..", "", "gone.png"])
def test_golden_input_that_lies_elsewhere_is_refused(tmp_path: Path, name: str) -> None:
    """The manifest does not cover it."""

    def lead_away(staging: Path) -> None:
        (staging / "other.png").touch()
        path = staging / bundle.GOLDEN_ANSWERS
        answers = json.loads(path.read_bytes())
        answers[0]["file"] = name
        path.write_text(json.dumps(answers))

    with pytest.raises(BundleError, match=r"golden/answers\.json: names .*, which is no file in .*golden"):
        open_bundle(make_bundle(tmp_path / "1", lead_away))


@pytest.mark.parametrize("file", [bundle.PARITY, bundle.GOLDEN_ANSWERS])
@pytest.mark.parametrize("content", ["no JSON", "[1]", "null"])
def test_file_of_another_make_is_told(tmp_path: Path, file: str, content: str) -> None:
    def write(staging: Path) -> None:
        (staging / file).write_text(content)

    with pytest.raises(BundleError, match=f"{file}: cannot be read as"):
        open_bundle(make_bundle(tmp_path / "1", write))


def test_bundle_can_be_moved(tmp_path: Path) -> None:
    first: Bundle = open_bundle(make_bundle(tmp_path / "digits" / "1"))
    second = open_bundle(first.directory.rename(tmp_path / "7"))
    assert (second.seal, second.version) == (first.seal, 7)
    assert all(golden.path.is_file() for golden in second.golden)

"""The smoke test passes only where every served answer is offline evaluation's."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from serve import smoke
from serve.release import Release
from serve.smoke import Expected, SmokeTestFailed, percentile
from slipway import hashing, sealed
from slipway.bundle import KIND as BUNDLE
from slipway.bundle import Bundle
from slipway.errors import UsageError
from slipway.sealed import SealError
from tests import images
from tests.serve.tools import Oracle, edit_text, variant


def write_images(folder: Path, oracle: Oracle) -> list[dict[str, Any]]:
    """One image a class and some odd ones, as a test split would hold; what offline evaluation says of them."""
    files = {f"{k}/flat.png": images.flat(k) for k in range(12)}
    files |= {f"odd/{name}": data for name, data in images.odd().items()}
    entries = []
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
        entries.append(
            {
                "file": name,
                "sha256": hashing.of_bytes(data),
                "label": name.split("/")[0],
                "predicted": oracle.label(data),
                "probabilities": [float(value) for value in oracle.probabilities(data)],
            }
        )
    return entries


@pytest.fixture
def entries(tmp_path: Path, oracle: Oracle) -> list[dict[str, Any]]:
    return write_images(tmp_path / "test", oracle)


def run(release: Path, tmp_path: Path, entries: list[dict[str, Any]]) -> dict[str, Any]:
    predictions = tmp_path / "predictions.jsonl"
    predictions.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    written = smoke.run(release, tmp_path / "test", predictions, tmp_path / "out" / "smoke.json")
    assert written == tmp_path / "out" / "smoke.json"
    return result(tmp_path)


def result(tmp_path: Path) -> dict[str, Any]:
    return json.loads((tmp_path / "out" / "smoke.json").read_text())


def test_batches_are_as_large_as_model_and_request_allow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(smoke, "MAX_REQUEST_BYTES", 100)
    expected = []
    for index, size in enumerate([10, 10, 10, 80, 30, 200, 5]):
        (tmp_path / str(index)).write_bytes(bytes(size))
        path = tmp_path / str(index)
        expected.append(Expected(file=path.name, path=path, label="", probabilities=np.zeros(1)))
    batches = [[image.file for image in batch] for batch in smoke._batches(expected, 2)]
    assert batches == [["0", "1"], ["2", "3"], ["4"], ["5"], ["6"]]


def test_answers_are_held_against_those_of_the_artefact_that_is_served(
    bundle: Bundle, release: Release, tmp_path: Path
) -> None:
    assert smoke.predictions_of(release, bundle.directory, tmp_path) == tmp_path / "predictions.jsonl"
    other = tmp_path / "bundle"
    with sealed.stage(other, kind=BUNDLE) as staging:
        (staging / "served").mkdir()
        (staging / "served" / "predictions.jsonl").touch()
    made_of_other = replace(release, bundle=sealed.read_manifest(other).seal)
    own = other / "served" / "predictions.jsonl"
    assert smoke.predictions_of(made_of_other, other, tmp_path) == own
    own.unlink()
    with pytest.raises(SealError, match=r"served/predictions\.jsonl: is listed in the manifest but missing"):
        smoke.predictions_of(made_of_other, other, tmp_path)


def test_what_is_not_the_bundle_of_the_release_is_wrong_usage(release: Release, tmp_path: Path) -> None:
    with sealed.stage(tmp_path / "other", kind=BUNDLE) as staging:
        (staging / "model").touch()
    for name, words in (
        ("typo", r"is not a sealed directory .*; expected the bundle that .* was made of"),
        ("other", f"is not the bundle that {release.directory} was made of"),
    ):
        with pytest.raises(UsageError, match=f"^{tmp_path / name}: {words}"):
            smoke.predictions_of(release, tmp_path / name, tmp_path)


@pytest.mark.integration
def test_all_agree(release: Release, tmp_path: Path, entries: list[dict[str, Any]]) -> None:
    found = run(release.directory, tmp_path, entries)
    assert (found["verdict"], found["server"], found["release"]) == (
        "passed",
        "Triton 2.51.0",
        release.identity,
    )
    assert found["disagreements"] == []
    for protocol in ("http", "grpc"):
        measured = found["protocols"][protocol]
        assert measured["images"] == measured["agreeing"] == len(entries)
        assert measured["max_probability_difference"] <= 1e-4
        assert 0 < measured["p50_ms"] <= measured["p99_ms"]
        assert measured["requests_per_second"] > 0
    assert [(bad["name"], bad["http"], bad["grpc"], bad["passed"]) for bad in found["bad_inputs"]] == [
        ("truncated image", "400 DAMAGED", "INVALID_ARGUMENT DAMAGED", True),
        ("empty body", "400 EMPTY", "INVALID_ARGUMENT EMPTY", True),
        ("HTML file", "400 NOT_AN_IMAGE", "INVALID_ARGUMENT NOT_AN_IMAGE", True),
    ]


@pytest.mark.integration
def test_each_kind_of_disagreement_is_found(
    release: Release, tmp_path: Path, entries: list[dict[str, Any]]
) -> None:
    """Another label, other probabilities, NaN, other classes, and an image that the server refuses."""
    entries[0]["predicted"] = "11"
    entries[1]["probabilities"][4] += 2e-4
    entries[2]["probabilities"][0] = float("nan")
    entries[3]["probabilities"] = [0.5, 0.5]
    (tmp_path / "test" / entries[4]["file"]).write_bytes(images.truncated())
    entries[4]["sha256"] = hashing.of_bytes(images.truncated())
    with pytest.raises(SmokeTestFailed, match=r"0/flat\.png: over http, in a batch of 1, .* predicted '11'"):
        run(release.directory, tmp_path, entries)
    found = result(tmp_path)
    assert found["verdict"] == "failed"
    assert found["problem"].startswith("0/flat.png: over http")
    for protocol in ("http", "grpc"):
        alone = {
            entry["file"]: entry["problem"]
            for entry in found["disagreements"]
            if entry["protocol"] == protocol and entry["batch"] == 1
        }
        if protocol == "http":
            assert alone.keys() == {f"{k}/flat.png" for k in range(5)}
            assert "probabilities differ by 0.0002" in alone["1/flat.png"]
            assert "probabilities differ by nan" in alone["2/flat.png"]
            assert "12 classes, the evaluation 2" in alone["3/flat.png"]
            assert "refused: DAMAGED" in alone["4/flat.png"]
        # Those that shared a batch with the refused image were refused with it.
        assert found["protocols"][protocol]["agreeing"] == len(entries) - 8


@pytest.mark.integration
def test_a_server_that_blames_itself_for_a_bad_image_fails(
    release: Release, tmp_path: Path, entries: list[dict[str, Any]]
) -> None:
    def blame_itself(models: Path) -> None:
        edit_text(
            models / "preprocess" / "1" / "serve" / "models" / "preprocess.py",
            "TritonError.INVALID_ARG",
            "TritonError.INTERNAL",
        )

    changed = variant(release, tmp_path / "release", blame_itself)
    with pytest.raises(
        SmokeTestFailed, match=r"truncated image: was answered .failed: .* a client error was"
    ):
        run(changed.directory, tmp_path, entries)
    found = result(tmp_path)
    assert found["verdict"] == "failed"
    assert found["disagreements"] == []
    assert [bad["passed"] for bad in found["bad_inputs"]] == [False] * 3


def test_a_file_that_is_not_the_evaluated_one_is_named_before_anything_starts(
    release: Release, tmp_path: Path, entries: list[dict[str, Any]]
) -> None:
    entries[3]["sha256"] = "0" * 64
    with pytest.raises(SmokeTestFailed, match=r"3/flat\.png: is not the file that was evaluated"):
        run(release.directory, tmp_path, entries)
    assert (result(tmp_path)["verdict"], result(tmp_path)["protocols"]) == ("failed", {})


def test_a_missing_image_is_named_with_its_line(
    release: Release, tmp_path: Path, entries: list[dict[str, Any]]
) -> None:
    (tmp_path / "test" / "2" / "flat.png").unlink()
    with pytest.raises(SmokeTestFailed, match=r"predictions\.jsonl:3: .*2/flat\.png does not exist"):
        run(release.directory, tmp_path, entries)


def test_no_predictions_is_no_success(release: Release, tmp_path: Path) -> None:
    with pytest.raises(SmokeTestFailed, match="holds no predictions"):
        run(release.directory, tmp_path, [])


def test_a_line_that_is_no_prediction_is_named(release: Release, tmp_path: Path) -> None:
    with pytest.raises(SmokeTestFailed, match=r"predictions\.jsonl:1: is not a prediction"):
        run(release.directory, tmp_path, [{"file": "a.png"}])


def test_no_file_of_predictions_is_wrong_usage(release: Release, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="`make evaluate` writes it"):
        smoke.run(release.directory, tmp_path, tmp_path / "none.jsonl", tmp_path / "smoke.json")


@pytest.mark.parametrize(
    ("values", "percent", "expected"),
    [
        ([7], 50, 7),
        ([7], 99, 7),
        ([1, 2], 50, 1),
        ([1, 2, 3], 50, 2),
        (range(1, 101), 99, 99),
        (range(1, 201), 99, 198),
    ],
)
def test_percentile_is_the_nearest_rank(values: list[float], percent: float, expected: float) -> None:
    assert percentile(list(values), percent) == expected
    assert percentile(list(values), percent) == np.percentile(list(values), percent, method="inverted_cdf")

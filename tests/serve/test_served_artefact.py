"""What a bundle says is to be served is served, and held to its own answers, not to those of model.onnx."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from serve import repository
from serve.client import CLIENTS
from serve.release import Release, open_release
from serve.repository import PublishError
from serve.server import serving
from slipway import bundle as bundles
from slipway import compatibility, sealed
from slipway.bundle import Bundle, open_bundle
from tests.serve.tools import CPUS, make_bundle


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """A bundle that serves OpenVINO, with answers somewhat off those of its model.onnx."""
    return open_bundle(make_bundle(tmp_path_factory.mktemp("bundles") / "quick" / "1", "--openvino"))


@pytest.fixture(scope="module")
def quick_release(quick: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Release:
    models = tmp_path_factory.mktemp("repository")
    return open_release(repository.publish(quick.directory, models, "embedded", CPUS))


def test_release_holds_the_served_artefact_alone_and_its_own_answers(
    quick: Bundle, quick_release: Release
) -> None:
    classifier = quick_release.models / "classifier" / "1"
    files = ("model.int8.openvino.xml", "model.int8.openvino.bin")
    assert {path.name for path in classifier.glob("model*.*")} == {*files, "model.py"}
    assert (quick_release.artefact, quick_release.tolerance) == ("openvino-int8", 1e-2)
    serving_json = json.loads((classifier / "serving.json").read_bytes())
    pins = compatibility.load().serve
    assert serving_json["packages"] == {"numpy": pins["numpy"], "openvino": pins["openvino"]}
    assert serving_json["artefact"]["file"] == files[0]
    own = bundles.read_golden(quick.directory, bundles.SERVED_ANSWERS)
    for golden, answer, plain in zip(quick_release.golden, own, quick.golden, strict=True):
        assert golden.label == answer.label
        assert np.abs(np.log(golden.probabilities).ptp() - np.ptp(answer.logits.astype(float))) < 1e-6
        assert np.abs(answer.logits - plain.logits).max() > 1e-2


@pytest.mark.integration
def test_server_answers_with_the_served_artefact_over_both_protocols(quick_release: Release) -> None:
    with serving(quick_release) as server:
        assert f"openvino {compatibility.load().serve['openvino']}" in server.log.read_text()
        for protocol, url in server.urls.items():
            with CLIENTS[protocol](url) as client:
                answers = client.classify([golden.image for golden in quick_release.golden])
            for answer, golden in zip(answers, quick_release.golden, strict=True):
                assert answer.label == golden.label
                assert np.abs(answer.probabilities - golden.probabilities).max() <= 1e-5


def test_gpus_run_the_plain_model_only(quick: Bundle, tmp_path: Path) -> None:
    with pytest.raises(PublishError, match="serves openvino-int8, whose answers were proven on a CPU"):
        repository.publish(quick.directory, tmp_path, "container-gpu", CPUS)


def test_container_runs_openvino_in_python_too(quick: Bundle, tmp_path: Path) -> None:
    release = open_release(repository.publish(quick.directory, tmp_path, "container", CPUS))
    assert 'backend: "python"' in (release.models / "classifier" / "config.pbtxt").read_text()
    assert (release.models / "classifier" / "1" / "model.py").is_file()


def test_bundle_that_does_not_say_what_its_served_artefact_answers_is_refused(
    quick: Bundle, tmp_path: Path
) -> None:
    mute = tmp_path / "bundles" / "quick" / "1"
    with sealed.stage(mute, kind=bundles.KIND) as staging:
        ignored = shutil.ignore_patterns(sealed.MANIFEST, bundles.SERVED)
        shutil.copytree(quick.directory, staging, dirs_exist_ok=True, ignore=ignored)
        for path in staging.rglob("*"):
            path.chmod(0o755 if path.is_dir() else 0o644)
    with pytest.raises(PublishError, match="does not say what openvino-int8 answers"):
        repository.publish(mute, tmp_path / "repository", "embedded", CPUS)

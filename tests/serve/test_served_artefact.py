"""What a bundle says is to be served is served, and held to its own answers, not to those of model.onnx."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from serve import model_config, repository
from serve.client import CLIENTS
from serve.release import Release, open_release
from serve.repository import PublishError
from serve.server import serving
from slipway import bundle as bundles
from slipway import compatibility, sealed
from slipway.artefact import Artefact, read_artefacts, write_artefacts
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


@pytest.mark.parametrize("target", model_config.ON_GPUS)
def test_gpus_do_not_run_what_was_proven_on_a_cpu(
    quick: Bundle, tmp_path: Path, target: model_config.Target
) -> None:
    with pytest.raises(
        PublishError, match=r"serves openvino-int8, whose answers were proven on a CPU.* onnx-fp16"
    ):
        repository.publish(quick.directory, tmp_path, target, CPUS)


FLOAT16 = Artefact(name="onnx-fp16", runtime="onnxruntime", precision="float16", files=("model.fp16.onnx",))


def with_float16(bundle: Bundle, directory: Path) -> Path:
    """The same with a second ONNX file, said to be float16, and answers of its own."""
    with sealed.stage(directory, kind=bundles.KIND) as staging:
        shutil.copytree(bundle.directory, staging, dirs_exist_ok=True, ignore=lambda *_: [sealed.MANIFEST])
        for path in [staging, *staging.rglob("*")]:
            path.chmod(0o755 if path.is_dir() else 0o644)
        (staging / FLOAT16.file).write_bytes((staging / bundles.MODEL).read_bytes())
        write_artefacts(staging, [*read_artefacts(staging), FLOAT16])
        own = [replace(golden, logits=golden.logits * np.float32(1.01)) for golden in bundle.golden]
        (staging / bundles.SERVED).mkdir()
        bundles.write_golden_answers(staging, own, bundles.SERVED_ON_GPUS_ANSWERS)
    return directory


def test_gpus_run_what_is_for_them_and_nothing_else_does(
    bundle: Bundle, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "serve")
    directory = with_float16(bundle, tmp_path / "bundles" / "tiny" / "1")
    on_gpus = open_release(repository.publish(directory, tmp_path, "container-gpu", CPUS))
    assert (on_gpus.artefact, on_gpus.tolerance) == ("onnx-fp16", 1e-2)
    assert 'backend: "onnxruntime"' in (on_gpus.models / "classifier" / "config.pbtxt").read_text()
    assert {path.name for path in (on_gpus.models / "classifier" / "1").iterdir()} == {"model.onnx"}
    for golden, plain in zip(on_gpus.golden, bundle.golden, strict=True):
        spread = 1.01 * np.ptp(plain.logits.astype(float))
        assert np.ptp(np.log(golden.probabilities)) == pytest.approx(spread, rel=1e-6)
    assert not any("is for GPUs" in message for message in caplog.messages)
    on_cpus = open_release(repository.publish(directory, tmp_path, "container", CPUS))
    assert on_cpus.artefact == "onnx"
    assert "onnx-fp16 is for GPUs (--target container-gpu); this release serves onnx" in caplog.messages


def test_tensorrt_computes_in_the_precision_of_what_is_served(bundle: Bundle, tmp_path: Path) -> None:
    for directory, precision in (
        (bundle.directory, "FP32"),
        (with_float16(bundle, tmp_path / "bundles" / "tiny" / "1"), "FP16"),
    ):
        release = repository.publish(directory, tmp_path, "container-tensorrt", CPUS)
        config = model_config.read(release / "models" / "classifier")
        (accelerator,) = config.optimization.execution_accelerators.gpu_execution_accelerator
        assert accelerator.parameters["precision_mode"] == precision


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

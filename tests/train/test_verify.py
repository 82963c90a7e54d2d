"""Whoever opens a bundle can have it proven again."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from slipway import bundle, hashing, sealed
from slipway.artefact import write_artefacts
from slipway.bundle import BundleError, Golden
from slipway.preprocessing import preprocess
from slipway.sealed import SealError
from tests.images import encode, noise
from tests.slipway.test_bundle import SIGNATURE
from train.formats import FORMATS
from train.model import ImageClassifier
from train.parity import ParityError, eager_logits
from train.servable import Source
from train.verify import verify


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of a network that averages, with ONNX and TorchScript."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(12, 4))
    classifier = ImageClassifier(network, SIGNATURE.mean, SIGNATURE.std).eval()
    directory = tmp_path_factory.mktemp("verify") / "1"
    with sealed.stage(directory, kind=bundle.KIND) as staging:
        onnx = staging / bundle.MODEL
        nothing = np.zeros((0, 3, 16, 16), np.uint8)
        source = Source(classifier=classifier, image_size=16, max_batch=8, onnx=onnx, calibration=nothing)
        write_artefacts(
            staging, [FORMATS[name].write(name, source, staging) for name in ("onnx", "torchscript")]
        )
        SIGNATURE.save(staging / bundle.SIGNATURE)
        (staging / bundle.LABELS).write_bytes(bundle.labels(SIGNATURE))
        sealed.write_json(staging / bundle.PARITY, {"verdict": "passed"})
        sealed.write_json(staging / bundle.PROVENANCE, {"run": "a"})
        path = staging / bundle.GOLDEN / "000.png"
        path.parent.mkdir()
        path.write_bytes(encode(noise(0)))
        pixels = preprocess(path.read_bytes(), SIGNATURE.preprocessing)
        (logits,) = eager_logits(classifier, pixels[None])
        digest = hashing.of_bytes(pixels.tobytes())
        bundle.write_golden_answers(
            staging, [Golden(path=path, pixels_sha256=digest, logits=logits, label="0")]
        )
    return directory


def resealed(good: Path, destination: Path, change: Callable[[Path], None]) -> Path:
    """The bundle as somebody would hand it over who changed it and sealed it again."""
    with sealed.stage(destination, kind=bundle.KIND) as staging:
        for path in good.rglob("*"):
            if path.is_file() and path.name != sealed.MANIFEST:
                (staging / path.relative_to(good)).parent.mkdir(exist_ok=True)
                shutil.copyfile(path, staging / path.relative_to(good))
        change(staging)
    return destination


def test_good_bundle_is_verified_from_the_command_line(good: Path) -> None:
    command = [sys.executable, "-m", "train", "bundle", "verify", good.name]
    result = subprocess.run(command, cwd=good.parent, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (0, "1\n"), result.stderr
    for file in ("model.onnx", "model.torchscript.pt"):
        assert f"{file} answers its 1 golden inputs as it did" in result.stderr


def test_artefact_that_answers_differently_is_named(good: Path, tmp_path: Path) -> None:
    def change(staging: Path) -> None:
        answers = json.loads((staging / bundle.GOLDEN_ANSWERS).read_text())
        answers[0]["logits"][0] += 0.01
        (staging / bundle.GOLDEN_ANSWERS).write_text(json.dumps(answers))

    with pytest.raises(
        ParityError,
        match=r"/1: model\.onnx against the stored answer on golden inputs, batch 1: logits off by 0\.01",
    ):
        verify(resealed(good, tmp_path / "1", change))


def test_golden_input_that_decodes_differently_is_named(good: Path, tmp_path: Path) -> None:
    def change(staging: Path) -> None:
        (staging / bundle.GOLDEN / "000.png").write_bytes(encode(noise(1)))

    with pytest.raises(BundleError, match=r"000\.png: decodes to other pixels here"):
        verify(resealed(good, tmp_path / "1", change))


def test_changed_byte_is_refused_before_anything_runs(good: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(good, tmp_path / "1"))
    model = copy / "model.torchscript.pt"
    model.chmod(0o644)
    model.write_bytes(model.read_bytes()[:-1] + b"x")
    with pytest.raises(SealError, match=r"model\.torchscript\.pt: differs from the manifest"):
        verify(copy)


def test_two_bundles_are_compared_on_the_command_line(good: Path, tmp_path: Path) -> None:
    def change(staging: Path) -> None:
        sealed.write_json(staging / bundle.PROVENANCE, {"run": "b"})

    other = resealed(good, tmp_path / "2", change)
    command = [sys.executable, "-m", "train", "bundle", "diff", str(good), str(other)]
    result = subprocess.run(command, cwd="/", capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (0, 'provenance: run was "a", is "b"\n'), result.stderr
    assert subprocess.run([*command[:-1]], cwd="/", capture_output=True, check=False).returncode == 2

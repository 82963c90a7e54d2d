import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from slipway import input_statistics, sealed
from slipway.artefact import read_artefacts, read_default
from slipway.bundle import (
    SERVED_ANSWERS,
    SERVED_ON_GPUS_ANSWERS,
    SERVED_PREDICTIONS,
    Bundle,
    open_bundle,
    read_golden,
)
from slipway.sealed import SealError
from tests.slipway.test_signing import make_keys
from tests.train.conftest import MakeConfig, MakeFolder
from train import checkpoint, parity, recommend
from train import export as stage
from train.checkpoint import Choice
from train.config import Config, ExportConfig
from train.dataset import Dataset, Sample
from train.evaluate import evaluate
from train.export import export
from train.fit import fit
from train.folder import Files, read_folder
from train.parity import ParityError
from train.runs import run_for


@pytest.fixture
def trained(make_folder: MakeFolder, make_config: MakeConfig) -> tuple[Config, Dataset]:
    # Twelve numeric names: '10' comes before '2' (case A03).
    config = make_config(
        make_folder(tuple(map(str, range(12))), train=2, val=2, test=1), training__epochs="1"
    )
    folder = read_folder(config.data)
    fit(config, folder)
    return config, folder


def exported(trained: tuple[Config, Dataset]) -> Path:
    config, folder = trained
    run = run_for(config, folder)
    return export(config, run, folder, evaluate(config, run, folder))


@pytest.fixture
def int8_is_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is measured: which one wins on this machine, today, is not what is tested."""
    measure = recommend.measure

    def measured(*arguments: Any, **more: Any) -> list[recommend.Measured]:
        found = measure(*arguments, **more)
        return [replace(each, ms={1: each.artefact == "onnx", 8: 1.0}) for each in found]

    monkeypatch.setattr(recommend, "measure", measured)


@pytest.mark.timeout(900)  # two formats through every stage: minutes, where others need the processor, too
@pytest.mark.usefixtures("int8_is_fastest")
def test_bundle_carries_its_proof(trained: tuple[Config, Dataset]) -> None:
    config, folder = trained
    # One epoch leaves a model that any rounding may upset: what is tested is that it is judged.
    settings = replace(
        config.export, formats=("onnx-int8", "onnx", "onnx-fp16"), max_accuracy_drop=100.0, recommend=True
    )
    trained = replace(config, export=settings), folder
    directory = exported(trained)
    bundle = open_bundle(directory)
    assert bundle.version == 1
    assert [artefact.files for artefact in read_artefacts(directory)] == [
        ("model.onnx",),
        ("model.int8.onnx",),
        ("model.fp16.onnx",),
    ]
    parity_report = json.loads((directory / "parity.json").read_text())
    assert parity_report["verdict"] == "passed"
    assert {check["inputs"] for check in parity_report["checks"]} == {"golden", "nasty", "random"}
    judged = [(each["artefact"], each["samples"]) for each in parity_report["accuracy"]]
    assert judged == [("model.onnx", 24), ("model.int8.onnx", 24), ("model.fp16.onnx", 24)]
    recommendation = json.loads((directory / "recommendation.json").read_text())
    assert recommendation["recommended"] == recommendation["served"] == "onnx-int8"
    assert [each["artefact"] for each in recommendation["measured"]] == ["onnx", "onnx-int8"]
    assert recommendation["not_measured"].keys() == {"onnx-fp16"}
    assert "onnx-fp16 was not measured" in (directory / "parity.html").read_text()
    check_what_is_served(bundle, trained[1])
    provenance = json.loads((directory / "provenance.json").read_text())
    assert provenance["dataset_fingerprint"] == trained[1].fingerprint
    assert provenance["checkpoint"] == f"step-{provenance['step']:08d}"
    assert provenance["weights"] == "raw"
    assert provenance["metrics"]["split"] == "test"
    assert provenance["environment"].keys() >= {"versions", "lock_sha256", "git"}
    statistics = input_statistics.load(directory)
    assert statistics is not None
    assert statistics.images == 12
    assert statistics.shares["predicted"].keys() == set(trained[1].classes)
    check_class_names(bundle, trained[1])
    check_weights(bundle, trained)
    check_nothing_is_done_twice(trained, directory)


def check_weights(opened: Bundle, trained: tuple[Config, Dataset]) -> None:
    """Those of the checkpoint that was exported, for training to start from."""
    weights = checkpoint.read_weights(checkpoint.best(run_for(*trained)))
    stored = load_file(opened.directory / "weights.safetensors")
    assert stored.keys() == weights.keys()
    assert all(torch.equal(stored[name], value) for name, value in weights.items())


def check_what_is_served(bundle: Bundle, folder: Dataset) -> None:
    """It answers for itself: to the golden inputs, and to every image that the checkpoint was evaluated on."""
    assert read_default(bundle.directory).name == "onnx-int8"
    own = read_golden(bundle.directory, SERVED_ANSWERS)
    assert [(each.path, each.pixels_sha256) for each in own] == [
        (each.path, each.pixels_sha256) for each in bundle.golden
    ]
    assert any((mine.logits != plain.logits).any() for mine, plain in zip(own, bundle.golden, strict=True))
    on_gpus = read_golden(bundle.directory, SERVED_ON_GPUS_ANSWERS)
    for lower, plain in zip(on_gpus, bundle.golden, strict=True):
        assert (lower.logits != plain.logits).any()
        assert np.allclose(lower.logits, plain.logits, atol=0.05)
    lines = (bundle.directory / SERVED_PREDICTIONS).read_text().splitlines()
    assert [json.loads(line)["file"] for line in lines] == [each.file for each in folder.splits["test"]]


def check_class_names(bundle: Bundle, folder: Dataset) -> None:
    """Case A03: one list, written once by training, the same in every artefact."""
    assert bundle.signature.classes == folder.classes
    assert (bundle.directory / "labels.txt").read_text().split() == list(folder.classes)
    assert folder.classes[2] == "10"
    assert len(bundle.golden) == 24


def check_nothing_is_done_twice(trained: tuple[Config, Dataset], directory: Path) -> None:
    assert exported(trained) == directory
    assert [path.name for path in directory.parent.iterdir() if not path.name.startswith(".")] == ["1"]


def test_golden_images_are_dealt_class_by_class() -> None:
    """With a limit below their number: the classes at the end of the list get theirs, too."""
    samples = tuple(Sample(file=f"{n}.png", sha256=f"{99 - n}", label=n % 3) for n in range(12))
    dataset = Dataset(
        classes=("ant", "bee", "cat"), splits={"val": samples}, fingerprint="", storage=Files(Path())
    )

    def chosen(limit: int) -> list[str]:
        settings = ExportConfig(golden_per_class=2, golden_limit=limit)
        return [sample.file for sample in stage._golden_samples(dataset, settings)]

    assert chosen(40) == ["9.png", "6.png", "10.png", "7.png", "11.png", "8.png"]
    assert chosen(4) == ["9.png", "6.png", "10.png", "11.png"]
    assert chosen(2) == ["9.png", "10.png"]


def test_another_key_at_the_same_place_makes_another_bundle(tmp_path: Path, make_config: MakeConfig) -> None:
    for name in ("checkpoint", "evaluation"):
        with sealed.stage(tmp_path / name, kind=name):
            pass
    choice = Choice(directory=tmp_path / "checkpoint", weights="raw")

    def inputs(key: Path) -> str:
        config = make_config(tmp_path, export__sign_key=str(key))
        return stage._inputs(config, choice, tmp_path / "evaluation")

    (key, _), (other, _) = make_keys(tmp_path, "one"), make_keys(tmp_path, "other")
    before = inputs(key)
    moved = key.rename(tmp_path / "moved.pem")
    assert inputs(moved) == before
    other.rename(key)
    assert inputs(key) != before


def test_failed_gate_publishes_nothing_and_keeps_the_report(
    trained: tuple[Config, Dataset], monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing = parity.Tolerance(absolute=0.0, relative=0.0, every_input=True)
    monkeypatch.setitem(parity.TOLERANCES, "float32", nothing)
    with pytest.raises(ParityError, match="Nothing was published"):
        exported(trained)
    config, folder = trained
    bundles = config.run.bundles / config.run.name
    assert [path.name for path in bundles.iterdir() if not path.name.startswith(".")] == []
    run = run_for(config, folder).directory
    assert json.loads((run / "parity.json").read_text())["verdict"] == "failed"
    assert "model.onnx against float64 on golden inputs" in (run / "parity.html").read_text()


def test_damaged_bundle_is_refused_and_replaced_under_a_new_version(
    trained: tuple[Config, Dataset],
) -> None:
    directory = exported(trained)
    (directory / "labels.txt").chmod(0o644)
    (directory / "labels.txt").write_text("\n".join(reversed(trained[1].classes)))
    with pytest.raises(SealError, match=r"labels\.txt: differs from the manifest"):
        open_bundle(directory)
    assert exported(trained).name == "2"
    assert stage._next_version(directory.parent) == 3

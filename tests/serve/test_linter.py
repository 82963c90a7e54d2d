"""A repository that Triton would choke on is refused in words, before Triton sees it."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tritonclient.grpc.model_config_pb2 import ModelConfig

from serve import linter
from serve.release import Release
from serve.server import ServerError, free_ports, start
from tests.serve.tools import edit_config, edit_text, variant

Edit = Callable[[ModelConfig], object]


@pytest.fixture
def models(release: Release, tmp_path: Path) -> Path:
    """A copy that may be spoilt."""
    copy = tmp_path / "models"
    shutil.copytree(release.models, copy)
    for path in copy.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return copy


def only_problem(models: Path) -> str:
    (problem,) = linter.problems(models)
    return problem


def test_what_we_publish_has_no_mistakes(release: Release) -> None:
    assert list(linter.problems(release.models)) == []


@pytest.mark.parametrize(
    ("missing", "words"),
    [
        ("preprocess/1/model.py", "1/model.py is missing"),  # loads for ever
        ("classifier/warmup/golden_pixels", "the data of image are not in warmup/golden_pixels"),
        ("classify/labels.txt", "its labels labels.txt are missing"),
        ("classify/config.pbtxt", "classify/config.pbtxt: is missing"),
    ],
)
def test_a_missing_file_is_named(models: Path, missing: str, words: str) -> None:
    """Case D18."""
    (models / missing).unlink()
    found = list(linter.problems(models))
    assert found
    assert all(words in problem for problem in found)


@pytest.mark.parametrize(
    ("model", "edit", "words"),
    [
        (
            "classifier",
            lambda c: setattr(c, "name", "other"),
            "name is 'other', but its folder is 'classifier'",
        ),
        (
            "classifier",
            lambda c: setattr(c, "backend", "onnx"),
            "backend is 'onnx'; known are python, onnxruntime",
        ),
        ("classifier", lambda c: c.ClearField("dynamic_batching"), "its queue has no end"),
        (
            "preprocess",
            lambda c: setattr(c.dynamic_batching.default_queue_policy, "max_queue_size", 0),
            "its queue has no end",
        ),
        (
            "preprocess",
            lambda c: setattr(c.dynamic_batching.default_queue_policy, "default_timeout_microseconds", 0),
            "requests wait for ever",
        ),
        (
            "preprocess",
            lambda c: c.version_policy.specific.versions.append(2),
            "serves version 2, which is not there",
        ),
        (
            "classifier",
            lambda c: setattr(c.model_warmup[1], "batch_size", 9),
            "has batch size 9; the limit is 8",
        ),
        ("classifier", lambda c: c.model_warmup[0].inputs["image"].dims.append(2), "are 6144"),
        ("classify", lambda c: c.instance_group.add(count=1), "instance_group is not for ensembles"),
        ("classify", lambda c: c.model_warmup.add(name="a"), "model_warmup is not for ensembles"),
        (
            "classify",
            lambda c: setattr(c, "max_batch_size", 9),
            "max_batch_size is 9, over the 8 of preprocess",
        ),
        (
            "classify",
            lambda c: setattr(c.ensemble_scheduling.step[0], "model_version", 0),
            "its version 0 is not there; name one that is",
        ),
        (
            "classify",
            lambda c: setattr(c.ensemble_scheduling.step[1], "model_name", "classifer"),
            "step classifer: there is no such model",
        ),
        (
            "classify",
            lambda c: c.ensemble_scheduling.step[1].input_map.update({"image": "pixels"}),
            "step classifier: input image: comes from nowhere",
        ),
        (
            "classify",
            lambda c: c.output[0].dims.append(2),
            "output logits: is TYPE_FP32 [12, 2], and is given TYPE_FP32 [12]",
        ),
    ],
)
def test_a_mistake_in_a_configuration_is_named(models: Path, model: str, edit: Edit, words: str) -> None:
    """Case D13: an ensemble names the versions of its steps."""
    edit_config(models / model, edit)
    found = list(linter.problems(models))
    assert any(words in problem for problem in found), found
    assert all(problem.startswith(f"{models}/classif") or model == "preprocess" for problem in found)


def test_an_input_of_variable_size_never_forms_a_batch(models: Path) -> None:
    """Case D16: encoded images as bytes of any number, as Triton's own example has them."""
    text, raw = "data_type: TYPE_STRING\n  dims: 1", "data_type: TYPE_UINT8\n  dims: -1"
    edit_text(models / "preprocess" / "config.pbtxt", text, raw)
    assert any("requests never form a batch" in problem for problem in linter.problems(models))


def test_what_is_no_configuration_is_named(models: Path) -> None:
    (models / "classifier" / "config.pbtxt").write_text('nane: "classifier"')
    assert any("is not a model configuration (" in problem for problem in linter.problems(models))


def test_a_warm_up_string_without_its_length_is_named(models: Path) -> None:
    """The server would crash while it loads."""
    path = models / "preprocess" / "warmup" / "golden_encoded"
    path.write_bytes(path.read_bytes()[4:])
    found = list(linter.problems(models))
    assert len(found) == 2
    assert all(
        "warmup/golden_encoded is not one string: its length as 4 bytes" in problem for problem in found
    )


def test_a_directory_of_a_version_that_triton_would_pass_over_is_none(models: Path) -> None:
    (models / "classifier" / "1").rename(models / "classifier" / "01")
    assert any(
        "there is no directory of a version beside it" in problem for problem in linter.problems(models)
    )


def test_no_models_at_all(tmp_path: Path) -> None:
    assert only_problem(tmp_path) == f"{tmp_path}: holds no model"


def test_a_server_is_not_started_with_mistakes(release: Release, tmp_path: Path) -> None:
    changed = variant(
        release, tmp_path / "release", lambda models: (models / "preprocess" / "1" / "model.py").unlink()
    )
    with pytest.raises(ServerError, match=r"Triton would not serve this: .*1/model\.py is missing"):
        start(changed, free_ports())

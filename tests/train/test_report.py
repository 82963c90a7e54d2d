"""The report page: it shows what its inputs say, all of it, safely, and complains about the file that is wrong."""

import io
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from slipway import bundle as bundles
from slipway import config as configuration
from slipway import hashing, sealed
from slipway.contract import Signature
from slipway.errors import SlipwayError
from tests.train.test_charts import Tags
from tests.train.test_parity_page import JUDGED
from train.config import Config
from train.page import visible
from train.report import MOST_CLASSES, MOST_MISTAKES, MOST_UNCERTAIN, wilson, write_report


@dataclass(frozen=True)
class Inputs:
    """The five arguments of `write_report`."""

    run: Path
    data_root: Path
    evaluation: Path
    bundle: Path | None
    smoke: Path | None

    def page(self) -> "Page":
        return Page(write_report(self.run, self.data_root, self.evaluation, self.bundle, self.smoke))


class Page(Tags):
    """The written page, parsed. `sections` maps an id to the words in that section."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.html = path.read_text(encoding="utf-8")
        super().__init__(self.html)

    def words(self, part: str = "") -> str:
        """The visible text, of one section or of the whole body, with single ordinary spaces."""
        html = self.html[self.html.index("<body>") : self.html.index("<script>")]
        if part == "header":
            html = html[: html.index("</header>")]
        elif part:
            html = html[html.index(f'<section id="{part}">') :].split("</section>")[0]
        return " ".join(Tags(re.sub(r"<(?!/?[bi]>)", " <", html)).text.split())


Answers = Sequence[tuple[str, str, float]]  # (true class, predicted class, probability of the prediction)

ANSWERS: Answers = (
    [("cat", "cat", 0.99)] * 6 + [("dog", "dog", 0.9)] * 3 + [("dog", "cat", 0.75), ("dog", "cat", 0.8)]
)


def evaluate(
    root: Path,
    classes: Sequence[str] = ("cat", "dog"),
    answers: Answers = ANSWERS,
    names: Callable[[int], str] = "{:05d}.png".format,
    **changed: Any,
) -> tuple[Path, Path]:
    """Write pictures and the sealed evaluation of them; `changed` overrides entries of metrics.json."""
    images, directory = root / "images", root / "evaluations" / f"step-00000040-test-{len(answers)}"
    images.mkdir(parents=True)
    confusion = np.zeros((len(classes), len(classes)), dtype=int)
    lines = []
    for position, (label, predicted, probability) in enumerate(answers):
        data = picture(position)
        (images / names(position)).write_bytes(data)
        confusion[classes.index(label), classes.index(predicted)] += 1
        rest = (1 - probability) / (len(classes) - 1)
        line = {
            "file": names(position),
            "sha256": hashing.of_bytes(data),
            "label": label,
            "predicted": predicted,
        }
        lines.append(
            {**line, "probabilities": [probability if name == predicted else rest for name in classes]}
        )
    metrics = {
        "checkpoint": "step-00000040",
        "split": "test",
        "samples": len(answers),
        "accuracy": float(np.trace(confusion) / len(answers)),
        "loss": 0.25,
        "classes": list(classes),
        "confusion": confusion.tolist(),
        "per_class": [
            {
                "class": name,
                "precision": 0.9,
                "recall": 0.8,
                "f1": 1 - 0.001 * i,
                "support": int(confusion[i].sum()),
            }
            for i, name in enumerate(classes)
        ],
    }
    with sealed.stage(directory, kind="evaluation") as staging:
        (staging / "metrics.json").write_text(json.dumps({**metrics, **changed}), encoding="utf-8")
        (staging / "predictions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return images, directory


def picture(number: int, size: tuple[int, int] = (8, 8)) -> bytes:
    pixels = np.random.default_rng(number).integers(0, 256, (*size, 3), dtype=np.uint8)
    encoded = io.BytesIO()
    Image.fromarray(pixels).save(encoded, "PNG")
    return encoded.getvalue()


def describe(run: Path, lines: Sequence[dict[str, Any]] | None = None) -> Path:
    """Write config.yaml, environment.json and metrics.jsonl into a run."""
    run.mkdir(parents=True, exist_ok=True)
    (run / "config.yaml").write_text(configuration.to_yaml(Config()), encoding="utf-8")
    environment = {"python": "3.11.7", "git": {"commit": "1f0c2e7b", "dirty": True}, "cpu": {"threads": 2}}
    sealed.write_json(run / "environment.json", environment)
    train: list[dict[str, Any]] = [
        {"kind": "train", "step": step, "epoch": 0, "samples": 64 * step} for step in range(10, 41, 10)
    ]
    figures = {"lr": 1e-3, "gradient_norm": 1.5, "images_per_second": 1234.0}
    default = [
        *({**line, **figures, "loss": 4 / line["step"]} for line in train),
        {
            "kind": "evaluation",
            "step": 20,
            "epoch": 0,
            "split": "val",
            "weights": "raw",
            "loss": 0.3,
            "accuracy": 0.75,
        },
        {
            "kind": "evaluation",
            "step": 40,
            "epoch": 1,
            "split": "val",
            "weights": "raw",
            "loss": 0.2,
            "accuracy": 0.625,
        },
    ]
    text = "".join(json.dumps(line) + "\n" for line in (default if lines is None else lines))
    (run / "metrics.jsonl").write_text(text, encoding="utf-8")
    return run


def export(directory: Path, classes: Sequence[str] = ("cat", "dog"), **provenance: str) -> Path:
    check = {
        "artefact": "model.onnx",
        "reference": "eager",
        "inputs": "golden",
        "dtype": "float32",
        "passed": True,
    }
    figures = {"max_relative": 2e-5, "top1_agreement": 1.0, "tolerance": 1e-4}
    checks = [
        {**check, **figures, "batch": 7, "max_abs": 1.23e-6},
        {**check, **figures, "batch": 1, "max_abs": 3e-7},
    ]
    preprocessing = Config().image.preprocessing()
    signature = Signature(
        name="pets",
        classes=tuple(classes),
        preprocessing=preprocessing,
        mean=(0, 0, 0),
        std=(1, 1, 1),
        max_batch=8,
    )
    with sealed.stage(directory, kind=bundles.KIND) as staging:
        signature.save(staging / bundles.SIGNATURE)
        (staging / bundles.LABELS).write_bytes(bundles.labels(signature))
        (staging / bundles.GOLDEN).mkdir()
        bundles.write_golden_answers(staging, [])
        parity = {"verdict": "passed", "tolerances": {"float32": 1e-4}, "checks": checks}
        sealed.write_json(staging / bundles.PARITY, parity)
        sealed.write_json(staging / bundles.PROVENANCE, {"checkpoint": "step-00000040", **provenance})
    return directory


def smoke_of(bundle: Path) -> dict[str, Any]:
    shared = {"images": 11, "agreeing": 11, "max_probability_difference": 2.4e-7}
    return {
        "verdict": "passed",
        "server": "Triton 2.73.0",
        "release": bundles.open_bundle(bundle).release,
        "protocols": {
            "http": {**shared, "requests_per_second": 412.3, "p50_ms": 3.214, "p99_ms": 8.875},
            "grpc": {**shared, "requests_per_second": 655.1, "p50_ms": 2.05, "p99_ms": 5.4},
        },
        "bad_inputs": [
            {"name": "empty body", "http": "400 EMPTY", "grpc": "INVALID_ARGUMENT", "passed": True}
        ],
        "disagreements": [],
    }


@pytest.fixture
def inputs(tmp_path: Path) -> Inputs:
    """A whole run: nine of eleven right, exported, served."""
    images, evaluation = evaluate(tmp_path)
    bundle = export(tmp_path / "bundles" / "pets" / "3")
    smoke = tmp_path / "smoke.json"
    sealed.write_json(smoke, smoke_of(bundle))
    return Inputs(describe(tmp_path / "pets-3f9a1c20"), images, evaluation, bundle, smoke)


def change_smoke(inputs: Inputs, **changed: Any) -> None:
    assert inputs.smoke is not None
    sealed.write_json(inputs.smoke, {**json.loads(inputs.smoke.read_bytes()), **changed})


def test_headline_shows_the_figures_of_the_inputs(inputs: Inputs) -> None:
    words = inputs.page().words("header")
    assert "pets-3f9a1c20" in words
    assert (
        "resnet18, step-00000040, evaluated on the 11 images of the test split, exported as pets/3@" in words
    )
    assert "Test accuracy 81.82 % 9 of 11 right; 95 % interval 52.30 % to 94.86 %" in words
    assert "Parity Passed 2 comparisons; at most 1.23e-6 apart where 1e-4 is allowed" in words
    assert "Served as evaluated 11 of 11 11 of 11 over HTTP; 11 of 11 over gRPC" in words
    assert "Latency over HTTP, p50 / p99 3.21 / 8.88 ms 2.05 / 5.40 ms over gRPC" in words


@pytest.mark.parametrize(
    ("right", "total", "low", "high"), [(9, 11, 0.5230, 0.9486), (0, 10, 0, 0.2775), (10, 10, 0.7225, 1)]
)
def test_wilson_interval(right: int, total: int, low: float, high: float) -> None:
    assert wilson(right, total) == pytest.approx((low, high), abs=5e-5)


def test_sections_come_in_order_and_the_navigation_finds_them(inputs: Inputs) -> None:
    page = inputs.page()
    order = [
        "curves",
        "confusion",
        "classes",
        "pictures",
        "parity",
        "serving",
        "configuration",
        "environment",
    ]
    assert [section["id"] for section in page.all("section") if "id" in section] == order
    assert [link["href"] for link in page.all("a")] == [f"#{name}" for name in order]


def test_learning_curves_show_how_training_went(inputs: Inputs) -> None:
    words = inputs.page().words("curves")
    assert "40 optimiser steps, 2,560 samples. Best validation accuracy 75.00 % at step 20." in words
    assert "train 0.1" in words
    assert "validation 0.2" in words
    assert "Validation accuracy, % 62.5 step 40" in words
    assert "Images per second 1,234" in words


def test_confusion_matrix_shows_every_count(inputs: Inputs) -> None:
    page = inputs.page()
    cells = page.all("td", "right") + page.all("td", "wrong")
    assert [cell["title"] for cell in cells] == [
        "cat taken for cat: 6 of 6",
        "dog taken for dog: 3 of 5",
        "dog taken for cat: 2 of 5",
    ]
    assert "predicted true cat dog cat 6 dog 2 3" in page.words("confusion")


def test_classes_are_listed_by_worst_f1_with_what_they_are_taken_for(inputs: Inputs) -> None:
    assert "dog 90.0 % 80.0 % 99.9 % 5 cat (2) cat 90.0 % 80.0 % 100.0 % 6 –" in inputs.page().words(
        "classes"
    )


def test_mistakes_are_shown_with_their_pictures_most_confident_first(inputs: Inputs) -> None:
    page = inputs.page()
    words = page.words("pictures")
    assert "All 2 mistakes in 11 images, most confident first." in words
    first = "predicted cat 80.0 % true dog 20.0 % 00010.png"
    assert f"{first} predicted cat 75.0 % true dog 25.0 % 00009.png" in words
    images = page.all("img")
    assert [image["alt"] for image in images] == ["dog, taken for cat"] * 2
    assert all(image["class"] == "small" for image in images)


def test_at_most_sixty_mistakes_are_shown_and_the_page_says_of_how_many(
    inputs: Inputs, tmp_path: Path
) -> None:
    answers = [("dog", "cat", 0.5 + i / 400) for i in range(100)]
    images, evaluation = evaluate(tmp_path / "many", answers=answers)
    page = replace(inputs, data_root=images, evaluation=evaluation).page()
    assert len(page.all("img")) == MOST_MISTAKES
    assert "60 of 100 mistakes in 100 images" in page.words("pictures")
    assert "00099.png" in page.words("pictures")
    assert "00039.png" not in page.words("pictures")


def test_without_mistakes_the_least_certain_answers_are_shown(inputs: Inputs, tmp_path: Path) -> None:
    answers = [("cat", "cat", 0.6 + i / 200) for i in range(50)] + [("dog", "dog", 0.55)]
    images, evaluation = evaluate(tmp_path / "perfect", answers=answers)
    page = replace(inputs, data_root=images, evaluation=evaluation).page()
    words = page.words("pictures")
    assert "No mistakes in 51 images. These are the 24 right answers the model was least certain of." in words
    assert len(page.all("img")) == MOST_UNCERTAIN
    assert words.index("predicted dog 55.0 %") < words.index("predicted cat 60.0 %")
    assert "true" not in words
    assert "No image was taken for another class." in page.words("confusion")
    assert "100.00 % 51 of 51 right" in page.words("header")


def test_large_pictures_are_shrunk(inputs: Inputs, tmp_path: Path) -> None:
    images, evaluation = evaluate(tmp_path / "large", answers=[("dog", "cat", 0.9)])
    data = picture(0, size=(700, 500))
    (images / "00000.png").write_bytes(data)
    lines = (evaluation / "predictions.jsonl").read_text()
    with sealed.stage(tmp_path / "resealed", kind="evaluation") as staging:
        (staging / "metrics.json").write_bytes((evaluation / "metrics.json").read_bytes())
        old, new = hashing.of_bytes(picture(0)), hashing.of_bytes(data)
        (staging / "predictions.jsonl").write_text(lines.replace(old, new))
    page = replace(inputs, data_root=images, evaluation=tmp_path / "resealed").page()
    (image,) = page.all("img")
    assert "class" not in image
    assert len(image["src"]) < 60_000


def test_parity_serving_and_refused_inputs_are_tabulated(inputs: Inputs) -> None:
    page = inputs.page()
    parity, serving = page.words("parity"), page.words("serving")
    assert "model.onnx eager golden 7 float32 1.23e-6 1e-4 2e-5 100.0 % passed" in parity
    assert "tolerance float32 0.0001" in parity
    assert "Does Triton 2.73.0, serving pets/3@" in serving
    assert "HTTP 11 11 2.40e-7 412.3 3.21 8.88 gRPC 11 11 2.40e-7 655.1 2.05 5.40" in serving
    assert "empty body 400 EMPTY INVALID_ARGUMENT passed" in serving
    assert "which is not the bundle of this page" not in serving


def test_artefacts_their_accuracy_and_the_recommendation_are_tabulated(inputs: Inputs) -> None:
    judged = {**JUDGED, "changed": JUDGED["changed"][:1]}
    check = {"artefact": "model.int8.onnx", "dtype": "int8", "inputs": "golden", "batch": 1, "passed": True}
    told = {"reference": "float64", "max_abs": 0.3, "max_relative": 0.02, "top1_agreement": 1.0}
    measured = {"artefact": "onnx", "ms": {"1": 16.2, "8": 119.0}, "start_ms": 900, "bytes": 46800000}
    recommendation = {
        "recommended": "onnx",
        "served": "onnx",
        "by": "median latency",
        "hardware": {"cpu": "Example 9000", "threads": 2},
        "measured": [{**measured, "accuracy": 0.99}],
    }
    assert inputs.bundle is not None
    again = inputs.bundle.with_name("2")
    with sealed.stage(again, kind=bundles.KIND) as staging:
        shutil.copytree(inputs.bundle, staging, dirs_exist_ok=True)
        (staging / bundles.PARITY).unlink()
        parity = json.loads((inputs.bundle / bundles.PARITY).read_text())
        checks = [*parity["checks"], {**check, **told, "tolerance": None}]
        sealed.write_json(staging / bundles.PARITY, {**parity, "checks": checks, "accuracy": [judged]})
        sealed.write_json(staging / "recommendation.json", recommendation)
        (staging / sealed.MANIFEST).unlink()
    words = replace(inputs, bundle=again).page().words("parity")
    assert "model.onnx float32 2 1.23e-6 1e-4 golden passed" in words
    assert "model.int8.onnx int8 1 0.3 – golden passed" in words
    assert "model.int8.onnx int8 200 98.5 % 99.0 % 0.50 0.50 2.1 % 1.2 % passed" in words
    assert "model.int8.onnx cat dog 3" in words
    assert "Recommended on Example 9000 with 2 threads: onnx, by median latency." in words
    assert "onnx 99.0 % 16.20 119.00 46.80 0.90" in words


def test_a_failed_smoke_test_is_shown_as_failed(inputs: Inputs) -> None:
    assert inputs.smoke is not None
    content = json.loads(inputs.smoke.read_bytes())
    content["protocols"]["grpc"]["agreeing"] = 10
    content["bad_inputs"][0]["passed"] = False
    content |= {"verdict": "failed", "release": "pets/2@000000000000"}
    content["disagreements"] = [{"file": "a<b>.png", "problem": "the server answered 'dog'"}]
    sealed.write_json(inputs.smoke, content)
    page = inputs.page()
    assert "Served as evaluated 10 of 11 Smoke test failed; 11 of 11 over HTTP" in page.words("header")
    assert page.all("div", "figure bad")
    assert page.all("td", "bad")
    serving = page.words("serving")
    assert "file: a<b>.png, problem: the server answered 'dog'" in serving
    assert "The smoke test saw release pets/2@000000000000, which is not the bundle of this page" in serving


def test_a_server_that_never_started_is_shown_as_failed(inputs: Inputs) -> None:
    assert inputs.smoke is not None
    sealed.write_json(inputs.smoke, {"verdict": "failed", "release": "pets/3@0", "disagreements": []})
    page = inputs.page()
    assert "Served as evaluated Failed nothing was answered" in page.words("header")
    assert "the smoke test ended before that" in page.words("serving")


def test_missing_parts_are_said_to_be_missing(inputs: Inputs) -> None:
    page = replace(inputs, bundle=None, smoke=None).page()
    words = page.words("header")
    assert "Parity – not exported" in words
    assert words.count("not served") == 2
    assert "Nothing was exported from this run" in page.words("parity")
    assert "This run was not served" in page.words("serving")
    assert "what the bundle says of itself" not in page.words("environment")


def test_configuration_and_provenance_are_shown_value_by_value(inputs: Inputs) -> None:
    page = inputs.page()
    settings = page.words("configuration")
    html = page.html[page.html.index('id="configuration"') :]
    for name, section in configuration.to_dict(Config()).items():
        assert f"<h3>{name}</h3>" in html
        for key in section:
            assert f"<dt>{key}</dt>" in html
    assert "run name run" in settings
    environment = unescape(html[html.index('id="environment"') :])
    for name, value in [("python", "3.11.7"), ("commit", "1f0c2e7b"), ("dirty", "true"), ("threads", "2")]:
        assert f"<dt>{name}</dt><dd>{value}</dd>" in environment
    assert "<h3>provenance</h3>" in environment
    assert "<dt>classes</dt><dd>cat, dog</dd>" in environment


def test_nothing_is_loaded_from_elsewhere(inputs: Inputs) -> None:
    page = inputs.page()
    for name, attributes in page.tags:
        for key in ("src", "href", "srcset", "data", "action", "poster"):
            assert not attributes.get(key) or attributes[key].startswith(("data:", "#")), (name, attributes)
    assert not re.search(
        r"https?:|//[a-z]|@import|url\(", re.sub(r"base64,[^\"]*", "", page.html.split("<script>")[0])
    )
    policies = [meta["content"] for meta in page.all("meta") if meta.get("http-equiv")]
    assert policies == [
        "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
    ]


ODD = "<script>alert(1)</script> '\"& \u00fc\u65e5\n\u202e\u200d.png".replace("/", "\u2215")


def test_odd_names_are_escaped_and_made_visible(inputs: Inputs, tmp_path: Path) -> None:
    classes = ("<b>'cat'</b>", "d\u00f6g & \u72ac")
    answers = [(classes[1], classes[0], 0.9), (classes[0], classes[0], 0.8)]
    undecodable = os.fsdecode(b"\xff.png")
    images, evaluation = evaluate(
        tmp_path / "odd", classes, answers, names=lambda position: ODD if position == 0 else undecodable
    )
    bundle = export(tmp_path / "odd" / "bundles" / "1", classes)
    change_smoke(inputs, server="<i>Triton</i>")
    page = replace(inputs, data_root=images, evaluation=evaluation, bundle=bundle).page()
    assert len(page.all("script")) == 1
    assert not page.all("i")
    words = page.words()
    assert "<script>alert(1)<\u2215script> '\"& \u00fc\u65e5\\n\\u202e\u200d.png" in words
    assert "predicted <b>'cat'</b> 90.0 % true d\u00f6g & \u72ac 10.0 %" in words
    assert "<i>Triton</i>" in words


def test_undecodable_file_names_can_be_written(inputs: Inputs, tmp_path: Path) -> None:
    images, evaluation = evaluate(
        tmp_path / "odd", answers=[("dog", "cat", 0.9)], names=lambda _: os.fsdecode(b"\xff.png")
    )
    assert "\\udcff.png" in replace(inputs, data_root=images, evaluation=evaluation).page().words("pictures")


def test_text_that_cannot_be_seen_is_spelled_out() -> None:
    assert visible("a\tb\u2028c\u200d\u00a0d") == "a\\tb\\u2028c\u200d\u00a0d"


def test_a_thousand_classes_give_a_page_of_bounded_size(inputs: Inputs, tmp_path: Path) -> None:
    classes = [f"class {i:04d}" for i in range(1000)]
    answers = [(name, name, 0.9) for name in classes for _ in range(2)]
    answers += [
        (classes[i], classes[(i * 7 + 1) % 1000], 0.5) for i in range(500) for _ in range(1 + (i == 7))
    ]
    images, evaluation = evaluate(tmp_path / "thousand", classes, answers)
    bundle = export(tmp_path / "thousand" / "bundles" / "1", classes)
    page = replace(inputs, data_root=images, evaluation=evaluation, bundle=bundle).page()
    assert page.path.stat().st_size < 200_000
    assert not page.all("table", "matrix")
    assert "40 of 500 confused pairs, most frequent first" in page.words("confusion")
    assert "True Predicted Images Of the true class class 0007 class 0050 2 50.0 %" in page.words("confusion")
    assert "The 40 of 1,000 classes with the lowest F1." in page.words("classes")
    assert "class 0999" in page.words("classes")
    assert "class 0001 " not in page.words("classes")
    assert "and 988 more" in page.words("environment")


def test_forty_classes_still_get_a_matrix(inputs: Inputs, tmp_path: Path) -> None:
    classes = [f"{i:02d}" for i in range(MOST_CLASSES)]
    images, evaluation = evaluate(tmp_path / "forty", classes, [(name, name, 0.9) for name in classes])
    page = replace(inputs, data_root=images, evaluation=evaluation).page()
    assert len(page.all("td", "right")) == MOST_CLASSES


def test_a_long_run_gives_a_page_of_bounded_size(inputs: Inputs) -> None:
    lines = [
        {
            "kind": "train",
            "step": step,
            "samples": step,
            "loss": 1 / step,
            "lr": 0.1,
            "images_per_second": 1e3 + step % 7,
        }
        for step in range(1, 20_001)
    ]
    describe(inputs.run, lines)
    assert inputs.page().path.stat().st_size < 150_000


def test_values_that_are_nan_or_absent_are_said_and_not_drawn(inputs: Inputs, tmp_path: Path) -> None:
    train = {"kind": "train", "epoch": 0}
    lines = [
        {**train, "step": 1, "loss": 2.0, "lr": 0.1},
        {**train, "step": 2, "loss": math.nan, "lr": 0.1, "images_per_second": None},
        {**train, "step": 3, "loss": math.inf, "lr": 0.1},
        {"kind": "evaluation", "step": 3, "weights": "raw", "loss": math.nan, "accuracy": math.nan},
    ]
    describe(inputs.run, lines)
    rows = [
        {"class": "cat", "precision": None, "recall": math.nan, "f1": None, "support": 0},
        {"class": "dog", "precision": 1.0, "recall": 1.0, "f1": 1.0, "support": 11},
    ]
    images, evaluation = evaluate(tmp_path / "nan", per_class=rows, loss=math.nan)
    change_smoke(inputs, protocols={"http": {"images": 0, "agreeing": 0} | dict.fromkeys(SERVING_FIGURES)})
    page = replace(inputs, data_root=images, evaluation=evaluation).page()
    assert "2 of 3 values of train are not finite (first at step 2)" in page.words("curves")
    assert "1 of 1 values of validation are not finite" in page.words("curves")
    assert "Images per second Not recorded." in page.words("curves")
    assert "cat – NaN – 0" in page.words("classes")
    assert "HTTP 0 0 – – – –" in page.words("serving")
    assert "nan" not in "".join(path["d"] for path in page.all("path")).lower()


SERVING_FIGURES = ("max_probability_difference", "requests_per_second", "p50_ms", "p99_ms")


def test_a_run_without_a_single_logged_step_has_a_page(inputs: Inputs) -> None:
    describe(inputs.run, [])
    words = inputs.page().words("curves")
    assert "No training step was recorded." in words
    assert words.count("Not recorded.") == 4


def test_a_line_torn_by_a_kill_is_left_out_and_a_repeated_step_counts_once(inputs: Inputs) -> None:
    metrics = inputs.run / "metrics.jsonl"
    again = (
        '{"kind": "train", "step": 40, "samples": 2560, "loss": 0.7, "lr": 0.001, "images_per_second": 9}\n'
    )
    metrics.write_text(metrics.read_text() + again + '{"kind": "train", "step": 50, "lo')
    words = inputs.page().words("curves")
    assert "train 0.7" in words
    assert "40 optimiser steps" in words


def test_equal_inputs_give_equal_bytes_and_nothing_is_left_behind(inputs: Inputs) -> None:
    first = inputs.page().path.read_bytes()
    before = sorted(inputs.run.iterdir())
    assert inputs.page().path.read_bytes() == first
    assert sorted(inputs.run.iterdir()) == before


def test_a_failed_report_leaves_the_previous_one(inputs: Inputs) -> None:
    previous = inputs.page().path.read_bytes()
    (inputs.data_root / "00010.png").unlink()
    with pytest.raises(SlipwayError):
        inputs.page()
    assert (inputs.run / "report.html").read_bytes() == previous


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.yaml", "optimizer: {lr: fast}\n"),
        ("config.yaml", None),
        ("environment.json", "{"),
        ("environment.json", "[]"),
        ("environment.json", None),
        ("metrics.jsonl", '{"kind": "train"}\n'),
        ("metrics.jsonl", '{"kind": "train", "step": 1, "loss": "low"}\n'),
        ("metrics.jsonl", '{"kind": "diary", "step": 1}\n'),
        ("metrics.jsonl", "\x00\n"),
        ("metrics.jsonl", None),
    ],
)
def test_a_broken_run_is_reported_by_file(inputs: Inputs, name: str, content: str | None) -> None:
    (inputs.run / name).unlink()
    if content is not None:
        (inputs.run / name).write_text(content)
    with pytest.raises(SlipwayError, match=re.escape(str(inputs.run / name))):
        inputs.page()


@pytest.mark.parametrize(
    "content",
    [
        "not JSON",
        "[]",
        '{"verdict": "passed"}',
        '{"verdict": "passed", "release": "r", "disagreements": [], "protocols": {"http": {}}}',
        '{"verdict": "passed", "release": "r", "disagreements": [], "bad_inputs": [1]}',
    ],
)
def test_a_broken_smoke_result_is_reported_by_file(inputs: Inputs, content: str) -> None:
    assert inputs.smoke is not None
    inputs.smoke.write_text(content)
    with pytest.raises(SlipwayError, match=r"smoke\.json"):
        inputs.page()


@pytest.mark.parametrize(
    "changed",
    [
        {"samples": 12},
        {"accuracy": 0.99},
        {"accuracy": math.nan},
        {"confusion": [[6]]},
        {"confusion": "none"},
        {"per_class": []},
        {"per_class": [{"class": "cat"}, {"class": "dog"}]},
    ],
)
def test_figures_that_contradict_each_other_are_refused(
    inputs: Inputs, tmp_path: Path, changed: dict[str, Any]
) -> None:
    images, evaluation = evaluate(tmp_path / "wrong", **changed)
    with pytest.raises(SlipwayError, match=r"metrics\.json|predictions\.jsonl"):
        replace(inputs, data_root=images, evaluation=evaluation).page()


def test_predictions_that_do_not_add_up_to_the_matrix_are_refused(inputs: Inputs, tmp_path: Path) -> None:
    images, evaluation = evaluate(tmp_path / "wrong", confusion=[[5, 1], [1, 4]])
    with pytest.raises(SlipwayError, match=r"predictions\.jsonl: does not add up to the confusion matrix"):
        replace(inputs, data_root=images, evaluation=evaluation).page()


def test_a_picture_that_is_gone_changed_or_damaged_is_reported_by_file(inputs: Inputs) -> None:
    picture_file = inputs.data_root / "00010.png"
    picture_file.write_bytes(picture(999))
    with pytest.raises(SlipwayError, match=r"00010\.png.*not the picture that was evaluated"):
        inputs.page()
    picture_file.unlink()
    with pytest.raises(SlipwayError, match=r"00010\.png"):
        inputs.page()


def test_a_changed_evaluation_or_bundle_is_refused(inputs: Inputs) -> None:
    assert inputs.bundle is not None
    for path in (inputs.bundle / "parity.json", inputs.evaluation / "predictions.jsonl"):
        path.chmod(0o644)
        path.write_bytes(path.read_bytes() + b"\n")
        with pytest.raises(SlipwayError, match=re.escape(str(path))):
            inputs.page()


def test_a_bundle_of_another_checkpoint_is_refused(inputs: Inputs, tmp_path: Path) -> None:
    other = export(tmp_path / "bundles" / "pets" / "4", checkpoint="step-00000020")
    with pytest.raises(
        SlipwayError, match="was exported from step-00000020, but step-00000040 was evaluated"
    ):
        replace(inputs, bundle=other).page()


def test_a_report_that_cannot_be_written_says_where(inputs: Inputs) -> None:
    (inputs.run / "report.html").mkdir()
    with pytest.raises(SlipwayError, match=r"report\.html: cannot be written"):
        inputs.page()
    assert not list(inputs.run.glob(".report*"))

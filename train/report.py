"""One self-contained page a run: what was trained, how good it is, whether what is served is what was trained.

This file reads and checks; `charts.py` draws, `report.html.j2` words and lays out. Equal inputs give equal bytes.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from slipway import bundle as bundles
from slipway import config as configuration
from slipway import hashing, preprocessing, sealed
from slipway.contract import Preprocessing
from slipway.errors import SlipwayError
from train import charts, parity_page
from train.charts import number
from train.config import Config
from train.page import Table, fixed, percent, write_page
from train.recommend import RECOMMENDATION
from train.tables import Column, groups, or_else, table, text, verdict

MOST_CLASSES = 40
"""Above this many classes, the most confused pairs stand for the matrix, and the worst classes for all."""
MOST_MISTAKES = 60
MOST_UNCERTAIN = 24
CURVES: dict[str, tuple[str, charts.Emphasis]] = {
    "train": ("train", "quiet"),
    "raw": ("validation", "strong"),
    "ema": ("moving average", "dashed"),
}


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """One evaluated picture, with the probabilities of the predicted and of the true class."""

    file: str
    sha256: str
    label: str
    predicted: str
    confidence: float
    label_probability: float


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """figures: `metrics.json` as it stands. confusion: int64 [classes, classes], rows true, columns predicted."""

    figures: Mapping[str, Any]
    confusion: npt.NDArray[np.int64]
    predictions: Sequence[Prediction]

    def confused(self) -> list[tuple[str, str, int, float]]:
        """Each (true class, predicted class, images, share of the true class) gone wrong, most frequent first."""
        names, counts = self.figures["classes"], self.confusion
        wrong = [(t, p) for t, p in np.argwhere(counts).tolist() if t != p]
        wrong.sort(key=lambda pair: -counts[pair])
        return [(names[t], names[p], int(counts[t, p]), counts[t, p] / counts[t].sum()) for t, p in wrong]


def write_report(
    run: Path, data_root: Path, evaluation: Path, bundle: Path | None, smoke: Path | None
) -> Path:
    """Write `report.html` into `run`, replacing the one that is there in one step, and return its path.

    evaluation, bundle: sealed directories; they are verified first. data_root: what the files named in
    `predictions.jsonl` are relative to. bundle, smoke: None when nothing was exported or served; the page says so.

    Raises:
        SlipwayError: an input is missing, damaged, or contradicts another one; the message names the file.
    """
    config: Config = configuration.load(Config, run / "config.yaml", {})
    test = read_evaluation(evaluation)
    many = len(test.figures["classes"]) > MOST_CLASSES
    content = {
        "run": run.name,
        "model": config.model.name,
        "test": test.figures,
        "right": int(np.trace(test.confusion)),
        "interval": wilson(int(np.trace(test.confusion)), test.figures["samples"]),
        "curves": learning_curves(run / "metrics.jsonl"),
        "heat_map": None if many else charts.heat_map(test.figures["classes"], test.confusion),
        "confused": test.confused(),
        "classes": per_class(test),
        "gallery": gallery(test, data_root, config.image.preprocessing()),
        "bundle": None if bundle is None else read_bundle(bundle, test.figures["checkpoint"]),
        "served": None if smoke is None else read_smoke(smoke),
        "configuration": groups(configuration.to_dict(config)),
        "environment": groups(_read_json(run / "environment.json")),
        "most": MOST_CLASSES,
    }
    return write_page(run / "report.html", "report.html.j2", content)


def read_evaluation(directory: Path) -> Evaluation:
    """Read a sealed evaluation and check that its two files tell the same story."""
    sealed.verify(directory, "evaluation")
    path = directory / "metrics.json"
    figures = _read_json(path)
    with _blaming(path):
        index = {name: position for position, name in enumerate(figures["classes"])}
        confusion = np.array(figures["confusion"], dtype=np.int64)
        if confusion.shape != (len(index), len(index)) or confusion.sum() != figures["samples"]:
            raise ValueError("the confusion matrix does not fit `classes` and `samples`")
        if not math.isclose(figures["accuracy"], np.trace(confusion) / figures["samples"], abs_tol=1e-5):
            raise ValueError("the accuracy does not follow from the confusion matrix")
        if [row["class"] for row in figures["per_class"]] != figures["classes"]:
            raise ValueError("`per_class` does not list `classes`")
        per_class(Evaluation(figures=figures, confusion=confusion, predictions=[]))
    path = directory / "predictions.jsonl"
    predictions = [_prediction(line, index, where) for where, line in _json_lines(path)]
    seen = np.zeros_like(confusion)
    np.add.at(
        seen,
        ([index[each.label] for each in predictions], [index[each.predicted] for each in predictions]),
        1,
    )
    if not np.array_equal(seen, confusion):
        raise SlipwayError(f"{path}: does not add up to the confusion matrix in metrics.json; evaluate again")
    return Evaluation(figures=figures, confusion=confusion, predictions=predictions)


def _prediction(line: Mapping[str, Any], index: Mapping[str, int], where: str) -> Prediction:
    with _blaming(where):
        probabilities = line["probabilities"]
        if len(probabilities) != len(index):
            raise ValueError(f"{len(probabilities)} probabilities for {len(index)} classes")
        return Prediction(
            **{name: line[name] for name in ("file", "sha256", "label", "predicted")},
            confidence=float(probabilities[index[line["predicted"]]]),
            label_probability=float(probabilities[index[line["label"]]]),
        )


def read_bundle(directory: Path, checkpoint: str) -> dict[str, Any]:
    """What the page says of a bundle: release, parity verdict, comparisons and tolerances, provenance.

    checkpoint: the one that was evaluated; a bundle that was made from another is refused.
    """
    release = bundles.open_bundle(directory).release
    provenance = _read_json(directory / bundles.PROVENANCE)
    if (made_from := provenance.get("checkpoint", checkpoint)) != checkpoint:
        raise SlipwayError(f"{directory}: was exported from {made_from}, but {checkpoint} was evaluated")
    path = directory / bundles.PARITY
    parity = _read_json(path)
    with _blaming(path):
        checks = parity["checks"]
        judged = [check for check in checks if check["tolerance"] is not None]
        return {
            "release": release,
            "verdict": text(parity["verdict"]),
            "checks": parity_page.every_check(checks),
            "artefacts": parity_page.distances(checks),
            **parity_page.accuracies(parity.get("accuracy", [])),
            "recommendation": read_recommendation(directory / RECOMMENDATION),
            "furthest": max(judged, key=parity_page.share_of_tolerance),
            "tolerances": groups(parity["tolerances"], "tolerance"),
            "provenance": groups(provenance, "provenance")
            + groups(_read_json(directory / bundles.SIGNATURE), "signature"),
        }


def read_recommendation(path: Path) -> dict[str, Any] | None:
    """What was measured side by side on which machine, and what is recommended for it; None if nothing was."""
    if not path.exists():
        return None
    content = _read_json(path)
    with _blaming(path):
        return parity_page.recommendation(content)


def read_smoke(path: Path) -> dict[str, Any]:
    """What the page says of serving: verdict, one record a protocol, inputs that were refused, disagreements.

    Where the server did not even start there is a verdict and a release, and the rest is empty.
    """
    content = _read_json(path)
    with _blaming(path):
        names = {"http": "HTTP", "grpc": "gRPC"}
        found = content.get("protocols", {})
        # In the order of `names`: the keys of the file are sorted.
        protocols = [
            {"protocol": names.get(key, key), **found[key]} for key in {**names, **found} if key in found
        ]
        columns: list[Column] = [
            ("Protocol", "protocol", text),
            ("Images", "images", number),
            ("Same answer", "agreeing", number),
            ("Largest difference in probability", "max_probability_difference", number),
            ("Requests per second", "requests_per_second", number),
            ("p50, ms", "p50_ms", fixed),
            ("p99, ms", "p99_ms", fixed),
        ]
        refused: list[Column] = [("Input", "name", text), ("HTTP", "http", text), ("gRPC", "grpc", text)]
        return {
            **{name: text(content[name]) for name in ("verdict", "release")},
            "server": text(content.get("server", "the server")),
            "protocols": protocols,
            "table": table(columns, protocols),
            "bad_inputs": table([*refused, ("Verdict", "passed", verdict)], content.get("bad_inputs", [])),
            "disagreements": [text(each) for each in content["disagreements"]],
        }


def wilson(right: int, total: int, z: float = 1.959964) -> tuple[float, float]:
    """Wilson's score interval of a share (95 %): unlike the usual one it makes sense at 0 and at 1."""
    share, shrink = right / total, 1 + z**2 / total
    centre = share + z**2 / (2 * total)
    spread = z * math.sqrt(share * (1 - share) / total + z**2 / (4 * total**2))
    return max(0.0, (centre - spread) / shrink), min(1.0, (centre + spread) / shrink)


def learning_curves(path: Path) -> dict[str, Any]:
    """The charts, how many steps and samples were trained on, and the best validation accuracy as (step, percent)."""
    lines: dict[str, dict[float, dict[str, Any]]] = {"train": {}, "raw": {}, "ema": {}}
    for where, line in _json_lines(path, torn_end=True):
        with _blaming(where):
            if line["kind"] == "layers":
                continue
            # A step that was repeated after a resume counts as it went the last time.
            lines["train" if line["kind"] == "train" else line["weights"]][float(line["step"])] = line

    def curve(kind: str, key: str, factor: float = 1) -> charts.Series:
        logged = [(step, line.get(key)) for step, line in sorted(lines[kind].items())]
        points = [(step, factor * value) for step, value in logged if value is not None]
        name, emphasis = CURVES[kind]
        return charts.Series(name=name, points=points, emphasis=emphasis)

    with _blaming(path):
        validated = ["raw", "ema"] if lines["ema"] else ["raw"]
        accuracies = [curve(kind, "accuracy", 100) for kind in validated]
        finite = [point for each in accuracies for point in each.points if math.isfinite(point[1])]
        last = max(lines["train"], default=0.0)
        rate, speed = curve("train", "lr"), curve("train", "images_per_second")
        return {
            "charts": [
                charts.line_chart(
                    "Loss", [curve(kind, "loss") for kind in ["train", *validated]], last_step=last
                ),
                charts.line_chart("Validation accuracy, %", accuracies, last_step=last),
                charts.line_chart("Learning rate", [rate], last_step=last, from_zero=True),
                charts.line_chart("Images per second", [speed], last_step=last, from_zero=True),
            ],
            "steps": last,
            "samples": lines["train"][last].get("samples") if last else 0,
            "best": max(finite, key=lambda point: point[1], default=None),
        }


def per_class(test: Evaluation) -> Table:
    """Precision, recall and F1 a class, worst F1 first; of many classes, only the worst."""
    taken_for: dict[str, str] = {}
    for true, predicted, count, _ in test.confused():
        taken_for.setdefault(true, f"{predicted} ({count:,})")
    ranked = sorted(test.figures["per_class"], key=lambda row: or_else(row["f1"], -1))
    columns: list[Column] = [
        ("Class", "class", text),
        ("Precision", "precision", percent),
        ("Recall", "recall", percent),
        ("F1", "f1", percent),
        ("Images", "support", number),
        ("Most often taken for", "taken_for", text),
    ]
    worst = [{**row, "taken_for": taken_for.get(row["class"], "–")} for row in ranked[:MOST_CLASSES]]
    return table(columns, worst)


def gallery(test: Evaluation, data_root: Path, rules: Preprocessing) -> dict[str, Any]:
    """The most confident mistakes, or where there is none, the least certain right answers."""
    wrong = [each for each in test.predictions if each.label != each.predicted]
    if wrong:
        chosen = sorted(wrong, key=lambda each: (-or_else(each.confidence, -1), each.file))[:MOST_MISTAKES]
    else:
        ranked = sorted(test.predictions, key=lambda each: (or_else(each.confidence, -1), each.file))
        chosen = ranked[:MOST_UNCERTAIN]
    pictures = [(each, _picture(data_root / each.file, each.sha256, rules)) for each in chosen]
    return {"mistakes": len(wrong), "pictures": pictures}


def _picture(path: Path, sha256: str, rules: Preprocessing) -> charts.Picture:
    with _blaming(path):
        data = path.read_bytes()
        if hashing.of_bytes(data) != sha256:
            raise ValueError("it is not the picture that was evaluated; evaluate again")
        return charts.embed(preprocessing.decode(data, rules))


@contextmanager
def _blaming(where: Path | str, what: str = "cannot be used for the report") -> Iterator[None]:
    """Whatever goes wrong inside is the fault of the file `where`, and the error says so."""
    try:
        yield
    except preprocessing.ImageError as error:
        raise SlipwayError(f"{where}: {what}: {error}") from error
    except KeyError as error:
        raise SlipwayError(f"{where}: {what}: {error} is missing or not known") from error
    except (OSError, ValueError, TypeError, AttributeError, IndexError, ArithmeticError) as error:
        raise SlipwayError(f"{where}: {what}: {error}") from error


def _read_json(path: Path) -> dict[str, Any]:
    with _blaming(path):
        content = json.loads(path.read_bytes())
        if not isinstance(content, dict):
            raise TypeError("is not a JSON object")
        return content


def _json_lines(path: Path, *, torn_end: bool = False) -> Iterator[tuple[str, dict[str, Any]]]:
    """(file:line, content) of each line. With `torn_end`, a last line that a kill cut short is left out."""
    with _blaming(path):
        file = path.open("rb")
    with file:
        for count, line in enumerate(file, 1):
            if torn_end and not line.endswith(b"\n"):
                return
            with _blaming(f"{path}:{count}"):
                content = json.loads(line)
                if not isinstance(content, dict):
                    raise TypeError("is not a JSON object")
            yield f"{path}:{count}", content

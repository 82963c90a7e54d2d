"""What an exported bundle holds, and the only way to open one: verified first."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from slipway import hashing, sealed
from slipway.contract import Signature
from slipway.errors import SlipwayError
from slipway.preprocessing import preprocess

KIND = "bundle"
MODEL = "model.onnx"
WEIGHTS = "weights.safetensors"  # what training may start from; nothing that serves reads it
SIGNATURE = "signature.json"
LABELS = "labels.txt"
PARITY = "parity.json"
PROVENANCE = "provenance.json"
GOLDEN = "golden"
GOLDEN_ANSWERS = "golden/answers.json"
# Where another artefact than model.onnx is served, what that one answers: to the golden inputs, and to the images that
# the checkpoint was evaluated on.
SERVED = "served"
SERVED_ANSWERS = "served/answers.json"
SERVED_PREDICTIONS = "served/predictions.jsonl"
# What the artefact for GPUs, where there is one, answers to the golden inputs.
SERVED_ON_GPUS_ANSWERS = "served/answers_on_gpus.json"


class BundleError(SlipwayError):
    """A bundle whose parts do not fit each other."""


@dataclass(frozen=True, kw_only=True)
class Golden:
    """One input with its known answer. `pixels_sha256` is over the bytes of the uint8 [3, S, S] array."""

    path: Path
    pixels_sha256: str
    logits: npt.NDArray[np.float32]
    label: str


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """An opened bundle: every file matched its SHA-256 when it was opened."""

    directory: Path
    seal: str
    signature: Signature
    golden: tuple[Golden, ...]

    @property
    def version(self) -> int:
        """The name of the directory: bundles/<name>/<version>."""
        return int(self.directory.name)

    @property
    def release(self) -> str:
        """How answers name the bundle that produced them, e.g. `digits/3@9f86d081884c`."""
        return f"{self.signature.name}/{self.version}@{self.seal[:12]}"


def open_bundle(directory: Path) -> Bundle:
    """Verify and open a bundle.

    Raises:
        SealError: a file is missing, added or changed.
        ContractError: the signature cannot be read, or does not hash to what it says.
        BundleError: labels differ from the signature, the verdict of the parity gate is not `passed`, or the
            directory is not named by a version number.
    """
    directory = directory.absolute()  # so that it has a name, where it is given as "."
    manifest = sealed.verify(directory, KIND)
    signature = Signature.load(directory / SIGNATURE)
    if (directory / LABELS).read_bytes() != labels(signature):
        raise BundleError(f"{directory / LABELS}: the class names differ from those in {SIGNATURE}")
    if _verdict(directory / PARITY) != "passed":
        raise BundleError(f"{directory / PARITY}: the parity gate did not pass; export again")
    # Triton takes only numbers without leading zeros for a version.
    if not directory.name.isascii() or not directory.name.isdigit() or directory.name.startswith("0"):
        raise BundleError(f"{directory}: a bundle's directory is its version number: 1, 2, 3, ...")
    return Bundle(directory=directory, seal=manifest.seal, signature=signature, golden=read_golden(directory))


def _verdict(path: Path) -> object:
    try:
        return json.loads(path.read_bytes())["verdict"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BundleError(f"{path}: cannot be read as a report of the parity gate ({error!r})") from error


def labels(signature: Signature) -> bytes:
    """The label file as bundle and model repository hold it: one class name a line, in index order."""
    return "".join(f"{name}\n" for name in signature.classes).encode()


def write_golden_answers(directory: Path, answers: Sequence[Golden], file: str = GOLDEN_ANSWERS) -> None:
    """Write the answers to the golden inputs that already lie in `directory / "golden"`."""
    content = [
        {
            "file": golden.path.name,
            "pixels_sha256": golden.pixels_sha256,
            "logits": [float(value) for value in golden.logits],
            "label": golden.label,
        }
        for golden in answers
    ]
    sealed.write_json(directory / file, content)


def read_golden(directory: Path, file: str = GOLDEN_ANSWERS) -> tuple[Golden, ...]:
    """The golden inputs in `directory / "golden"`, of a bundle or of a model made from one, and answers to them.

    Raises BundleError if they cannot be read, or are said to lie elsewhere.
    """
    path = directory / file
    try:
        golden = tuple(
            Golden(
                path=directory / GOLDEN / answer["file"],
                pixels_sha256=answer["pixels_sha256"],
                logits=np.array(answer["logits"], dtype=np.float32),
                label=answer["label"],
            )
            for answer in json.loads(path.read_bytes())
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BundleError(f"{path}: cannot be read as golden answers ({error!r})") from error
    for each in golden:
        if each.path.parent != directory / GOLDEN or not each.path.is_file():
            raise BundleError(f"{path}: names {each.path}, which is no file in {directory / GOLDEN}")
    return golden


def golden_pixels(opened: Bundle) -> npt.NDArray[np.uint8]:
    """The golden inputs as model input, uint8 [golden, 3, S, S], decoded here.

    Raises BundleError where that gives other pixels than the bundle was proven with.
    """
    arrays = []
    for golden in opened.golden:
        arrays.append(preprocess(golden.path.read_bytes(), opened.signature.preprocessing))
        if hashing.of_bytes(arrays[-1].tobytes()) != golden.pixels_sha256:
            raise BundleError(
                f"{golden.path}: decodes to other pixels here than where the bundle was proven; are Pillow and "
                "slipway/preprocessing.py the same in training and serving?"
            )
    return np.stack(arrays)

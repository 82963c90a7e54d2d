"""What a published release holds, and the only way to open one: verified first."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from serve.model_config import CLASSIFIER, ENSEMBLE, PREPROCESS, Target
from slipway import bundle, sealed
from slipway.contract import Signature
from slipway.errors import SlipwayError

KIND = "release"
FORMAT = "slipway-release/2"
ABOUT = "release.json"
MODELS = "models"

# Of a model repository: the folder of its releases, and links to two of them (serve.releases).
RELEASES = "releases"
CURRENT = "current"
PREVIOUS = "previous"


@dataclass(frozen=True, kw_only=True)
class GoldenAnswer:
    """An encoded image and what the server has to answer. `probabilities`: float64 [classes]."""

    path: Path
    image: bytes
    label: str
    probabilities: npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Release:
    """An opened release: every file that was to be verified matched its SHA-256 when it was opened.

    name: what it was published as, e.g. `digits-3`; empty if it was before releases said so.
    identity: how answers name it, e.g. `digits/3@9f86d081884c`. artefact: which one of the bundle's it serves.
    tolerance: how far its probabilities may be from those of that artefact where it was proven. bundle: its seal.
    """

    directory: Path
    name: str
    identity: str
    version: int
    target: Target
    artefact: str
    tolerance: float
    bundle: str
    signature: Signature
    golden: tuple[GoldenAnswer, ...]

    @property
    def models(self) -> Path:
        """What Triton takes as its model repository."""
        return self.directory / MODELS

    @property
    def largest_batch_bytes(self) -> int:
        """What one instance of each model holds of the largest batch that it takes: images, and their pixels twice."""
        rules = self.signature.preprocessing
        return self.signature.max_batch * (rules.max_bytes + 2 * 3 * rules.image_size**2)


def open_release(directory: Path, *, with_model: bool = True) -> Release:
    """Verify and open a release, or what a link such as `model_repository/current` points to.

    with_model: verify the classifier, too, which is nearly all there is to read; who only asks its server need not do
        it again. Of a fused release, all is verified in any case.

    Raises:
        SlipwayError: nothing is published there, or something that cannot be read.
        SealError: a file is missing, added or changed.
    """
    directory = followed(directory)  # so that a link may move on while we work with this release
    sealed.verify(directory, KIND, unread="" if with_model else f"{MODELS}/{CLASSIFIER}/")
    path = directory / ABOUT
    try:
        return _read(directory, json.loads(path.read_bytes()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise SlipwayError(
            f"{path}: cannot be read as a release ({error!r}); publish its bundle again"
        ) from error


def followed(link: Path) -> Path:
    """The directory that a link leads to now, or that it is itself. Raises SlipwayError if there is none to be seen."""
    try:
        return link.resolve(strict=True)
    except FileNotFoundError:
        raise SlipwayError(f"{link}: no release is published there; `make publish` does that") from None
    except (OSError, RuntimeError) as error:  # RuntimeError is how Python calls a link that leads to itself
        raise SlipwayError(
            f"{link}: cannot be followed to a release ({error}); is its file system there, and may we read it?"
        ) from error


def _read(directory: Path, about: dict[str, Any]) -> Release:
    if about["format"] != FORMAT:
        raise SlipwayError(
            f"{directory / ABOUT}: has format {about['format']!r}; this Slipway reads {FORMAT!r}: publish its "
            "bundle again"
        )
    decoder = ENSEMBLE if about.get("fused") else PREPROCESS  # a release of earlier says nothing of it
    preprocess = directory / MODELS / decoder / str(about["version"])
    return Release(
        directory=directory,
        name=about.get("name", ""),
        identity=about["identity"],
        version=about["version"],
        target=about["target"],
        artefact=about["artefact"],
        tolerance=about["tolerance"],
        bundle=about["bundle"],
        signature=Signature.load(preprocess / bundle.SIGNATURE),
        golden=tuple(_answer(golden) for golden in bundle.read_golden(preprocess)),
    )


def _answer(golden: bundle.Golden) -> GoldenAnswer:
    exponentials = np.exp(golden.logits.astype(np.float64) - golden.logits.max())
    return GoldenAnswer(
        path=golden.path,
        image=golden.path.read_bytes(),
        label=golden.label,
        probabilities=exponentials / exponentials.sum(),
    )

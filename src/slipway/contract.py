"""The contract between training and serving: what goes in, what comes out, and the hash over all of it."""

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from slipway import hashing
from slipway.errors import SlipwayError
from slipway.sealed import write_json

FORMAT = "slipway-signature/1"

INPUT = "image"
LOGITS = "logits"
PROBABILITIES = "probabilities"


class ContractError(SlipwayError):
    """A signature that cannot be read, or does not hash to what it says."""


def can_be_a_directory(name: str) -> bool:
    """Bundles and releases are named by the model: not by a path that leads elsewhere, nor hidden."""
    return bool(name) and not name.startswith(".") and "/" not in name and name.isprintable()


@dataclass(frozen=True, kw_only=True)
class Preprocessing:
    """How encoded image bytes become model input. Applied by `slipway.preprocessing`, nowhere else.

    image_size: height and width of the model input, pixels.
    resize_size: length the shorter side is scaled to before the centre square of `image_size` is cut out.
    interpolation: antialiased filter used for scaling, up and down.
    background: RGB that transparent pixels are composited on, 0..255.
    max_bytes, max_pixels, max_aspect_ratio: larger images are refused before they are decoded.
    """

    image_size: int
    resize_size: int
    interpolation: Literal["bilinear", "bicubic"] = "bilinear"
    background: tuple[int, int, int] = (0, 0, 0)
    max_bytes: int = 32 * 2**20
    max_pixels: int = 64_000_000
    max_aspect_ratio: float = 100.0


@dataclass(frozen=True, kw_only=True)
class Signature:
    """What an exported model promises.

    Input `image`: uint8 RGB, [batch, 3, image_size, image_size], 0..255. The graph itself computes
    `(image / 255 - mean) / std`. Outputs `logits` and `probabilities`: float32, [batch, len(classes)].
    `classes` gives the name of each index, in the order of training. `1 <= batch <= max_batch`.
    """

    name: str
    classes: tuple[str, ...]
    preprocessing: Preprocessing
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    max_batch: int

    def contract_hash(self) -> str:
        """SHA-256 over everything above: two models with the same hash can replace each other."""
        return hashing.of_data(self._description())

    def save(self, path: Path) -> None:
        write_json(path, {**self._description(), "contract": self.contract_hash()})

    @classmethod
    def load(cls, path: Path) -> "Signature":
        """Raises ContractError when the file is unreadable or its hash does not match its content."""
        try:
            content = json.loads(path.read_bytes())
            if content["format"] != FORMAT:
                raise ContractError(
                    f"{path}: has format {content['format']!r}; this Slipway reads {FORMAT!r}"
                )
            signature = cls(
                name=content["name"],
                classes=tuple(content["classes"]),
                preprocessing=_preprocessing_from(content["preprocessing"]),
                mean=tuple(content["mean"]),
                std=tuple(content["std"]),
                max_batch=content["max_batch"],
            )
            if not can_be_a_directory(signature.name):
                raise ContractError(f"{path}: has the name {signature.name!r}, which no directory can have")
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ContractError(f"{path}: cannot be read as a signature ({error!r})") from error
        if content.get("contract") != signature.contract_hash():
            raise ContractError(f"{path}: does not hash to its own contract; it was edited after export")
        return signature

    def _description(self) -> dict[str, Any]:
        size = self.preprocessing.image_size
        answer = {"dtype": "float32", "shape": ["batch", len(self.classes)]}
        return {
            "format": FORMAT,
            "name": self.name,
            "classes": list(self.classes),
            "preprocessing": {
                **asdict(self.preprocessing),
                "background": list(self.preprocessing.background),
            },
            "mean": list(self.mean),
            "std": list(self.std),
            "max_batch": self.max_batch,
            "input": {
                "name": INPUT,
                "dtype": "uint8",
                "shape": ["batch", 3, size, size],
                "channels": "RGB",
                "range": [0, 255],
            },
            "outputs": {LOGITS: answer, PROBABILITIES: answer},
        }


def _preprocessing_from(content: dict[str, Any]) -> Preprocessing:
    known = {field.name for field in fields(Preprocessing)}
    if unknown := content.keys() - known:
        raise ValueError(f"unknown preprocessing parameters {sorted(unknown)}")
    return Preprocessing(**{**content, "background": tuple(content["background"])})

"""The work that every server does for an image, alike for all of them: a release's preprocessing and its model."""

import json
from pathlib import Path

import numpy as np
import numpy.typing as npt

from serve.model_config import CLASSIFIER
from serve.models import runtime
from serve.release import open_release
from slipway.preprocessing import preprocess


class Work:
    """What a server keeps between requests. threads: of the model, for one image."""

    def __init__(self, release_directory: Path, threads: int = 1) -> None:
        self.release = open_release(release_directory)
        directory = self.release.models / CLASSIFIER / str(self.release.version)
        artefact = json.loads((directory / "serving.json").read_bytes())["artefact"]
        self._run = runtime.load(
            artefact["runtime"], directory / artefact["file"], artefact["settings"], threads
        )

    def probabilities(self, image: bytes) -> npt.NDArray[np.float32]:
        """float32 [classes] for an encoded image."""
        pixels = preprocess(image, self.release.signature.preprocessing)
        _, probabilities = self._run(pixels[None])
        return probabilities[0]

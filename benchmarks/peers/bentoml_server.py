"""BentoML: one worker with a thread for each CPU. More workers on one machine were served as one."""

import os
from pathlib import Path
from typing import Annotated

import bentoml
from bentoml.validators import ContentType

from benchmarks.work import Work


# Without its access log: none of the others writes one.
@bentoml.service(workers=1, threads=int(os.environ["SLIPWAY_CPUS"]), logging={"access": {"enabled": False}})
class Classifier:
    def __init__(self) -> None:
        self.work = Work(Path(os.environ["SLIPWAY_RELEASE"]))

    @bentoml.api(route="/classify")
    def classify(self, image: Annotated[Path, ContentType("image/*")], /) -> dict[str, list[float]]:
        return {"probabilities": self.work.probabilities(image.read_bytes()).tolist()}


if __name__ == "__main__":
    bentoml.serve(
        "benchmarks.peers.bentoml_server:Classifier",
        host="127.0.0.1",
        port=int(os.environ["SLIPWAY_PORT"]),
        blocking=True,
    )

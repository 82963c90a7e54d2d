"""LitServe: a process for each CPU, each with the model, behind one HTTP server."""

import os
from pathlib import Path
from typing import Any

import litserve
from fastapi import UploadFile

from benchmarks.work import Work


class Classifier(litserve.LitAPI):
    def setup(self, device: str) -> None:  # noqa: ARG002 - LitServe passes it
        self.work = Work(Path(os.environ["SLIPWAY_RELEASE"]))

    def decode_request(self, request: UploadFile, **_: Any) -> bytes:
        return request.file.read()

    def predict(self, image: bytes, **_: Any) -> Any:
        return self.work.probabilities(image)

    def encode_response(self, output: Any, **_: Any) -> dict[str, list[float]]:
        return {"probabilities": output.tolist()}


if __name__ == "__main__":
    workers = int(os.environ["SLIPWAY_CPUS"])
    server = litserve.LitServer(
        Classifier(api_path="/classify"), accelerator="cpu", devices=1, workers_per_device=workers
    )
    server.run(
        host="127.0.0.1",
        port=int(os.environ["SLIPWAY_PORT"]),
        num_api_servers=1,
        log_level="warning",
        generate_client_file=False,
    )

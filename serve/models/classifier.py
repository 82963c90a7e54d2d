"""The Triton model `classifier` in Triton's Python backend: ONNX Runtime or OpenVINO, whatever the bundle serves.

For ONNX, NVIDIA's container has a backend of its own and needs no Python here.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import triton_python_backend_utils as pb_utils

from serve.models import INTERNAL, PROBE, directory_of, environment, runtime, serving_of
from serve.models.counters import Counters


class GoldenMismatch(Exception):
    """The model does not answer golden inputs as it did when it was exported."""


class TritonPythonModel:
    """Triton calls `initialize` once for each instance, then `execute` with every batch of requests."""

    def initialize(self, args: dict[str, str]) -> None:
        """Raises when this environment would not give the answers that the bundle was proven with."""
        directory = directory_of(args)
        serving = serving_of(directory)
        versions = environment.check(serving["python"], serving["packages"])
        config, artefact = json.loads(args["model_config"]), serving["artefact"]
        threads = int(config["parameters"]["intra_op_thread_count"]["string_value"])
        self._run = runtime.load(
            artefact["runtime"], directory / artefact["file"], artefact["settings"], threads
        )
        self._check_golden(directory, config["max_batch_size"], artefact["tolerance"])
        self._start_counting(serving, directory.parent / "labels.txt")
        pb_utils.Logger.log_info(f"{args['model_instance_name']}: {serving['release']} with {versions}")

    def execute(self, requests: list[Any]) -> list[Any]:
        """Run all requests of a batch as one; the Python backend does not concatenate them itself."""
        images = [pb_utils.get_input_tensor_by_name(request, "image").as_numpy() for request in requests]
        answers = self.answers(requests, images)
        if isinstance(answers, pb_utils.TritonError):
            return [pb_utils.InferenceResponse(error=answers) for _ in requests]
        return [pb_utils.InferenceResponse(answer) for answer in answers]

    def answers(self, requests: list[Any], images: list[npt.NDArray[np.uint8]]) -> list[list[Any]] | Any:
        """For each request its tensors of logits and of probabilities, or one TritonError for all of them.

        images: of each request, uint8 [any number, 3, S, S].
        """
        try:
            logits, probabilities = self._run(np.concatenate(images))
            self._count(requests, images, logits)
        except Exception as error:  # noqa: BLE001
            # Nobody outside learns more than that: a traceback shows paths and versions.
            pb_utils.Logger.log_error(f"a batch of {len(requests)} requests failed: {error!r}")
            self._errors[INTERNAL].add(len(requests))
            return pb_utils.TritonError(
                "INTERNAL: inference failed; see the server's log", pb_utils.TritonError.INTERNAL
            )
        ends = np.cumsum([len(image) for image in images])[:-1]
        return [
            [pb_utils.Tensor("logits", own_logits), pb_utils.Tensor("probabilities", own_probabilities)]
            for own_logits, own_probabilities in zip(
                np.split(logits, ends), np.split(probabilities, ends), strict=True
            )
        ]

    def finalize(self) -> None:
        self._counters.stop()

    def _start_counting(self, serving: dict[str, Any], labels: Path) -> None:
        self._counters = Counters()
        self._errors = self._counters.errors("classifier", [INTERNAL])
        classes = labels.read_text(encoding="utf-8").splitlines()
        predicted = self._counters.inputs("predicted", classes, serving["expected"].get("predicted", {}))
        self._predicted = [predicted[name] for name in classes]
        self._counters.start()

    def _count(
        self, requests: list[Any], images: list[npt.NDArray[np.uint8]], logits: npt.NDArray[np.float32]
    ) -> None:
        """Which class won for each image that is no probe's."""
        start = 0
        best = logits.argmax(axis=1)
        for request, image in zip(requests, images, strict=True):
            stop = start + len(image)
            if request.request_id() != PROBE:
                for index in best[start:stop]:
                    self._predicted[index].add()
            start = stop

    def _check_golden(self, directory: Path, max_batch: int, tolerance: float) -> None:
        """Run the golden pixels, in batches as large as they come: this also warms up.

        tolerance: on logits; relative to the largest of them where that is above 1.
        """
        images = np.load(directory / "golden_pixels.npy")
        expected = np.load(directory / "golden_logits.npy")
        for start in range(0, len(images), max_batch):
            stop = start + max_batch
            logits, _ = self._run(images[start:stop])
            difference = np.abs(logits - expected[start:stop]).max()
            limit = tolerance * max(1.0, float(np.abs(expected[start:stop]).max()))
            if not difference <= limit:  # NaN is within no limit
                raise GoldenMismatch(
                    f"golden logits differ by {difference:.3g} from those of the export; the limit is {limit:.3g}"
                )

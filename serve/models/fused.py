"""The Triton model `classify` where it is one: `preprocess` and `classifier`, by their own code, in one process.

What it saves is the way of the pixels from one process to another.
"""

from typing import Any

import triton_python_backend_utils as pb_utils

from serve.models import classifier, preprocess


class TritonPythonModel:
    """Triton calls `initialize` once for each instance, then `execute` with every batch of requests."""

    def initialize(self, args: dict[str, str]) -> None:
        """Raises when this environment would not give the pixels and answers that the bundle was proven with."""
        self._preprocess = preprocess.TritonPythonModel()
        self._preprocess.initialize(args)
        self._classifier = classifier.TritonPythonModel()
        self._classifier.initialize(args)

    def execute(self, requests: list[Any]) -> list[Any]:
        """One response for each request, in order; those whose images can be read are one batch of the classifier."""
        pixels = [self._preprocess.pixels_of(request) for request in requests]
        good = [index for index, own in enumerate(pixels) if not isinstance(own, pb_utils.TritonError)]
        answers: Any = []
        if good:
            answers = self._classifier.answers([requests[i] for i in good], [pixels[i] for i in good])
        if isinstance(answers, pb_utils.TritonError):
            answers = [answers] * len(good)
        results = dict(enumerate(pixels)) | dict(zip(good, answers, strict=True))
        return [self._response(results[index], pixels[index]) for index in range(len(requests))]

    def finalize(self) -> None:
        self._preprocess.finalize()
        self._classifier.finalize()

    def _response(self, result: Any, pixels: Any) -> Any:
        """result: the tensors of an answer, or a TritonError."""
        if isinstance(result, pb_utils.TritonError):
            return pb_utils.InferenceResponse(error=result)
        return pb_utils.InferenceResponse([*result, self._preprocess.release(len(pixels))])

"""The Triton model `preprocess`: encoded image bytes in, uint8 pixels out."""

import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import triton_python_backend_utils as pb_utils

from serve.models import INTERNAL, PROBE, directory_of, environment, serving_of
from serve.models.counters import Counters
from slipway import bundle, hashing
from slipway.contract import Signature
from slipway.input_statistics import BRIGHTNESS, SHORTER_SIDE, bin_of, bins, brightness
from slipway.preprocessing import CODES, ImageError, preprocess, preprocess_sized


class GoldenMismatch(Exception):
    """A golden image does not decode to the pixels that the model was proven with."""


class TritonPythonModel:
    """Triton calls `initialize` once for each instance, then `execute` with every batch of requests."""

    def initialize(self, args: dict[str, str]) -> None:
        """Raises when this environment would not give the pixels that the bundle was proven with."""
        directory = directory_of(args)
        serving = serving_of(directory)
        versions = environment.check(serving["python"], serving["packages"])
        self._rules = Signature.load(directory / bundle.SIGNATURE).preprocessing
        self._release = serving["release"].encode()
        self._check_golden(directory)
        self._start_counting(serving)
        pb_utils.Logger.log_info(f"{args['model_instance_name']}: {serving['release']} with {versions}")

    def execute(self, requests: list[Any]) -> list[Any]:
        """One response for each request, in order: a bad image concerns nobody but its sender."""
        return [self._respond(request) for request in requests]

    def pixels_of(self, request: Any) -> npt.NDArray[np.uint8] | Any:
        """uint8 [images of the request, 3, S, S], or a TritonError that says why there are none."""
        try:
            encoded = pb_utils.get_input_tensor_by_name(request, "encoded").as_numpy()
            return self._pixels(
                [bytes(data) for data in encoded.reshape(-1)], counted=request.request_id() != PROBE
            )
        except ImageError as error:
            self._errors[error.code].add()
            return pb_utils.TritonError(str(error), pb_utils.TritonError.INVALID_ARG)
        except Exception as error:  # noqa: BLE001
            # Nobody outside learns more than that: a traceback shows paths and versions.
            pb_utils.Logger.log_error(f"request {request.request_id()!r}: preprocessing failed: {error!r}")
            self._errors[INTERNAL].add()
            return pb_utils.TritonError(
                "INTERNAL: preprocessing failed; see the server's log", pb_utils.TritonError.INTERNAL
            )

    def release(self, images: int) -> Any:
        """The tensor that says of so many images who answered them."""
        return pb_utils.Tensor("release", np.full((images, 1), self._release, dtype=np.object_))

    def _respond(self, request: Any) -> Any:
        pixels = self.pixels_of(request)
        if isinstance(pixels, pb_utils.TritonError):
            return pb_utils.InferenceResponse(error=pixels)
        return pb_utils.InferenceResponse([pb_utils.Tensor("image", pixels), self.release(len(pixels))])

    def finalize(self) -> None:
        self._counters.stop()

    def _pixels(self, images: list[bytes], *, counted: bool) -> npt.NDArray[np.uint8]:
        """uint8 [len(images), 3, S, S]. One bad image refuses the request; the message says which it is."""
        size = self._rules.image_size
        pixels = np.empty((len(images), 3, size, size), dtype=np.uint8)
        for index, data in enumerate(images):
            started = time.perf_counter()
            try:
                pixels[index], shape = preprocess_sized(data, self._rules)
            except ImageError as error:
                if len(images) == 1:
                    raise
                raise ImageError(error.code, f"image {index} of the request: {error.reason}") from error
            self._seconds.add(time.perf_counter() - started)
            self._images.add()
            if counted:
                self._brightness[bin_of(BRIGHTNESS, brightness(pixels[index]))].add()
                self._sizes[bin_of(SHORTER_SIDE, min(shape))].add()
        return pixels

    def _start_counting(self, serving: dict[str, Any]) -> None:
        self._counters = counters = Counters()
        counters.gauge(
            "slipway_release_info", "The release that this server serves", 1, release=serving["release"]
        )
        self._errors = counters.errors("preprocess", [*CODES, INTERNAL])
        self._images = counters.counter("slipway_preprocessed_images_total", "Images decoded, cut and scaled")
        self._seconds = counters.counter(
            "slipway_preprocess_seconds_total", "Time that decoding, cutting and scaling them took"
        )
        expected = serving["expected"]
        self._brightness = counters.inputs(BRIGHTNESS, bins(BRIGHTNESS), expected.get(BRIGHTNESS, {}))
        self._sizes = counters.inputs(SHORTER_SIDE, bins(SHORTER_SIDE), expected.get(SHORTER_SIDE, {}))
        counters.start()

    def _check_golden(self, directory: Path) -> None:
        for golden in bundle.read_golden(directory):
            pixels = preprocess(golden.path.read_bytes(), self._rules)
            if hashing.of_bytes(pixels.tobytes()) != golden.pixels_sha256:
                raise GoldenMismatch(
                    f"golden image {golden.path.name} decodes to other pixels here than where the model was "
                    "exported; serving it would give other answers than those it was evaluated with"
                )

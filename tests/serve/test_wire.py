"""Numbers and bytes come out of Triton as they went in: this release reads numpy 2 arrays silently wrong."""

from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http

from serve.release import Release
from serve.server import Server, serving
from tests import images
from tests.serve.tools import Oracle, variant
from tests.slipway import preprocessed

pytestmark = pytest.mark.integration

ECHO = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [
            pb_utils.InferenceResponse(
                [
                    pb_utils.Tensor(f"{name}_out", pb_utils.get_input_tensor_by_name(request, name).as_numpy())
                    for name in ("bytes", "floats")
                ]
            )
            for request in requests
        ]
"""
ECHO_CONFIG = """
name: "echo" backend: "python" max_batch_size: 0
input { name: "bytes" data_type: TYPE_STRING dims: 1 }
input { name: "floats" data_type: TYPE_FP32 dims: 4 }
output { name: "bytes_out" data_type: TYPE_STRING dims: 1 }
output { name: "floats_out" data_type: TYPE_FP32 dims: 4 }
"""


def test_known_numbers_are_read_back_unchanged(server: Server, oracle: Oracle) -> None:
    """Each step alone, with inputs whose outputs are known: numpy 2 would give [1, 1, 1, 1] for [1, 2, 3, 4]."""
    image = images.encode(images.noise(5))
    pixels = oracle.pixels(image)
    with tritonclient.http.InferenceServerClient(server.http) as raw:
        encoded = tritonclient.http.InferInput("encoded", [1, 1], "BYTES")
        encoded.set_data_from_numpy(np.array([[image]], dtype=np.object_))
        read_back = raw.infer("preprocess", [encoded]).as_numpy("image")
        given = tritonclient.http.InferInput("image", [1, *pixels.shape], "UINT8")
        given.set_data_from_numpy(pixels[None])
        logits = raw.infer("classifier", [given]).as_numpy("logits")
    np.testing.assert_array_equal(read_back, pixels[None])
    assert len(np.unique(read_back)) > 100
    (expected,) = oracle.session.run(["logits"], {"image": pixels[None]})
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-5)


def test_every_image_of_the_corpus_becomes_the_same_pixels_in_the_server_to_the_byte(
    server: Server, oracle: Oracle
) -> None:
    """Every mode, format, orientation, depth and size edge, as a data set would have decoded it."""
    names, files = zip(*((name, data) for name, (data, _) in preprocessed.corpus().items()), strict=True)
    size = oracle.signature.max_batch
    with tritonclient.grpc.InferenceServerClient(server.grpc) as raw:
        for start in range(0, len(files), size):
            batch = files[start : start + size]
            encoded = tritonclient.grpc.InferInput("encoded", [len(batch), 1], "BYTES")
            encoded.set_data_from_numpy(np.array(batch, dtype=np.object_)[:, None])
            read_back = raw.infer("preprocess", [encoded]).as_numpy("image")
            for name, data, pixels in zip(names[start : start + size], batch, read_back, strict=True):
                np.testing.assert_array_equal(pixels, oracle.pixels(data), err_msg=name)


def test_bytes_and_floats_arrive_as_they_were_sent(release: Release, tmp_path: Path) -> None:
    """Case D08, and numpy 2."""

    def add_echo(models: Path) -> None:
        (models / "echo" / "1").mkdir(parents=True)
        (models / "echo" / "config.pbtxt").write_text(ECHO_CONFIG)
        (models / "echo" / "1" / "model.py").write_text(ECHO)

    data = images.flat(0, "JPEG") + b"\0\0\0"
    floats = np.array([1, 2, 3, 4], np.float32)
    with serving(variant(release, tmp_path / "release", add_echo)) as server:
        for module, url in ((tritonclient.http, server.http), (tritonclient.grpc, server.grpc)):
            inputs = [module.InferInput("bytes", [1], "BYTES"), module.InferInput("floats", [4], "FP32")]
            inputs[0].set_data_from_numpy(np.array([data], dtype=np.object_))
            inputs[1].set_data_from_numpy(floats)
            with module.InferenceServerClient(url) as raw:
                result = raw.infer("echo", inputs)
            assert result.as_numpy("bytes_out")[0] == data
            np.testing.assert_array_equal(result.as_numpy("floats_out"), floats)

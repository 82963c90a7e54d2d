"""Make a small, complete and deterministic bundle without training anything.

    .venv/train/bin/python tests/tiny_bundle.py DESTINATION [--reverse-classes] [--ir-version N] [--max-batch N]

Run by training's Python, because it needs the onnx package. The model is an oracle: each class has a colour, and
the class whose colour is nearest to an image's mean wins. So a flat image of a class's colour has a known label.
Class names are '0' to '11' in that order, which is not how text sorts (torchvision issue 714).
"""

import argparse
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

from slipway import bundle, hashing, sealed
from slipway.contract import INPUT, LOGITS, PROBABILITIES, Preprocessing, Signature
from slipway.preprocessing import preprocess
from tests.images import COLOURS, encode, flat, noise

OPSET, IR_VERSION = 20, 10
MEAN, STD = (0.5, 0.4, 0.3), (0.25, 0.3, 0.2)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("destination", type=Path, help="bundles/<name>/<version>")
    parser.add_argument(
        "--reverse-classes", action="store_true", help="name colour k '11 - k' instead of 'k'"
    )
    parser.add_argument("--ir-version", type=int, default=IR_VERSION)
    parser.add_argument("--max-batch", type=int, default=8)
    options = parser.parse_args()
    names = [str(k) for k in range(len(COLOURS))]
    signature = Signature(
        name=options.destination.parent.name,
        classes=tuple(reversed(names) if options.reverse_classes else names),
        preprocessing=Preprocessing(image_size=32, resize_size=36),
        mean=MEAN,
        std=STD,
        max_batch=options.max_batch,
    )
    with sealed.stage(options.destination, kind=bundle.KIND) as staging:
        fill(staging, signature, options.ir_version)


def fill(staging: Path, signature: Signature, ir_version: int) -> None:
    signature.save(staging / bundle.SIGNATURE)
    (staging / bundle.LABELS).write_bytes(bundle.labels(signature))
    sealed.write_json(staging / bundle.PARITY, {"verdict": "passed"})
    sealed.write_json(staging / bundle.PROVENANCE, {"made_by": "tests/tiny_bundle.py"})
    model = nearest_colour_model(signature)
    write_golden(staging, signature, model)
    model.ir_version = ir_version
    onnx.save(model, staging / bundle.MODEL)


def nearest_colour_model(signature: Signature) -> onnx.ModelProto:
    """uint8 [batch, 3, S, S] -> scale and shift -> mean colour -> distance to each class's colour."""
    scale = 1 / (255 * np.array(STD, np.float32))
    shift = -np.array(MEAN, np.float32) / np.array(STD, np.float32)
    colours = np.array(COLOURS, np.float32) * scale + shift
    # |x - c|^2 = |x|^2 - 2 x.c + |c|^2; the first term is the same for every class.
    constants = {
        "scale": scale.reshape(1, 3, 1, 1),
        "shift": shift.reshape(1, 3, 1, 1),
        "axes": np.array([2, 3], np.int64),
        "weight": 2 * colours.T,
        "bias": -np.square(colours).sum(axis=1),
    }
    nodes = [
        helper.make_node("Cast", [INPUT], ["float"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["float", "scale"], ["scaled"]),
        helper.make_node("Add", ["scaled", "shift"], ["normalised"]),
        helper.make_node("ReduceMean", ["normalised", "axes"], ["colour"], keepdims=0),
        helper.make_node("Gemm", ["colour", "weight", "bias"], [LOGITS]),
        helper.make_node("Softmax", [LOGITS], [PROBABILITIES], axis=1),
    ]
    size, classes = signature.preprocessing.image_size, len(signature.classes)
    graph = helper.make_graph(
        nodes,
        "nearest_colour",
        [helper.make_tensor_value_info(INPUT, TensorProto.UINT8, ["batch", 3, size, size])],
        [
            helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", classes])
            for name in (LOGITS, PROBABILITIES)
        ],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION)


def write_golden(staging: Path, signature: Signature, model: onnx.ModelProto) -> None:
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (staging / bundle.GOLDEN).mkdir()
    answers = []
    for name, data in golden_images().items():
        path = staging / bundle.GOLDEN / name
        path.write_bytes(data)
        pixels = preprocess(data, signature.preprocessing)
        logits = session.run([LOGITS], {INPUT: pixels[None]})[0][0]
        answers.append(
            bundle.Golden(
                path=path,
                pixels_sha256=hashing.of_bytes(pixels.tobytes()),
                logits=logits,
                label=signature.classes[int(logits.argmax())],
            )
        )
    bundle.write_golden_answers(staging, answers)


def golden_images() -> dict[str, bytes]:
    return {"flat_2.png": flat(2), "flat_10.jpg": flat(10, "JPEG"), "noise.jpg": encode(noise(0), "JPEG")}


if __name__ == "__main__":
    main()

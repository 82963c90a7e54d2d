"""Make a small, complete and deterministic bundle without training anything.

    .venv/train/bin/python tests/tiny_bundle.py DESTINATION [--reverse-classes] [--ir-version N] [--max-batch N] \
        [--openvino]

Run by training's Python, because it needs the onnx package. The model is an oracle: each class has a colour, and
the class whose colour is nearest to an image's mean wins. So a flat image of a class's colour has a known label.
Class names are '0' to '11' in that order, which is not how text sorts (torchvision issue 714). With --openvino, what is
served is an OpenVINO artefact with coarse colours, so that its answers are its own.
"""

import argparse
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper
from openvino import Core, save_model

from slipway import bundle, hashing, input_statistics, sealed
from slipway.artefact import Artefact, write_artefacts
from slipway.contract import INPUT, LOGITS, PROBABILITIES, Preprocessing, Signature
from slipway.preprocessing import preprocess, preprocess_sized
from tests.images import COLOURS, encode, flat, noise

OPSET, IR_VERSION = 20, 10
ONNX = Artefact(name="onnx", runtime="onnxruntime", precision="float32", files=(bundle.MODEL,))
OPENVINO = Artefact(
    name="openvino-int8",
    runtime="openvino",
    precision="int8",
    files=("model.int8.openvino.xml", "model.int8.openvino.bin"),
    settings={"INFERENCE_PRECISION_HINT": "f32"},
)
MEAN, STD = (0.5, 0.4, 0.3), (0.25, 0.3, 0.2)
EXACT = np.array(COLOURS, np.float32)


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
    parser.add_argument("--openvino", action="store_true")
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
        fill(staging, signature, options.ir_version, openvino=options.openvino)


def fill(staging: Path, signature: Signature, ir_version: int, *, openvino: bool) -> None:
    signature.save(staging / bundle.SIGNATURE)
    (staging / bundle.LABELS).write_bytes(bundle.labels(signature))
    sealed.write_json(staging / bundle.PARITY, {"verdict": "passed"})
    sealed.write_json(staging / bundle.PROVENANCE, {"made_by": "tests/tiny_bundle.py"})
    model = nearest_colour_model(signature)
    write_golden(staging, signature, model)
    evaluated = [preprocess_sized(flat(k), signature.preprocessing) for k in range(len(signature.classes))]
    input_statistics.measured(evaluated, signature.classes, signature.classes).save(staging)
    model.ir_version = ir_version
    onnx.save(model, staging / bundle.MODEL)
    if openvino:
        write_artefacts(staging, [ONNX, OPENVINO], OPENVINO.name)
        write_openvino(staging, signature)
    else:
        write_artefacts(staging, [ONNX])


def nearest_colour_model(signature: Signature, colours: npt.NDArray[np.float32] = EXACT) -> onnx.ModelProto:
    """uint8 [batch, 3, S, S] -> scale and shift -> mean colour -> distance to each class's colour."""
    scale = 1 / (255 * np.array(STD, np.float32))
    shift = -np.array(MEAN, np.float32) / np.array(STD, np.float32)
    normalised = colours * scale + shift
    # |x - c|^2 = |x|^2 - 2 x.c + |c|^2; the first term is the same for every class.
    constants = {
        "scale": scale.reshape(1, 3, 1, 1),
        "shift": shift.reshape(1, 3, 1, 1),
        "axes": np.array([2, 3], np.int64),
        "weight": 2 * normalised.T,
        "bias": -np.square(normalised).sum(axis=1),
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


def write_openvino(staging: Path, signature: Signature) -> None:
    model = nearest_colour_model(signature, (np.round(EXACT / 16) * 16).astype(np.float32))
    converted = Core().read_model(model.SerializeToString())
    save_model(converted, staging / OPENVINO.file, compress_to_fp16=False)
    answer = Core().compile_model(converted, "CPU", dict(OPENVINO.settings))
    answers = []
    for golden in bundle.read_golden(staging):
        pixels = preprocess(golden.path.read_bytes(), signature.preprocessing)
        logits = answer([pixels[None]])[LOGITS][0].copy()
        answers.append(replace(golden, logits=logits, label=signature.classes[int(logits.argmax())]))
    (staging / bundle.SERVED).mkdir()
    bundle.write_golden_answers(staging, answers, bundle.SERVED_ANSWERS)


def golden_images() -> dict[str, bytes]:
    return {"flat_2.png": flat(2), "flat_10.jpg": flat(10, "JPEG"), "noise.jpg": encode(noise(0), "JPEG")}


if __name__ == "__main__":
    main()

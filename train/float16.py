"""float16 on a CPU, rounded where a GPU rounds.

ONNX Runtime has hardly any float16 kernels for CPUs. It computes such a graph in float32 between two casts around each
operator, then drops the casts between neighbours, and every rounding and every overflow with them: a model whose
activations leave float16's range answers there as if nothing were wrong. Casts that are in the file stay. So a file
that is to be judged has them behind each operator, as on a GPU, which sums up in float32 and rounds the result.
"""

from pathlib import Path

import numpy as np
import onnx
from onnx import AttributeProto, NodeProto, TensorProto, helper, numpy_helper


def write_roundings_out(path: Path) -> None:
    """Replace an ONNX file by one that computes in float32 and rounds each result that was float16 to it.

    Raises google.protobuf's DecodeError, or onnx's InferenceError, for a file that is not sound.
    """
    model = onnx.shape_inference.infer_shapes(onnx.load(path), strict_mode=True)
    graph = model.graph
    rounded = {
        value.name for value in graph.value_info if value.type.tensor_type.elem_type == TensorProto.FLOAT16
    }
    for tensor in graph.initializer:
        _widen(tensor)
    nodes = [each for node in graph.node for each in _with_roundings(node, rounded)]
    del graph.node[:]
    graph.node.extend(nodes)
    del graph.value_info[:]  # of float16
    onnx.save(model, path)


def _with_roundings(node: NodeProto, rounded: set[str]) -> list[NodeProto]:
    for attribute in node.attribute:
        if attribute.type == AttributeProto.TENSOR:
            _widen(attribute.t)
        elif (node.op_type, attribute.name, attribute.i) == ("Cast", "to", TensorProto.FLOAT16):
            attribute.i = TensorProto.FLOAT
    nodes = [node]
    for index, name in enumerate(node.output):
        if name in rounded:
            exact, half = f"{name}.exact", f"{name}.half"
            node.output[index] = exact
            nodes.append(helper.make_node("Cast", [exact], [half], to=TensorProto.FLOAT16))
            nodes.append(helper.make_node("Cast", [half], [name], to=TensorProto.FLOAT))
    return nodes


def _widen(tensor: TensorProto) -> None:
    if tensor.data_type == TensorProto.FLOAT16:
        values = numpy_helper.to_array(tensor).astype(np.float32)
        tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))

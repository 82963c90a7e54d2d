"""What an ONNX file declares about itself, read without the onnx package, which serving does not have."""

from dataclasses import dataclass
from pathlib import Path

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from slipway.errors import SlipwayError

# Operators without a domain are ONNX's own; both spellings mean the same.
STANDARD_DOMAINS = ("", "ai.onnx")


@dataclass(frozen=True, kw_only=True)
class OnnxHeader:
    """`opset` is the version of the standard operator set, 0 if the file imports none."""

    ir_version: int
    opset: int


def read(path: Path) -> OnnxHeader:
    """Raises SlipwayError if the file is not an ONNX model."""
    model = _MODEL()
    try:
        model.ParseFromString(path.read_bytes())
    except DecodeError:
        raise SlipwayError(f"{path}: is not an ONNX model") from None
    opsets = [entry.version for entry in model.opset_import if entry.domain in STANDARD_DOMAINS]
    return OnnxHeader(ir_version=model.ir_version, opset=max(opsets, default=0))


def _model_message() -> type:
    """The part of onnx.proto that we need; protobuf skips all fields that a message does not name.

    message OperatorSetIdProto { string domain = 1; int64 version = 2; }
    message ModelProto { int64 ir_version = 1; repeated OperatorSetIdProto opset_import = 8; }
    """
    field = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(
        name="serve/onnx_header.proto", package="slipway", syntax="proto3"
    )
    opset = file.message_type.add(name="OperatorSetIdProto")
    opset.field.add(name="domain", number=1, type=field.TYPE_STRING, label=field.LABEL_OPTIONAL)
    opset.field.add(name="version", number=2, type=field.TYPE_INT64, label=field.LABEL_OPTIONAL)
    model = file.message_type.add(name="ModelProto")
    model.field.add(name="ir_version", number=1, type=field.TYPE_INT64, label=field.LABEL_OPTIONAL)
    model.field.add(
        name="opset_import",
        number=8,
        type=field.TYPE_MESSAGE,
        type_name=".slipway.OperatorSetIdProto",
        label=field.LABEL_REPEATED,
    )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("slipway.ModelProto"))


_MODEL = _model_message()

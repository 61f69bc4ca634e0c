"""The protobuf messages of the wire, built at import from the table below.

No generated code, so no generator version to match with the runtime. The package and the
descriptor pool are our own, so these messages live beside the SDK's in one process.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pool, message_factory
from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
)

_PACKAGE = "hearth"

# "number [repeated|optional] type name [@oneof]"; a map's type is "map<key,value>".
MESSAGES: dict[str, tuple[str, ...]] = {
    "ForwardBackwardRequest": (
        "1 string model_id",
        "2 int32 seq_id",
        "3 repeated Datum data",
        "4 string loss_fn",
        "5 map<string,double> loss_fn_config",
        "6 bool forward_only",
        "7 map<string,LossConfigValue> loss_fn_config_v2",
    ),
    "LossConfigValue": ("1 double number @value", "2 string text @value"),
    "Datum": (
        "1 repeated Chunk model_input",
        "2 map<string,Tensor> loss_fn_inputs",
        "3 repeated ProvenanceSpan model_input_spans",
        "4 repeated ProvenanceSpan loss_fn_input_spans",
    ),
    "ProvenanceSpan": (
        "1 PromptProvenanceSpan prompt_tokens @span",
        "2 SampledProvenanceSpan sampled_tokens @span",
    ),
    "PromptProvenanceSpan": ("1 string sequence_id", "2 int64 offset", "3 int64 length"),
    "SampledProvenanceSpan": ("1 string sequence_id", "2 int64 offset", "3 int64 length"),
    "Chunk": (
        "1 EncodedTextChunk encoded_text @chunk",
        "2 ImageChunk image @chunk",
        "3 DmelChunk dmel @chunk",
    ),
    "EncodedTextChunk": ("1 bytes tokens",),
    "ImageChunk": (
        "1 bytes data",
        "2 string format",
        "3 optional int32 expected_tokens",
        "4 optional ImageDimensions override_dimensions",
    ),
    "ImageDimensions": ("1 uint32 width", "2 uint32 height"),
    "DmelChunk": ("1 bytes dmel",),
    "Tensor": (
        "1 bytes dense @encoding",
        "2 SparseCsr sparse_csr @encoding",
        "3 DType dtype",
        "4 repeated int64 shape",
    ),
    "SparseCsr": ("1 bytes values", "2 bytes crow_indices", "3 bytes col_indices"),
    "ForwardBackwardOutput": (
        "1 string loss_fn_output_type",
        "2 repeated ArrayRecord loss_fn_outputs",
        "3 map<string,double> metrics",
    ),
    "ArrayRecord": (
        "1 string type_tag",
        "2 map<string,BatchedTensor> fields",
        "3 int64 num_datums",
    ),
    "BatchedTensor": (
        "1 bytes data",
        "2 bytes offsets",
        "3 DType dtype",
        "4 repeated int64 trailing_shape",
    ),
    "SampleResponse": (
        "1 repeated SampledSequence sequences",
        "2 optional bytes prompt_logprobs",
        "3 optional TopkLogprobs topk_prompt_logprobs",
        "4 int32 prompt_cache_hit_tokens",
        "5 optional Tensor target_prompt_logprobs",
        "6 optional PromptAltTokens prompt_alt_tokens",
    ),
    "SampledSequence": (
        "1 StopReason stop_reason",
        "2 bytes tokens",
        "3 optional bytes logprobs",
        "4 optional TopkLogprobs topk_sampled_logprobs",
    ),
    "TopkLogprobs": ("1 bytes token_ids", "2 bytes logprobs", "3 uint32 k", "4 uint32 length"),
    "PromptAltTokens": ("1 Tensor tokens", "2 Tensor logprobs"),
}

ENUMS: dict[str, tuple[str, ...]] = {
    "DType": (
        "DTYPE_UNSPECIFIED",
        "DTYPE_FLOAT32",
        "DTYPE_INT64",
        "DTYPE_INT32",
        "DTYPE_BFLOAT16",
    ),
    "StopReason": ("STOP_REASON_STOP", "STOP_REASON_LENGTH"),
}

_SCALARS = ("double", "int32", "int64", "uint32", "bool", "string", "bytes")


def _set_type(field: FieldDescriptorProto, type_name: str) -> None:
    if type_name in _SCALARS:
        field.type = FieldDescriptorProto.Type.Value(f"TYPE_{type_name.upper()}")
        return
    kind = "TYPE_ENUM" if type_name in ENUMS else "TYPE_MESSAGE"
    field.type = FieldDescriptorProto.Type.Value(kind)
    field.type_name = f".{_PACKAGE}.{type_name}"


def _add_map_entry(message: DescriptorProto, field: FieldDescriptorProto, types: str) -> None:
    """On the wire a map is a repeated nested message of a key and a value."""
    name = "".join(part.capitalize() for part in field.name.split("_")) + "Entry"
    entry = message.nested_type.add(name=name)
    entry.options.map_entry = True
    for number, (part, type_name) in enumerate(
        zip(("key", "value"), types.split(","), strict=True), start=1
    ):
        _set_type(
            entry.field.add(name=part, number=number, label=FieldDescriptorProto.LABEL_OPTIONAL),
            type_name,
        )
    field.label = FieldDescriptorProto.LABEL_REPEATED
    field.type = FieldDescriptorProto.TYPE_MESSAGE
    field.type_name = f".{_PACKAGE}.{message.name}.{name}"


def _oneof_index(message: DescriptorProto, name: str) -> int:
    names = [oneof.name for oneof in message.oneof_decl]
    if name not in names:
        message.oneof_decl.add(name=name)
        names.append(name)
    return names.index(name)


def _add_field(message: DescriptorProto, row: str) -> None:
    spec, _, oneof = row.partition(" @")
    number, *label, type_name, name = spec.split()
    field = message.field.add(
        name=name, number=int(number), label=FieldDescriptorProto.LABEL_OPTIONAL
    )
    if type_name.startswith("map<"):
        _add_map_entry(message, field, type_name.removeprefix("map<").removesuffix(">"))
        return
    _set_type(field, type_name)
    if label == ["repeated"]:
        field.label = FieldDescriptorProto.LABEL_REPEATED
    elif label == ["optional"]:
        # How proto3 keeps track of presence: a oneof of the one field.
        field.proto3_optional = True
        field.oneof_index = _oneof_index(message, f"_{name}")
    elif oneof:
        field.oneof_index = _oneof_index(message, oneof)


def _file() -> FileDescriptorProto:
    file = FileDescriptorProto(name="hearth/wire.proto", package=_PACKAGE, syntax="proto3")
    for name, rows in MESSAGES.items():
        message = file.message_type.add(name=name)
        for row in rows:
            _add_field(message, row)
    for name, values in ENUMS.items():
        enum: EnumDescriptorProto = file.enum_type.add(name=name)
        for number, value in enumerate(values):
            enum.value.add(name=value, number=number)
    return file


_POOL = descriptor_pool.DescriptorPool()
_POOL.AddSerializedFile(_file().SerializeToString())


def _message_class(name: str) -> Any:
    """Any, because the fields of a class made at run time are unknown to a type checker."""
    return message_factory.GetMessageClass(_POOL.FindMessageTypeByName(f"{_PACKAGE}.{name}"))


ForwardBackwardRequest = _message_class("ForwardBackwardRequest")
ForwardBackwardOutput = _message_class("ForwardBackwardOutput")
SampleResponse = _message_class("SampleResponse")
Tensor = _message_class("Tensor")

DTYPE_FLOAT32, DTYPE_INT64, DTYPE_INT32, DTYPE_BFLOAT16 = 1, 2, 3, 4
STOP_REASONS = {"stop": 0, "length": 1}

"""The protobuf messages of the Tinker API, written here from its public description, in a descriptor pool of their own.

protobuf's default pool refuses a second file with the same names: this module would not load beside the ``tinker`` package.
"""

import re
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

PACKAGE = "tinker_public"
ENUMS = {
    "StopReason": {"STOP_REASON_STOP": 0, "STOP_REASON_LENGTH": 1},
    "DType": {"DTYPE_UNSPECIFIED": 0, "DTYPE_FLOAT32": 1, "DTYPE_INT64": 2, "DTYPE_INT32": 3, "DTYPE_BFLOAT16": 4},
}
MESSAGES = {
    "SampleResponse": "SampledSequence* sequences 1, bytes? prompt_logprobs 2, TopkLogprobs? topk_prompt_logprobs 3, "
    "int32 prompt_cache_hit_tokens 4, Tensor? target_prompt_logprobs 5",
    "SampledSequence": "StopReason stop_reason 1, bytes tokens 2, bytes? logprobs 3, TopkLogprobs? topk_sampled_logprobs 4",
    "TopkLogprobs": "bytes token_ids 1, bytes logprobs 2, uint32 k 3, uint32 length 4",
    "SparseCsr": "bytes values 1, bytes crow_indices 2, bytes col_indices 3",
    "Tensor": "bytes|encoding dense 1, SparseCsr|encoding sparse_csr 2, DType dtype 3, int64* shape 4",
    "BatchedTensor": "bytes data 1, bytes offsets 2, DType dtype 3, int64* trailing_shape 4",
    "ArrayRecord": "string type_tag 1, <BatchedTensor> fields 2, int64 num_datums 3",
    "ForwardBackwardOutput": "string loss_fn_output_type 1, ArrayRecord* loss_fn_outputs 2, <double> metrics 3",
    "ForwardBackwardRequest": "string model_id 1, int32 seq_id 2, Datum* data 3, string loss_fn 4, <double> loss_fn_config 5, "
    "bool forward_only 6, <LossConfigValue> loss_fn_config_v2 7",
    "LossConfigValue": "double|value number 1, string|value text 2",
    "Datum": "Chunk* model_input 1, <Tensor> loss_fn_inputs 2, ProvenanceSpan* model_input_spans 3, "
    "ProvenanceSpan* loss_fn_input_spans 4",
    "ProvenanceSpan": "PromptProvenanceSpan|span prompt_tokens 1, SampledProvenanceSpan|span sampled_tokens 2",
    "PromptProvenanceSpan": "string sequence_id 1, int64 offset 2, int64 length 3",
    "SampledProvenanceSpan": "string sequence_id 1, int64 offset 2, int64 length 3",
    "Chunk": "EncodedTextChunk|chunk encoded_text 1, ImageChunk|chunk image 2, DmelChunk|chunk dmel 3",
    "EncodedTextChunk": "bytes tokens 1",
    "ImageChunk": "bytes data 1, string format 2, int32? expected_tokens 3, ImageDimensions? override_dimensions 4",
    "ImageDimensions": "uint32 width 1, uint32 height 2",
    "DmelChunk": "bytes dmel 1",
}
"""The fields of each message: type, name, number. ``*`` is repeated, ``?`` optional, ``|name`` in the oneof of that name, and
``<T>`` a map from string to T.
"""

_FIELD = re.compile(r"(<?)(\w+)>?([*?]?)(?:\|(\w+))? (\w+) (\d+)")
_Field = descriptor_pb2.FieldDescriptorProto
_SCALARS = {
    "double": _Field.TYPE_DOUBLE,
    "int64": _Field.TYPE_INT64,
    "int32": _Field.TYPE_INT32,
    "uint32": _Field.TYPE_UINT32,
    "bool": _Field.TYPE_BOOL,
    "string": _Field.TYPE_STRING,
    "bytes": _Field.TYPE_BYTES,
}


def file_descriptor() -> descriptor_pb2.FileDescriptorProto:
    """The messages as protobuf describes a file of them."""
    file = descriptor_pb2.FileDescriptorProto(name=f"{PACKAGE}.proto", package=PACKAGE, syntax="proto3")
    for name, values in ENUMS.items():
        enum = file.enum_type.add(name=name)
        for value, value_number in values.items():
            enum.value.add(name=value, number=value_number)
    for name, fields in MESSAGES.items():
        message = file.message_type.add(name=name)
        found = [_FIELD.fullmatch(field) for field in fields.split(", ")]
        parts = [field.groups() for field in found if field]
        for oneof in dict.fromkeys(part[3] for part in parts if part[3]):
            message.oneof_decl.add(name=oneof)
        for is_map, kind, label, oneof, field, number in parts:
            entry = _entry(message, field, kind) if is_map else kind
            _add_field(message, field, int(number), entry, label, oneof)
            if is_map:
                message.field[-1].label = _Field.LABEL_REPEATED
    return file


def _add_field(message: Any, name: str, number: int, kind: str, label: str, oneof: str | None) -> None:
    field = message.field.add(name=name, number=number, label=_Field.LABEL_OPTIONAL)
    if kind in _SCALARS:
        field.type = _SCALARS[kind]
    else:
        field.type = _Field.TYPE_ENUM if kind in ENUMS else _Field.TYPE_MESSAGE
        field.type_name = f".{PACKAGE}.{kind}"
    if label == "*":
        field.label = _Field.LABEL_REPEATED
    if label == "?":
        field.proto3_optional = True
        field.oneof_index = len(message.oneof_decl)
        message.oneof_decl.add(name=f"_{name}")
    if oneof:
        field.oneof_index = [each.name for each in message.oneof_decl].index(oneof)


def _entry(message: Any, field: str, kind: str) -> str:
    """Adds the message of a map's entries, and returns its name."""
    name = "".join(part.capitalize() for part in field.split("_")) + "Entry"
    entry = message.nested_type.add(name=name)
    entry.options.map_entry = True
    _add_field(entry, "key", 1, "string", "", None)
    _add_field(entry, "value", 2, kind, "", None)
    return f"{message.name}.{name}"


_pool = descriptor_pool.DescriptorPool()
_pool.Add(file_descriptor())


def _message(name: str) -> Any:
    return message_factory.GetMessageClass(_pool.FindMessageTypeByName(f"{PACKAGE}.{name}"))


ForwardBackwardRequest = _message("ForwardBackwardRequest")
ForwardBackwardOutput = _message("ForwardBackwardOutput")
SampleResponse = _message("SampleResponse")
Tensor = _message("Tensor")

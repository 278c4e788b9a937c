"""Passes over data as the Tinker SDK sends them, and their results, in protobuf."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from google.protobuf.message import DecodeError

from dataproto.chunks import Chunk, EncodedTextChunk, ImageChunk
from dataproto.errors import InvalidChunk
from dataproto_server.arrays import FLOAT32, INT32, INT64, read_tensor, values_of
from dataproto_server.backend import Array, Datum, Pass, PassResult
from dataproto_server.config import LimitsConfig
from dataproto_server.image_limits import check_images
from dataproto_server.protobuf_messages import ForwardBackwardOutput, ForwardBackwardRequest
from dataproto_server.refusals import InvalidRequest, Refused

OUTPUT_TYPE = "ArrayRecord"
UNTOLD_IMAGE_TOKENS = 1024
"""What an image without ``expected_tokens`` counts in a client's share of the engine."""


@dataclass(frozen=True)
class PassHeader:
    """Where a pass belongs, and how many tokens it has."""

    model_id: str
    seq_id: int
    tokens: int


def parse(body: bytes) -> Any:
    """The protobuf message of a body. Raises `Refused` if it is none."""
    try:
        return ForwardBackwardRequest.FromString(body)
    except DecodeError as error:
        raise Refused(400, f"the body is no ForwardBackwardRequest in protobuf: {error}") from error


def read_header(body: bytes) -> PassHeader:
    """The run of a pass, its number and its size. Raises `Refused` if the body is malformed."""
    message = parse(body)
    return PassHeader(
        message.model_id, message.seq_id, sum(_tokens(chunk) for each in message.data for chunk in each.model_input)
    )


def _tokens(chunk: Any) -> int:
    """Tokens of a chunk; of an image those that are expected, which are checked when it is read."""
    if chunk.WhichOneof("chunk") != "image":
        return len(chunk.encoded_text.tokens) // 4
    return max(chunk.image.expected_tokens, 0) or UNTOLD_IMAGE_TOKENS


def read_pass(body: bytes, limits: LimitsConfig | None) -> Pass:
    """The pass of a body.

    Args:
        limits: ``None`` for one that has been computed before.

    Raises:
        InvalidRequest: names the datum and what is wrong with it.
    """
    message = parse(body)
    if not message.data:
        raise InvalidRequest("a pass needs at least one datum")
    if limits is not None and len(message.data) > limits.max_data:
        raise InvalidRequest(f"{len(message.data)} data in a pass: at most {limits.max_data} (--max-data)")
    data = [_read_datum(each, number) for number, each in enumerate(message.data)]
    if limits is not None:
        check_images((chunk for datum in data for chunk in datum.chunks), limits)
    return Pass(message.model_id, data, message.loss_fn, _loss_config(message), message.forward_only)


def _loss_config(message: Any) -> dict[str, float | str]:
    config: dict[str, float | str] = dict(message.loss_fn_config)
    for name, value in message.loss_fn_config_v2.items():
        kind = value.WhichOneof("value")
        if kind is None:
            raise InvalidRequest(f"loss_fn_config[{name!r}] has no value")
        config[name] = getattr(value, kind)
    return config


def _read_datum(message: Any, number: int) -> Datum:
    """A datum. Spans, which say where its tokens come from, are not read: no loss with a public formula uses them."""
    try:
        chunks = [_read_chunk(chunk) for chunk in message.model_input]
        inputs = {}
        for name, tensor in sorted(message.loss_fn_inputs.items()):
            inputs[name] = read_tensor(tensor)
    except (InvalidChunk, InvalidRequest) as error:
        raise InvalidRequest(f"datum {number}: {error}") from error
    if not chunks:
        raise InvalidRequest(f"datum {number}: its input is empty")
    return Datum(chunks, inputs)


def _read_chunk(message: Any) -> Chunk:
    kind = message.WhichOneof("chunk")
    if kind == "encoded_text":
        return EncodedTextChunk(cast(Sequence[int], values_of(message.encoded_text.tokens, INT32)))
    if kind == "image":
        image = message.image
        if image.HasField("override_dimensions"):
            raise InvalidRequest("override_dimensions of an image is not supported: send it in its size")
        return ImageChunk(
            image.data, image.format, image.expected_tokens if image.HasField("expected_tokens") else None
        )
    raise InvalidRequest(f"a chunk of type {kind} is not supported: there are text and images")


def write_pass_result(result: PassResult) -> bytes:
    """The protobuf bytes of a result. Neighbouring data whose outputs have the same names and width share a record."""
    message = ForwardBackwardOutput(loss_fn_output_type=OUTPUT_TYPE, metrics=dict(result.metrics))
    for outputs in _records(result.outputs):
        record = message.loss_fn_outputs.add(type_tag=OUTPUT_TYPE, num_datums=len(outputs))
        for name in outputs[0]:
            _write_batched([output[name] for output in outputs], record.fields[name])
    data: bytes = message.SerializeToString()
    return data


def _records(outputs: Sequence[Mapping[str, Array]]) -> list[list[Mapping[str, Array]]]:
    records: list[list[Mapping[str, Array]]] = []
    last = None
    for output in outputs:
        layout = {name: (array.shape[1:], array.dtype) for name, array in output.items()}
        if layout != last:
            records.append([])
        records[-1].append(output)
        last = layout
    return records


def _write_batched(arrays: Sequence[Array], message: Any) -> None:
    dtype = np.dtype("<f4" if arrays[0].dtype.kind == "f" else "<i8")
    parts = [np.ascontiguousarray(array, dtype) for array in arrays]
    message.data = b"".join(part.tobytes() for part in parts)
    message.offsets = np.cumsum([0, *(part.nbytes for part in parts)]).astype("<i8").tobytes()
    message.dtype = FLOAT32 if dtype.kind == "f" else INT64
    message.trailing_shape.extend(parts[0].shape[1:])

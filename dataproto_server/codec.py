"""The bodies of the Tinker API as plain data: messages, arrays, passes over data, requests for samples, and results."""

import io
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from math import prod
from pathlib import Path
from typing import Any, cast

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format
from google.protobuf.message import DecodeError
from PIL import Image

from dataproto.chunks import Chunk, EncodedTextChunk, ImageChunk
from dataproto.errors import InvalidChunk, InvalidColumn, raised_as
from dataproto_server.backend import Array, Datum, Pass, PassResult, SampleRequest, SampleResult, Snapshot, SparseRows
from dataproto_server.config import LimitsConfig
from dataproto_server.json_requests import ImageBody, SampleBody, TargetsBody, TextBody, read
from dataproto_server.refusals import InvalidRequest, Refused

# Messages


def file_descriptor() -> descriptor_pb2.FileDescriptorProto:
    """The messages as protobuf describes a file of them."""
    text = Path(__file__).with_name("tinker_public.textproto").read_text(encoding="utf-8")
    return text_format.Parse(text, descriptor_pb2.FileDescriptorProto())


_pool = descriptor_pool.DescriptorPool()
_pool.Add(file_descriptor())


def _message(name: str) -> Any:
    return message_factory.GetMessageClass(_pool.FindMessageTypeByName(f"tinker_public.{name}"))


ForwardBackwardRequest = _message("ForwardBackwardRequest")
ForwardBackwardOutput = _message("ForwardBackwardOutput")
SampleResponse = _message("SampleResponse")
Tensor = _message("Tensor")


# Arrays: all of them are checked

FLOAT32, INT64, INT32, BFLOAT16 = 1, 2, 3, 4
DTYPES: dict[int, Any] = {FLOAT32: np.float32, INT64: np.int64, INT32: np.int32, BFLOAT16: np.uint16}


def values_of(data: bytes, dtype: int) -> Array:
    """The numbers of a protobuf field, ``(n,)`` float32 or int64.

    >>> values_of(b"\\x80\\x3f", BFLOAT16)
    array([1.], dtype=float32)
    """
    if dtype not in DTYPES:
        raise InvalidRequest(f"dtype {dtype} is unknown: there are 1 float32, 2 int64, 3 int32 and 4 bfloat16")
    size = np.dtype(DTYPES[dtype]).itemsize
    if len(data) % size:
        raise InvalidRequest(f"{len(data)} bytes are no whole number of values of {size} bytes")
    values = np.frombuffer(data, DTYPES[dtype])
    if dtype == BFLOAT16:
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.int64) if dtype == INT32 else values


def read_tensor(message: Any) -> Array | SparseRows:
    """The array of a protobuf ``Tensor``."""
    if message.WhichOneof("encoding") == "sparse_csr":
        csr = message.sparse_csr
        crow, columns = values_of(csr.crow_indices, INT64), values_of(csr.col_indices, INT64)
        return sparse_rows(values_of(csr.values, message.dtype), crow, columns, list(message.shape))
    return shaped(values_of(message.dense, message.dtype), list(message.shape))


def shaped(values: Array, shape: list[int]) -> Array:
    """Values in their shape; no shape is one dimension.

    >>> shaped(np.arange(4), [2, 2]).tolist()
    [[0, 1], [2, 3]]
    """
    if not shape and values.size != 1:
        return values
    if len(shape) > 2:
        raise InvalidRequest(f"shape {shape} has {len(shape)} dimensions: there may be 1 or 2")
    if min(shape, default=0) < 0 or prod(shape) != values.size:
        raise InvalidRequest(f"shape {shape} does not hold {values.size} values")
    return values.reshape(shape or [1])


def sparse_rows(values: Array, crow: Array, columns: Array, shape: list[int]) -> SparseRows:
    """Compressed sparse rows, after all checks."""
    if len(shape) != 2 or min(shape) < 0:
        raise InvalidRequest(f"shape {shape} of a sparse array is not (rows, columns)")
    try:
        return SparseRows(values, crow, columns, (shape[0], shape[1]))
    except InvalidColumn as error:
        raise InvalidRequest(str(error)) from error


def write_tensor(array: Array | SparseRows) -> Any:
    """A protobuf ``Tensor`` of float32 or int64 values."""
    values = array.values if isinstance(array, SparseRows) else array
    dtype = FLOAT32 if values.dtype.kind == "f" else INT64
    data = np.ascontiguousarray(values, DTYPES[dtype]).tobytes()
    message = Tensor(dtype=dtype, shape=array.shape)
    if isinstance(array, SparseRows):
        message.sparse_csr.values = data
        message.sparse_csr.crow_indices = array.crow_indices.astype("<i8").tobytes()
        message.sparse_csr.col_indices = array.col_indices.astype("<i8").tobytes()
    else:
        message.dense = data
    return message


# Passes

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
    with raised_as(partial(Refused, 400), "the body is no ForwardBackwardRequest in protobuf", DecodeError):
        return ForwardBackwardRequest.FromString(body)


def read_header(body: bytes) -> PassHeader:
    """The run of a pass, its number and its size. Raises `Refused` if the body is malformed."""
    message = parse(body)
    tokens = sum(_tokens(chunk) for each in message.data for chunk in each.model_input)
    return PassHeader(message.model_id, message.seq_id, tokens)


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
    with raised_as(InvalidRequest, f"datum {number}", InvalidChunk, InvalidRequest):
        chunks = [_read_chunk(chunk) for chunk in message.model_input]
        inputs = {name: read_tensor(tensor) for name, tensor in sorted(message.loss_fn_inputs.items())}
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
        tokens = image.expected_tokens if image.HasField("expected_tokens") else None
        return ImageChunk(image.data, image.format, tokens)
    raise InvalidRequest(f"a chunk of type {kind} is not supported: there are text and images")


def write_pass_result(result: PassResult) -> bytes:
    """The protobuf bytes of a result. Neighbouring data whose outputs have the same names and width share a record."""
    message = ForwardBackwardOutput(loss_fn_output_type=OUTPUT_TYPE, metrics=dict(result.metrics))
    for _, group in groupby(
        result.outputs, lambda output: {name: (a.shape[1:], a.dtype) for name, a in output.items()}
    ):
        outputs = list(group)
        record = message.loss_fn_outputs.add(type_tag=OUTPUT_TYPE, num_datums=len(outputs))
        for name in outputs[0]:
            _write_batched([output[name] for output in outputs], record.fields[name])
    return message.SerializeToString()


def _write_batched(arrays: Sequence[Array], message: Any) -> None:
    dtype = np.dtype("<f4" if arrays[0].dtype.kind == "f" else "<i8")
    parts = [np.ascontiguousarray(array, dtype) for array in arrays]
    message.data = b"".join(part.tobytes() for part in parts)
    message.offsets = np.cumsum([0, *(part.nbytes for part in parts)]).astype("<i8").tobytes()
    message.dtype = FLOAT32 if dtype.kind == "f" else INT64
    message.trailing_shape.extend(parts[0].shape[1:])


MOST_TARGETS = 1 << 22  # of a request, after the rows are filled up to the longest
STOP_REASONS = {"stop": 0, "length": 1}


def read_sample(body: SampleBody, request_id: str, snapshot: Snapshot, limits: LimitsConfig) -> SampleRequest:
    """The request of a JSON body.

    Raises:
        InvalidRequest: names what is wrong.
    """
    chunks = [_read_json_chunk(chunk, number) for number, chunk in enumerate(body.prompt.chunks)]
    check_images(chunks, limits)
    if not chunks:
        raise InvalidRequest("the prompt is empty")
    if not 1 <= body.num_samples <= limits.max_samples:
        raise InvalidRequest(f"num_samples={body.num_samples}: must be from 1 to {limits.max_samples} (--max-samples)")
    for name in ("topk_prompt_logprobs", "topk_sample_logprobs"):
        if not 0 <= getattr(body, name) <= limits.max_topk:
            raise InvalidRequest(f"{name}={getattr(body, name)}: must be from 0 to {limits.max_topk} (--max-topk)")
    if body.prompt_alt_tokens_k:
        raise InvalidRequest("prompt_alt_tokens_k is not supported: use topk_prompt_logprobs")
    if body.record_stability_info:
        raise InvalidRequest(
            "record_stability_info belongs to a loss without a public formula, which this server lacks"
        )
    return SampleRequest(
        request_id,
        snapshot,
        chunks,
        body.num_samples,
        body.sampling_params,
        bool(body.prompt_logprobs),
        body.topk_prompt_logprobs,
        body.topk_sample_logprobs,
        None if body.target_prompt_logprobs is None else _read_targets(body.target_prompt_logprobs),
        body.prompt_logprobs_last_n,
    )


def _read_targets(body: TargetsBody) -> Array | SparseRows:
    shape, values = body.shape or [], np.array(body.data, np.int64)
    if len(shape) != 2:
        raise InvalidRequest(f"target_prompt_logprobs is an int64 array (prompt - 1, K), not of shape {shape}")
    if body.sparse_crow_indices is None:
        return shaped(values, shape)
    crow, columns = (np.array(part or [], np.int64) for part in (body.sparse_crow_indices, body.sparse_col_indices))
    targets = sparse_rows(values, crow, columns, shape)
    if shape[0] * targets.most > MOST_TARGETS:
        raise InvalidRequest(
            f"target_prompt_logprobs has {shape[0]} rows of up to {targets.most} tokens: at most {MOST_TARGETS} in all"
        )
    return targets


def _read_json_chunk(value: Any, number: int) -> Chunk:
    kind = value.get("type", "encoded_text") if isinstance(value, Mapping) else type(value).__name__
    with raised_as(InvalidRequest, f"chunk {number} ({kind})", InvalidChunk, InvalidRequest):
        if kind == "encoded_text":
            return EncodedTextChunk(cast(Sequence[int], np.array(read(TextBody, value).tokens, np.int64)))
        if kind == "image":
            image = read(ImageBody, value)
            return ImageChunk(image.data, image.format, image.expected_tokens)
    raise InvalidRequest(
        f"chunk {number} is of type {kind!r}, which is not supported: there are encoded_text and image"
    )


def write_sample_result(result: SampleResult) -> bytes:
    """The protobuf bytes of a result."""
    message = SampleResponse()
    for sample in result.samples:
        sequence = message.sequences.add(
            stop_reason=STOP_REASONS[sample.stop_reason],
            tokens=sample.tokens.astype("<i4").tobytes(),
            logprobs=sample.logprobs.astype("<f4").tobytes(),
        )
        if sample.topk is not None:
            _write_topk(sample.topk, sequence.topk_sampled_logprobs)
    if result.prompt_logprobs is not None:
        message.prompt_logprobs = result.prompt_logprobs.astype("<f4").tobytes()
    if result.topk_prompt_logprobs is not None:
        _write_topk(result.topk_prompt_logprobs, message.topk_prompt_logprobs)
    if result.target_prompt_logprobs is not None:
        message.target_prompt_logprobs.CopyFrom(write_tensor(result.target_prompt_logprobs))
    return message.SerializeToString()


def _write_topk(topk: tuple[Array, Array], message: Any) -> None:
    ids, logprobs = topk
    message.token_ids, message.logprobs = ids.astype("<i4").tobytes(), logprobs.astype("<f4").tobytes()
    message.length, message.k = ids.shape


MILLION = 1_000_000


def check_images(chunks: Iterable[Chunk], limits: LimitsConfig) -> None:
    """Checks the images of a request.

    Raises:
        InvalidRequest: one is too large or damaged, or there are too many; names the image and the option.
    """
    images = [chunk for chunk in chunks if isinstance(chunk, ImageChunk)]
    if len(images) > limits.max_images:
        raise InvalidRequest(f"{len(images)} images in a request: at most {limits.max_images} (--max-images)")
    total = 0
    for number, image in enumerate(images):
        width, height = image_size(image, number)
        if width * height > limits.max_image_megapixels * MILLION:
            raise InvalidRequest(
                f"image {number} has {width} x {height} pixels: at most {limits.max_image_megapixels} million "
                "(--max-image-megapixels)"
            )
        total += width * height
    if total > limits.max_request_megapixels * MILLION:
        raise InvalidRequest(
            f"the images have {total} pixels in all: at most {limits.max_request_megapixels} million (--max-request-megapixels)"
        )


def image_size(image: ImageChunk, number: int) -> tuple[int, int]:
    """Width and height in pixels, from the file's header."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # the limits here are smaller
            with Image.open(io.BytesIO(bytes(image.data)), formats=[image.format.upper()]) as opened:
                return opened.size
    except Image.DecompressionBombError as error:
        raise InvalidRequest(f"image {number} is too large (--max-image-megapixels): {error}") from error
    except Exception as error:  # Pillow raises many kinds
        raise InvalidRequest(f"image {number} is no readable {image.format} file: {error}") from error

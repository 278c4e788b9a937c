"""Passes over data and requests for samples as the Tinker SDK sends them, and their results."""

import base64
import io
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from google.protobuf.message import DecodeError
from PIL import Image

from dataproto.chunks import Chunk, EncodedTextChunk, ImageChunk
from dataproto.errors import InvalidChunk, InvalidConfig
from dataproto_server.arrays import (
    FLOAT32,
    INT32,
    INT64,
    json_numbers,
    padded_rows,
    read_json_tensor,
    read_tensor,
    unpadded_rows,
    values_of,
    write_tensor,
)
from dataproto_server.backend import Array, Datum, Pass, PassResult, SampleRequest, SampleResult, Sampling, SparseRows
from dataproto_server.config import LimitsConfig
from dataproto_server.json_requests import SampleBody
from dataproto_server.protobuf_messages import ForwardBackwardOutput, ForwardBackwardRequest, SampleResponse
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


MOST_TARGETS = 1 << 22  # of a request, after the rows are filled up to the longest
STOP_REASONS = {"stop": 0, "length": 1}


@dataclass(frozen=True)
class SampleCall:
    """A request for samples, and the layout in which its targets came."""

    request: SampleRequest
    targets: Array | SparseRows | None = None


def read_sample(body: SampleBody, request_id: str, sampler_id: str, limits: LimitsConfig) -> SampleCall:
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
    try:
        sampling = Sampling(**body.sampling_params.values())
    except InvalidConfig as error:
        raise InvalidRequest(str(error)) from error
    last = body.prompt_logprobs_last_n
    if last is not None and (last < 1 or not body.prompt_logprobs):
        raise InvalidRequest(f"prompt_logprobs_last_n={last}: must be at least 1, and needs prompt_logprobs")
    targets = None if body.target_prompt_logprobs is None else _targets(body.target_prompt_logprobs)
    texts = [chunk for chunk in chunks if isinstance(chunk, EncodedTextChunk)]
    if targets is not None and len(texts) == len(chunks):  # the engine alone knows the length of images
        tokens = sum(len(chunk.ids()) for chunk in texts)
        if targets.shape[0] != tokens - 1:
            raise InvalidRequest(f"target_prompt_logprobs has {targets.shape[0]} rows for a prompt of {tokens} tokens")
    request = SampleRequest(
        request_id,
        sampler_id,
        chunks,
        body.num_samples,
        sampling,
        bool(body.prompt_logprobs),
        body.topk_prompt_logprobs,
        body.topk_sample_logprobs,
        None if targets is None else padded_rows(targets, -1),
        last,
    )
    return SampleCall(request, targets)


def _targets(value: Mapping[str, Any]) -> Array | SparseRows:
    targets = read_json_tensor(value)
    values = targets.values if isinstance(targets, SparseRows) else targets
    if len(targets.shape) != 2 or values.dtype != np.int64:
        raise InvalidRequest(
            f"target_prompt_logprobs is an int64 array (prompt - 1, K), not {values.dtype} {targets.shape}"
        )
    if isinstance(targets, SparseRows):
        rows, most = targets.shape[0], int(np.diff(targets.crow_indices).max(initial=0))
        if rows * most > MOST_TARGETS:
            raise InvalidRequest(
                f"target_prompt_logprobs has {rows} rows of up to {most} tokens: at most {MOST_TARGETS} in all"
            )
    return targets


def _read_json_chunk(value: Any, number: int) -> Chunk:
    kind = value.get("type", "encoded_text") if isinstance(value, Mapping) else type(value).__name__
    try:
        if kind == "encoded_text":
            return EncodedTextChunk(cast(Sequence[int], json_numbers(value.get("tokens"), np.dtype(np.int64))))
        if kind == "image":
            data, tokens = value.get("data"), value.get("expected_tokens")
            texts = isinstance(data, str) and isinstance(value.get("format"), str)
            if not texts or not (tokens is None or type(tokens) is int):
                raise InvalidRequest("an image has data in base64 and a format, and expected_tokens is a whole number")
            return ImageChunk(base64.b64decode(data, validate=True), value["format"], tokens)
    except (InvalidChunk, InvalidRequest, ValueError) as error:
        raise InvalidRequest(f"chunk {number} ({kind}): {error}") from error
    raise InvalidRequest(
        f"chunk {number} is of type {kind!r}, which is not supported: there are encoded_text and image"
    )


def write_sample_result(result: SampleResult, call: SampleCall) -> bytes:
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
    if result.target_prompt_logprobs is not None and call.targets is not None:
        message.target_prompt_logprobs.CopyFrom(
            write_tensor(unpadded_rows(result.target_prompt_logprobs, call.targets))
        )
    data: bytes = message.SerializeToString()
    return data


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

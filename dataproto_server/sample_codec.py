"""Requests for samples as the Tinker SDK sends them, in JSON, and their results, in protobuf."""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from dataproto.chunks import Chunk, EncodedTextChunk, ImageChunk
from dataproto.errors import InvalidChunk
from dataproto_server.arrays import json_numbers, padded_rows, read_json_tensor, unpadded_rows, write_tensor
from dataproto_server.backend import Array, SampleRequest, SampleResult, Sampling, SparseRows
from dataproto_server.config import LimitsConfig
from dataproto_server.image_limits import check_images
from dataproto_server.json_requests import SampleBody, SamplingBody
from dataproto_server.protobuf_messages import SampleResponse
from dataproto_server.refusals import InvalidRequest

MOST_TARGETS = 1 << 22  # of a request, after the rows are filled up to the longest
LEAST_TEMPERATURE = 1e-30  # by which float32 can divide logits
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
    chunks = [_read_chunk(chunk, number) for number, chunk in enumerate(body.prompt.chunks)]
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
        read_sampling(body.sampling_params),
        bool(body.prompt_logprobs),
        body.topk_prompt_logprobs,
        body.topk_sample_logprobs,
        None if targets is None else padded_rows(targets, -1),
        last,
    )
    return SampleCall(request, targets)


def read_sampling(body: SamplingBody) -> Sampling:
    """Sampling parameters, after a check of their ranges."""
    if body.max_tokens is not None and body.max_tokens < 1:
        raise InvalidRequest(f"max_tokens={body.max_tokens}: must be at least 1")
    if not (body.temperature == 0 or LEAST_TEMPERATURE <= body.temperature < float("inf")):
        raise InvalidRequest(
            f"temperature={body.temperature}: must be 0, which takes the most probable token, or at least {LEAST_TEMPERATURE:g}"
        )
    if not 0 < body.top_p <= 1:
        raise InvalidRequest(f"top_p={body.top_p}: must be above 0 and at most 1")
    if body.top_k != -1 and body.top_k < 1:
        raise InvalidRequest(f"top_k={body.top_k}: must be at least 1, or -1 for all")
    if (isinstance(body.stop, str) and not body.stop) or (isinstance(body.stop, list) and "" in body.stop):
        raise InvalidRequest("a stop text is empty")
    return Sampling(body.max_tokens, body.temperature, body.top_k, body.top_p, body.seed, body.stop)


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


def _read_chunk(value: Any, number: int) -> Chunk:
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
    message = SampleResponse(prompt_cache_hit_tokens=result.prompt_cache_hit_tokens)
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

"""The JSON bodies of the Tinker API, read strictly: an unknown or ill-typed field is refused by name. Those that only one route
reads are next to it.

Names are those of the API. Fields without a default must be given.
"""

from functools import partial
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from dataproto.errors import raised_as
from dataproto_server.backend import Int, LoraSpec, Sampling
from dataproto_server.refusals import InvalidRequest, Refused

Metadata = dict[str, Any]
Seconds = Annotated[int, msgspec.Meta(ge=1, le=10 * 365 * 86400)]  # to live; None is no end


class Body(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A JSON object. Clients may name its ``type``, which is not read."""

    type: Any = None


Kind = TypeVar("Kind", bound=Body)


def parse_json(body: bytes) -> dict[str, Any]:
    """The JSON object of a body. Raises `Refused` if it is none, or has text that UTF-8 cannot hold."""
    with raised_as(partial(Refused, 400), "the body is no JSON", ValueError, RecursionError):
        found = msgspec.json.decode(body or b"{}")
    if not isinstance(found, dict):
        raise Refused(400, f"the body is a JSON {type(found).__name__}, not an object")
    return found


def read(kind: type[Kind], value: Any) -> Kind:
    """A body from a JSON object.

    Raises:
        InvalidRequest: names the field that is missing, unknown or of another type.

    >>> read(Sampling, {"max_tokens": 4, "stop": ["a"]}).stop
    ['a']
    >>> read(Sampling, {"max_tokens": "4"})
    Traceback (most recent call last):
    dataproto_server.refusals.InvalidRequest: Expected `int | null`, got `str` - at `$.max_tokens`
    """
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise InvalidRequest(str(error)) from error


class CreateModel(Body):
    session_id: str
    model_seq_id: Int
    base_model: str
    user_metadata: Metadata | None = None
    lora_config: LoraSpec | None = None
    optimizer_config: dict[str, Any] | None = None


class AdamBody(msgspec.Struct, forbid_unknown_fields=True):
    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


class OptimStep(Body):
    model_id: str
    seq_id: Int
    adam_params: AdamBody | None = None
    optimizer_params: Any = None  # of another optimizer


class SaveWeights(Body):
    model_id: str
    seq_id: Int
    path: str | None = None
    ttl_seconds: Seconds | None = None
    overwrite: bool = False
    user_metadata: Metadata | None = None


class SaveForSampler(SaveWeights):
    sampling_session_seq_id: Int | None = None
    kind: Literal["snapshot", "inflight"] = "snapshot"


class SaveExternal(SaveWeights):
    age_encryption_recipients: list[str] | None = None


class LoadWeights(Body):
    path: str
    optimizer: bool
    model_id: str | None = None
    seq_id: Int | None = None
    session_id: str | None = None
    model_seq_id: Int | None = None
    base_model: str | None = None
    user_metadata: Metadata | None = None
    optimizer_config: dict[str, Any] | None = None
    weights_access_token: str | None = None


class TextBody(Body):
    tokens: list[Int]


class ImageBody(Body, forbid_unknown_fields=False):
    data: bytes  # in base64
    format: Literal["png", "jpeg"]
    expected_tokens: Int | None = None


class TargetsBody(Body):
    data: list[Int]
    dtype: Literal["int64"]
    shape: list[Int] | None = None
    sparse_crow_indices: list[Int] | None = None
    sparse_col_indices: list[Int] | None = None


class PromptBody(Body):
    chunks: list[Any]


class SampleBody(Body):
    sampling_session_id: str
    seq_id: Int
    prompt: PromptBody
    sampling_params: Sampling
    num_samples: Int = 1
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: Int = 0
    topk_sample_logprobs: Int = 0
    target_prompt_logprobs: TargetsBody | None = None
    prompt_alt_tokens_k: Int = 0
    prompt_logprobs_last_n: Int | None = None
    record_stability_info: bool | None = None

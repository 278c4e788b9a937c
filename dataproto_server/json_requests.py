"""The JSON bodies of the Tinker API as dataclasses, read strictly: an unknown or ill-typed field is refused by name.

Names are those of the API. `dataclasses.fields` without a default must be given.
"""

import json
import re
import types
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from functools import cache
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from dataproto_server.refusals import InvalidRequest, Refused

Body = TypeVar("Body")
Metadata = dict[str, Any]
ESCAPED_HALF = re.compile(rb"\\u[dD][89a-fA-F]")  # of a surrogate pair


def parse_json(body: bytes) -> dict[str, Any]:
    """The JSON object of a body. Raises `Refused` if it is none, or has text that UTF-8 cannot hold."""
    try:
        found = json.loads(body.decode() or "{}")
        if ESCAPED_HALF.search(body):
            json.dumps(found, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise Refused(400, "the body has half of a surrogate pair, which is no text: escape both halves") from error
    except (ValueError, RecursionError) as error:
        raise Refused(400, f"the body is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise Refused(400, f"the body is a JSON {type(found).__name__}, not an object")
    return found


def read(kind: type[Body], value: Any, name: str = "") -> Body:
    """A dataclass from a JSON object.

    Raises:
        InvalidRequest: names the field that is missing, unknown or of another type.

    >>> read(SamplingBody, {"max_tokens": 4, "stop": ["a"]}).stop
    ['a']
    >>> read(SamplingBody, {"max_tokens": "4"})
    Traceback (most recent call last):
    dataproto_server.refusals.InvalidRequest: max_tokens is a str: expected int or null
    """
    if not isinstance(value, Mapping):
        raise InvalidRequest(f"{name or 'the body'} is a {type(value).__name__}: expected an object")
    prefix = f"{name}." if name else ""
    known = _fields(kind)  # type: ignore[arg-type]
    for given in value:
        if given not in known and given != "type":
            raise InvalidRequest(f"{prefix}{given} is not known to this server")
    found = {}
    for each, (options, needed) in known.items():
        if each in value:
            found[each] = _checked(options, value[each], prefix, each)
        elif needed:
            raise InvalidRequest(f"{prefix}{each} is missing")
    return kind(**found)


@cache
def _fields(kind: type) -> dict[str, tuple[tuple[Any, ...], bool]]:
    """The types that each field may have, and whether it must be given."""
    hints = get_type_hints(kind)
    return {
        each.name: (_options(hints[each.name]), each.default is MISSING and each.default_factory is MISSING)
        for each in fields(kind)
    }


def _options(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _checked(options: tuple[Any, ...], value: Any, prefix: str, name: str) -> Any:
    for option in options:
        if isinstance(value, Mapping) and is_dataclass(option):
            return read(option, value, f"{prefix}{name}")  # type: ignore[arg-type]
        if _fits(option, value):
            return float(value) if option is float else value
    if value is None:  # as clients also write numbers that are not finite
        found = "null"
    elif type(value) is int and abs(value) >= 2**63:
        found = "a number of over 63 bits"
    else:
        found = f"a {type(value).__name__}"
    raise InvalidRequest(f"{prefix}{name} is {found}: expected {' or '.join(map(_spelled, options))}")


def _fits(hint: Any, value: Any) -> bool:
    if hint is int or (hint is float and type(value) is int):
        return type(value) is int and abs(value) < 2**63
    if type(hint) is type:  # before the look for parts of a type, which takes longer
        return type(value) is hint
    if hint is Any:
        return True
    if get_origin(hint) is Literal:
        return value in get_args(hint)
    if get_origin(hint) is list:
        return isinstance(value, list) and all(_fits(get_args(hint)[0], each) for each in value)
    return get_origin(hint) is dict and isinstance(value, dict)


def _spelled(hint: Any) -> str:
    return "null" if hint is type(None) else str(getattr(hint, "__name__", hint)) if not get_args(hint) else str(hint)


@dataclass(frozen=True)
class CreateSession:
    tags: list[str]
    sdk_version: str
    user_metadata: Metadata | None = None
    project_id: str | None = None
    display_name: str | None = None


@dataclass(frozen=True)
class SessionOnly:
    session_id: str


@dataclass(frozen=True)
class CreateCustomLoss:
    session_id: str
    custom_loss_seq_id: int
    name: str
    inputs: list[Metadata]
    graph: Metadata


@dataclass(frozen=True)
class LoraBody:
    rank: int
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


@dataclass(frozen=True)
class CreateModel:
    session_id: str
    model_seq_id: int
    base_model: str
    user_metadata: Metadata | None = None
    lora_config: LoraBody | None = None
    optimizer_config: dict[str, Any] = field(default_factory=lambda: {"type": "adamw"})


@dataclass(frozen=True)
class AdamBody:
    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


@dataclass(frozen=True)
class OptimStep:
    model_id: str
    seq_id: int
    adam_params: AdamBody


@dataclass(frozen=True)
class SaveWeights:
    model_id: str
    seq_id: int
    path: str | None = None
    ttl_seconds: int | None = None
    overwrite: bool = False
    user_metadata: Metadata | None = None


@dataclass(frozen=True)
class SaveForSampler:
    model_id: str
    seq_id: int
    path: str | None = None
    sampling_session_seq_id: int | None = None
    kind: Literal["snapshot", "inflight"] = "snapshot"
    ttl_seconds: int | None = None
    user_metadata: Metadata | None = None


@dataclass(frozen=True)
class SaveExternal:
    model_id: str
    path: str
    seq_id: int
    ttl_seconds: int | None = None
    age_encryption_recipients: list[str] | None = None


@dataclass(frozen=True)
class LoadWeights:
    path: str
    optimizer: bool
    model_id: str | None = None
    seq_id: int | None = None
    session_id: str | None = None
    model_seq_id: int | None = None
    base_model: str | None = None
    user_metadata: Metadata | None = None
    optimizer_config: dict[str, Any] | None = None
    weights_access_token: str | None = None


@dataclass(frozen=True)
class CreateSampler:
    session_id: str
    sampling_session_seq_id: int
    base_model: str | None = None
    model_path: str | None = None


@dataclass(frozen=True)
class PromptBody:
    chunks: list[Any]


@dataclass(frozen=True)
class SamplingBody:
    max_tokens: int | None = None
    seed: int | None = None
    stop: str | list[str] | list[int] | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0


@dataclass(frozen=True)
class SampleBody:
    sampling_session_id: str
    seq_id: int
    prompt: PromptBody
    sampling_params: SamplingBody
    num_samples: int = 1
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    target_prompt_logprobs: dict[str, Any] | None = None
    prompt_alt_tokens_k: int = 0
    prompt_logprobs_last_n: int | None = None
    record_stability_info: bool | None = None


@dataclass(frozen=True)
class RetrieveFuture:
    request_id: str
    allow_metadata_only: bool = False


@dataclass(frozen=True)
class SamplerTarget:
    sampling_session_id: str
    cloned_sampler_id: int = 0


@dataclass(frozen=True)
class RetrieveFutures:
    target: SamplerTarget
    prev_cursor: int = 0
    timeout: float | None = None
    retrieved_request_ids: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class RequestOnly:
    request_id: str


@dataclass(frozen=True)
class ModelOnly:
    model_id: str


@dataclass(frozen=True)
class SamplerOnly:
    sampling_session_id: str


@dataclass(frozen=True)
class WeightsInfo:
    tinker_path: str


@dataclass(frozen=True)
class SetTtl:
    ttl_seconds: int | None = None


@dataclass(frozen=True)
class CopyWeights:
    source_path: str
    session_id: str | None = None
    model_seq_id: int | None = None
    destination_project_id: str | None = None
    ttl_seconds: int | None = None
    weights_access_token: str | None = None


@dataclass(frozen=True)
class FinishReason:
    type: Literal["success", "errored", "interrupted"] = "success"


@dataclass(frozen=True)
class FinishSession:
    reason: FinishReason = FinishReason()
    detail: str | None = None

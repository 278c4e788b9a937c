"""The interface of rollout engines: requests in, completions out, each as soon as it is finished."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args

from dataproto.errors import InvalidConfig
from dataproto.extras import require_extra

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True)
class SamplingParams:
    """How responses are sampled. ``temperature=0`` is greedy.

    Top-p and top-k restrict which tokens are sampled. The returned log-probs are those of the policy without this restriction.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: all tokens
    max_tokens: int = 1024
    stop_token_ids: tuple[int, ...] = ()  # in addition to the model's own end tokens
    seed: int = 0

    def __post_init__(self) -> None:
        if self.n < 1 or self.max_tokens < 1:
            raise InvalidConfig(f"n={self.n} and max_tokens={self.max_tokens} must be at least 1")
        if self.temperature < 0:
            raise InvalidConfig(f"temperature={self.temperature}: must be 0 (greedy) or more")
        if not 0 < self.top_p <= 1:
            raise InvalidConfig(f"top_p={self.top_p}: must be above 0 and at most 1")
        if self.top_k < 0:
            raise InvalidConfig(f"top_k={self.top_k}: must be 0 (all tokens) or more")
        if self.temperature == 0 and self.n > 1:
            raise InvalidConfig(
                f"n={self.n} greedy samples of one prompt would all be the same: set n=1 or temperature>0"
            )


@dataclass(frozen=True)
class Request:
    """One response to generate.

    ``prompt_ids`` hold one placeholder per medium, for engines that expand placeholders themselves. The tensors hold the expanded
    prompt, for engines that do not.
    """

    prompt_ids: Sequence[int]  # placeholders not expanded
    input_ids: Tensor  # (P',) int64, expanded, without padding
    token_types: Tensor  # (P',) int8
    position_ids: Tensor  # (4, P') or (P',)
    multi_modal_data: Mapping[str, Any] = field(default_factory=dict)
    multi_modal_inputs: Mapping[str, Tensor] = field(default_factory=dict)
    seed: int = 0  # of this sample's random stream
    uid: str = ""  # of its prompt, for messages


def row_name(number: int, uid: str, sampling: SamplingParams) -> str:
    """The prompt of request ``number``, for messages. Row numbers count the rows that the engine was given.

    >>> row_name(5, "a", SamplingParams(n=4)), row_name(5, "", SamplingParams())
    ('row 1 (uid a)', 'row 5')
    """
    row = f"row {number // sampling.n}"
    return f"{row} (uid {uid})" if uid else row


FinishReason = Literal["stop", "length"]
FINISH_REASONS = get_args(FinishReason)


@dataclass(frozen=True)
class Completion:
    """The response to request number ``request``."""

    request: int
    token_ids: list[int]
    log_probs: list[float]  # under the policy, before top-p and top-k
    finish_reason: FinishReason  # "stop": the last token is an end token; "length": cut at max_tokens


class RolloutEngine(Protocol):
    """An engine has its own copy of the weights, which `load_weights` replaces."""

    dtype: torch.dtype  # of its weights

    def generate(self, requests: Sequence[Request], sampling: SamplingParams) -> Iterator[Completion]:
        """Yields one completion per request, in the order in which they finish.

        Raises:
            NonFiniteLogits: no token can be sampled for a request; names its row. The engine stays usable.
        """
        ...

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Replaces all weights in place, from pairs of a Hugging Face parameter name and a full tensor.

        Raises:
            InvalidConfig: weights are missing, unknown or of another shape; names them.
        """
        ...

    def differing_weights(self, weights: Iterable[tuple[str, Tensor]]) -> list[str]:
        """Names of the engine's weights that are not equal, in the engine's dtype, to the given ones."""
        ...

    def sleep(self) -> None:
        """Frees memory while the model trains."""
        ...

    def wake(self) -> bool:
        """Prepares the engine to load weights and to generate. Returns whether it still has all its weights."""
        ...


ENGINE_EXTRAS = {"hf": ("train", "transformers"), "vllm": ("vllm", "vllm")}  # extra, package
ENGINES = {"hf": "rollout.hf:HFEngine", "vllm": "rollout.vllm:VLLMEngine"}
"""Engine names to import paths. The module is imported when an engine is created."""
PASSES_OPTIONS_ON = {"vllm"}
"""Engines that hand options that they do not know to another library, which refuses unknown ones itself."""


def create_engine(name: str, model_path: str, **options: Any) -> RolloutEngine:
    """Creates the engine registered under ``name``, or a user's own, named as ``module:class``.

    Raises:
        InvalidConfig: there is no engine of this name.
    """
    if name not in ENGINES and ":" not in name:
        raise InvalidConfig(f"engine {name!r} is unknown: choose one of {sorted(ENGINES)}, or name a module:class")
    if name in ENGINE_EXTRAS:
        extra, package = ENGINE_EXTRAS[name]
        require_extra(extra, f"engine {name!r}", package)
    module, _, attribute = ENGINES.get(name, name).partition(":")
    engine: RolloutEngine = getattr(importlib.import_module(module), attribute)(model_path, **options)
    return engine


def check_engine_options(name: str, options: Mapping[str, Any]) -> None:
    """Raises `InvalidConfig` for an option that a known engine does not have; see `PASSES_OPTIONS_ON`."""
    if not options or name not in ENGINES or name in PASSES_OPTIONS_ON:
        return
    module, _, attribute = ENGINES[name].partition(":")
    parameters = inspect.signature(getattr(importlib.import_module(module), attribute)).parameters
    known = [each for each in parameters if each not in ("model_path", "device")]
    for option in options:
        if option not in known:
            raise InvalidConfig(f"engine {name!r} has no option {option!r}: choose one of {', '.join(known)}")


def cpu_or_cuda() -> torch.device:
    """CUDA if available, else the CPU."""
    import torch

    return torch.device("cuda" if torch.cuda.is_available() else "cpu")

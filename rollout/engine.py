"""What a rollout engine is: requests in, completions out, one at a time as they finish."""

import importlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, get_args

import torch
from torch import Tensor

from dataproto.errors import InvalidConfig


@dataclass(frozen=True)
class SamplingParams:
    """How responses are sampled. ``temperature=0`` is greedy.

    Top-p and top-k restrict what is sampled; the log-probs that come back are those of the policy before them.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: all tokens
    max_tokens: int = 1024
    stop_token_ids: tuple[int, ...] = ()  # besides the model's own end tokens
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

    `prompt_ids` are the tokens before placeholder expansion (for engines that expand themselves), the tensors after it (for
    those that do not).
    """

    prompt_ids: Sequence[int]  # placeholders not expanded
    input_ids: Tensor  # (P',) int64, expanded, no padding
    token_types: Tensor  # (P',) int8
    position_ids: Tensor  # (4, P') or (P',)
    multi_modal_data: Mapping[str, Any] = field(default_factory=dict)
    multi_modal_inputs: Mapping[str, Tensor] = field(default_factory=dict)
    seed: int = 0  # of this sample's own random stream
    uid: str = ""  # of its prompt, for messages


def row_name(number: int, uid: str, sampling: SamplingParams) -> str:
    """How messages name the prompt of a request; among ranks, row numbers are those of the engine's share.

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
    log_probs: list[float]  # of the policy, before top-p and top-k
    finish_reason: FinishReason  # "stop": by an end token, which is the last; "length": cut at max_tokens


class RolloutEngine(Protocol):
    """An engine owns weights of its own, which `load_weights` replaces."""

    dtype: torch.dtype  # of its weights

    def generate(self, requests: Sequence[Request], sampling: SamplingParams) -> Iterator[Completion]:
        """Yields one completion a request, in the order in which they finish.

        Raises:
            NonFiniteLogits: nothing can be sampled for a request; names its row. The engine stays usable.
        """
        ...

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Takes (Hugging Face parameter name, full tensor) pairs, one after the other, in place: all that the model has.

        Raises:
            InvalidConfig: names the weights that are missing, unknown, or of another shape.
        """
        ...

    def differing_weights(self, weights: Iterable[tuple[str, Tensor]]) -> list[str]:
        """Names of the engine's weights that are not those handed in, in the engine's dtype."""
        ...

    def sleep(self) -> None:
        """Gives up memory while others train."""
        ...

    def wake(self) -> bool:
        """Gets ready to take weights and to generate; says whether the engine still has all its weights."""
        ...


ENGINES = {"hf": "rollout.hf.hf_engine:HFEngine", "vllm": "rollout.vllm.vllm_engine:VLLMEngine"}


def create_engine(name: str, model_path: str, **options: Any) -> RolloutEngine:
    """Makes the engine registered under ``name``, or one's own, ``module:class``; its module is imported only now.

    Raises:
        InvalidConfig: no engine of that name.
    """
    if name not in ENGINES and ":" not in name:
        raise InvalidConfig(f"engine {name!r} is unknown: choose one of {sorted(ENGINES)}, or name a module:class")
    module, _, attribute = ENGINES.get(name, name).partition(":")
    engine: RolloutEngine = getattr(importlib.import_module(module), attribute)(model_path, **options)
    return engine


def generation_config(model_path: str, config: Any) -> Any:
    """The checkpoint's ``GenerationConfig``; where it has none, made from the model's ``config``, as transformers makes it.

    Raises:
        InvalidConfig: the checkpoint's file cannot be read; names it.
    """
    from transformers import GenerationConfig
    from transformers.utils import cached_file

    file = cached_file(
        model_path,
        "generation_config.json",
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    if file is None:
        return GenerationConfig.from_model_config(config)
    try:
        return GenerationConfig.from_pretrained(model_path)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise InvalidConfig(f"{file} cannot be read: {str(error).splitlines()[0]}") from error


def end_ids(generation_config: Any) -> tuple[int, ...]:
    """The model's own end tokens.

    >>> from types import SimpleNamespace
    >>> end_ids(SimpleNamespace(eos_token_id=7))
    (7,)
    """
    end = generation_config.eos_token_id
    if end is None:
        return ()
    return tuple(end) if isinstance(end, (list, tuple)) else (int(end),)


def cpu_or_cuda() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")

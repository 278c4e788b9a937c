"""The interface of rollout engines: requests in, completions out, each as soon as it is finished.

The primitive is `RequestEngine`: requests are submitted at any time, and each poll computes one token of all that run.
`RolloutEngine.generate` is a loop over it.
"""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import TYPE_CHECKING, Any, Literal, Protocol

from dataproto.columns import media_identity
from dataproto.errors import DataProtoError, InvalidConfig, check_at_least
from dataproto.extras import require_extra

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True)
class SamplingParams:
    """How responses are sampled. ``temperature=0`` is greedy.

    Top-p, top-k and min-p restrict which tokens are sampled. The returned log-probs are those of the policy without this
    restriction.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: all tokens
    max_tokens: int = 1024
    stop_token_ids: tuple[int, ...] = ()  # in addition to the model's own end tokens
    seed: int = 0
    min_p: float = 0.0  # tokens below this share of the likeliest token's probability are not sampled; 0: all may be
    stop: tuple[str, ...] = ()  # texts that end a response; the token that completes one is its last
    top_log_probs: int = 0  # number of likeliest tokens to return with each sampled token
    ignore_eos: bool = False  # the model's own end tokens do not end a response

    @property
    def policy(self) -> tuple[float, float, int, float]:
        """What rows must have in common to be sampled by one call."""
        return self.temperature, self.top_p, self.top_k, self.min_p

    def stop_ids(self, end_ids: Sequence[int]) -> tuple[int, ...]:
        """The tokens that end a response, ascending. ``end_ids`` are the model's own.

        >>> SamplingParams(stop_token_ids=(5,)).stop_ids([7, 2]), SamplingParams(ignore_eos=True).stop_ids([7, 2])
        ((2, 5, 7), ())
        """
        return tuple(sorted({*self.stop_token_ids, *(() if self.ignore_eos else end_ids)}))

    def __post_init__(self) -> None:
        check_at_least(1, self, "n", "max_tokens")
        check_at_least(0, self, "temperature", "top_p", "min_p", "top_log_probs")
        if not isinstance(self.top_k, Integral) or self.top_k < 0:
            raise InvalidConfig(f"top_k={self.top_k!r}: must be a whole number, 0 (all tokens) or more")
        if not self.temperature < math.inf:
            raise InvalidConfig(f"temperature={self.temperature}: must be a finite number, or 0 (greedy)")
        if not 0 < self.top_p <= 1:
            raise InvalidConfig(f"top_p={self.top_p}: must be above 0 and at most 1")
        if not self.min_p <= 1:
            raise InvalidConfig(f"min_p={self.min_p}: must be between 0 (all tokens) and 1")
        if isinstance(self.stop, str) or not all(self.stop):
            raise InvalidConfig(f"stop={self.stop!r}: must be a tuple of texts that are not empty")
        if self.temperature == 0 and self.n > 1:
            raise InvalidConfig(
                f"n={self.n} greedy samples of one prompt would all be the same: set n=1 or temperature>0"
            )

    def check_sampled_alone(self, what: str) -> None:
        """Raises `InvalidConfig` for log-probs in addition to those of the sampled tokens, which ``what`` does not return."""
        if self.top_log_probs:
            raise InvalidConfig(
                f"sampling asks for top_log_probs, and {what} have only the log-probs of sampled tokens: leave it out, or use "
                "RolloutWorker.generate"
            )


@dataclass(frozen=True)
class Request:
    """One response to generate.

    ``prompt_ids`` hold one placeholder per medium, for engines that expand placeholders themselves. The tensors hold the expanded
    prompt, for engines that do not. The prompt of a later turn is the whole row until then: earlier prompt, responses and
    observations. Samples of one prompt share its tensors, which are then read once.
    """

    prompt_ids: Sequence[int]  # placeholders not expanded
    input_ids: Tensor  # (P',) int64, expanded, without padding
    token_types: Tensor  # (P',) int8
    position_ids: Tensor  # (4, P') or (P',)
    multi_modal_data: Mapping[str, Any] = field(default_factory=dict)  # all media of the prompt, in order
    multi_modal_inputs: Mapping[str, Tensor] | Sequence[Mapping[str, Tensor]] = field(default_factory=dict)
    """All media of the prompt as one mapping, or as one mapping for each turn that shows some, in order."""
    seed: int = 0  # of this sample's random stream (see `rollout.sampling.turn_seed`)
    uid: str = ""  # of its prompt, for messages
    image_keys: Sequence[bytes] = ()
    """A digest of each image of ``multi_modal_data``, in order, so that engines need not read all pixels in each turn. Empty if
    they are not known.
    """
    drawn: int = 0
    """Numbers already drawn from the random stream: a response that continues after ``drawn`` of its tokens."""

    @property
    def prompt_key(self) -> Hashable:
        """Equal for requests whose prompts are one, which is read once: they share its tensor of ids and its media."""
        data = tuple((kind, *map(id, media)) for kind, media in self.multi_modal_data.items())
        return id(self.input_ids), media_identity(self.multi_modal_inputs) or data  # as on all ranks of an engine


def row_name(number: int, uid: str, sampling: SamplingParams) -> str:
    """The prompt of request ``number``, for messages. Row numbers count the rows that the engine was given.

    >>> row_name(5, "a", SamplingParams(n=4)), row_name(5, "", SamplingParams())
    ('row 1 (uid a)', 'row 5')
    """
    row = f"row {number // sampling.n}"
    return f"{row} (uid {uid})" if uid else row


def request_name(number: int, request: Request) -> str:
    """A request of an engine, for messages."""
    return f"request {number} (uid {request.uid})" if request.uid else f"request {number}"


FinishReason = Literal["stop", "length", "abort", "error"]
FINISH_REASONS = ("stop", "length")
"""The reasons by which a response that is complete can end."""

TopLogProbs = list[tuple[int, float]]
"""The likeliest tokens at one place with their log-probs, likeliest first."""


@dataclass(frozen=True)
class Completion:
    """The response to request number ``request``."""

    request: int
    token_ids: list[int]
    log_probs: list[float]  # under the policy, before top-p, top-k and min-p
    finish_reason: FinishReason
    """"stop": the last token is an end token or completes a stop text; "length": cut at max_tokens; "abort": see
    `RequestEngine.abort`; "error": see ``error``."""
    cached_tokens: int = 0  # tokens of the prompt whose cache was kept from an earlier request
    top_log_probs: list[TopLogProbs] | None = None  # one list for each token of the response
    routed_experts: Tensor | None = None
    """``(P' + R' - 1, M, k)`` uint8, or int16 above 256 experts: where each token of prompt and response was sent, but for the
    last one, which was not read; M layers with experts, k experts of a token. Only engines with the option ``routed_experts``."""
    error: DataProtoError | None = None  # why this request failed, such as `NonFiniteLogits`; others are not affected
    drafted_tokens: int | None = None  # tokens that the engine drafted for it, if it drafts any; see `rollout.drafts`
    accepted_tokens: int | None = None  # tokens of the response that took no forward pass of their own


class RequestEngine(Protocol):
    """Requests join and leave at any time; those that run are decoded together.

    A request is *waiting* after `submit`, *running* from the poll that reads its prompt, and *finished* when a poll has returned
    its completion. A finished request that was submitted with ``keep`` can be continued: a later request whose prompt begins with
    its prompt and response does not compute these again. What is sampled does not depend on the other requests, nor on whether
    anything was kept.

    All methods return at once except `poll`, which takes one decoding step. Use an engine from one thread.

    A turn of an episode::

        number = engine.submit(request, sampling, keep=True)
        while not (done := [each for each in engine.poll() if each.request == number]):
            ...  # step environments, submit others
        later = engine.fork(number, next_request, sampling, keep=True)
        engine.abort(number)  # the earlier turn is not continued in another way
    """

    def submit(self, request: Request, sampling: SamplingParams, keep: bool = False) -> int:
        """Adds a request. Returns its number, which is unique in the engine's life. ``sampling.n`` and ``sampling.seed`` are not
        used: a request is one sample, with a seed of its own.

        Args:
            keep: whether later requests may continue this one. Its cache is held until `abort`, until the engine's weights
                change, or until the engine needs the memory; then continuing it computes the prompt again.

        Raises:
            InvalidPrompt: the engine cannot read the prompt.
        """

    def fork(self, number: int, request: Request, sampling: SamplingParams, keep: bool = False) -> int:
        """As `submit`, for a request that continues the finished request ``number``, which can be continued several times.

        Raises:
            InvalidPrompt: the tokens of the prompt do not begin with the prompt and the response of ``number``, or its media do
                not begin with those of ``number``.
            InvalidConfig: ``number`` is not a finished request that was submitted with ``keep``.
        """

    def abort(self, number: int) -> Completion | None:
        """Ends a request. What it held is freed; a number that is not known is ignored.

        Returns:
            For a request that was waiting or running, its tokens so far, with the reason "abort". They can be sampled further by
            a request with these tokens after its prompt and their number as ``drawn``. Otherwise ``None``.
        """

    def poll(self) -> list[Completion]:
        """Reads the prompts of waiting requests, as far as there is room, and samples one token of every running request.

        Returns:
            Requests that finished, in no particular order, each exactly once. Empty if nothing finished or nothing is there.
        """

    @property
    def unfinished(self) -> int:
        """Number of requests whose completion no poll has returned: there is something to poll for."""


class RolloutEngine(RequestEngine, Protocol):
    """An engine has its own copy of the weights, which `load_weights` replaces."""

    dtype: torch.dtype  # of its weights
    no_experts: Tensor | None
    """The experts ``(0, M, k)`` of no token, if completions name those of their tokens; else ``None``."""

    def generate(self, requests: Sequence[Request], sampling: SamplingParams) -> Iterator[Completion]:
        """Yields one completion per request, in the order in which they finish. ``Completion.request`` is the place in
        ``requests``.

        Raises:
            NonFiniteLogits: no token can be sampled for a request; names its row. The engine stays usable.
        """

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Replaces all weights in place, from pairs of a Hugging Face parameter name and a full tensor.

        Raises:
            InvalidConfig: weights are missing, unknown or of another shape; names them.
        """

    def load_adapter(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Replaces the adapter (LoRA) that all rows have next to the weights: A ``(r, in)`` and B ``(out, r)`` of each adapted
        layer, in any order, under the layer's Hugging Face name and ``.lora_A.weight`` or ``.lora_B.weight``. B has the scale.

        Only engines with an option ``lora_rank`` need this method and the next: the actor's adapters are merged into the weights
        of others.

        Raises:
            InvalidConfig: a layer is unknown, or a matrix of another shape; names it.
        """

    def sleep(self) -> None:
        """Frees memory while the model trains."""

    def wake(self) -> bool:
        """Prepares the engine to load weights and to generate. Returns whether it still has all its weights."""

    def make_room(self) -> None:
        """Begins to free the memory that `wake` will need, and returns at once. Called after training, some time before `wake`.

        Engines need not have this method.
        """


ENGINE_EXTRAS = {"hf": ("train", "transformers"), "vllm": ("vllm", "vllm")}  # extra, package
ENGINES = {"hf": "rollout.hf:HFEngine", "vllm": "rollout.vllm:VLLMEngine"}
"""Engine names to import paths. The module is imported when an engine is created."""
PASSES_OPTIONS_ON = {"vllm"}
"""Engines that hand options that they do not know to another library, which refuses unknown ones itself."""


def check_engine_installed(name: str) -> None:
    """Raises `MissingPackage` for an engine whose extra is not installed, without importing it."""
    if name in ENGINE_EXTRAS:
        extra, package = ENGINE_EXTRAS[name]
        require_extra(extra, f"engine {name!r}", package)


def create_engine(name: str, model_path: str, **options: Any) -> RolloutEngine:
    """Creates the engine registered under ``name``, or a user's own, named as ``module:class``.

    Raises:
        InvalidConfig: there is no engine of this name.
        MissingPackage: its extra is not installed.
    """
    check_engine_installed(name)  # before its module is imported, which needs the package too
    return _engine_class(name)(model_path, **options)


def check_engine_options(name: str, options: Mapping[str, Any]) -> None:
    """Raises `InvalidConfig` for an option that a known engine does not have; see `PASSES_OPTIONS_ON`."""
    if not options or name not in ENGINES or name in PASSES_OPTIONS_ON:
        return
    parameters = inspect.signature(_engine_class(name)).parameters
    known = [each for each in parameters if each not in ("model_path", "device")]
    for option in options:
        if option not in known:
            raise InvalidConfig(f"engine {name!r} has no option {option!r}: choose one of {', '.join(known)}")


def engine_ranks(options: Mapping[str, Any], ranks: int | None = None) -> int:
    """The number of consecutive ranks that run an engine together: its option ``tensor_parallel``, by default 1.

    >>> engine_ranks({"tensor_parallel": 2}, ranks=6), engine_ranks({})
    (2, 1)

    Args:
        ranks: the number of ranks that have engines, if it is known.

    Raises:
        InvalidConfig: the option is not an integer of at least 1, or does not divide ``ranks``.
    """
    parallel = options.get("tensor_parallel", 1)
    if type(parallel) is not int or parallel < 1:
        raise InvalidConfig(f"engine option tensor_parallel={parallel!r}: must be an integer of at least 1")
    if ranks is not None and ranks % parallel:
        raise InvalidConfig(f"engine option tensor_parallel={parallel} must divide the {ranks} processes with engines")
    return parallel


def has_option(name: str, option: str) -> bool:
    """Whether the engine registered under ``name``, or named as ``module:class``, has an option of its own or of the class to
    which it hands further options.

    Such as ``routed_experts``, by which completions name the experts of their tokens; ``awaits_weights``, by which it starts
    without the weights of the checkpoint; and ``lora_rank``, by which it holds the base weights and gets adapters by
    `load_adapter`.

    >>> has_option("hf", "lora_rank"), has_option("hf", "awaits_weights")
    (True, False)

    Raises:
        InvalidConfig: there is no engine of this name.
    """
    engine, own = _engine_class(name), "__init__"
    makers = [vars(each)[own] for each in engine.__mro__ if own in vars(each)] if inspect.isclass(engine) else [engine]
    for make in makers:
        parameters = inspect.signature(make).parameters
        if option in parameters:
            return True
        if not any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
            return False
    return False


def _engine_class(name: str) -> Any:
    """Raises `InvalidConfig` if there is no engine of this name."""
    if name not in ENGINES and ":" not in name:
        raise InvalidConfig(f"engine {name!r} is unknown: choose one of {sorted(ENGINES)}, or name a module:class")
    module, _, attribute = ENGINES.get(name, name).partition(":")
    return getattr(importlib.import_module(module), attribute)


def expert_dtype(experts: int) -> torch.dtype:
    """The narrowest dtype that holds the numbers of so many experts.

    >>> expert_dtype(256), expert_dtype(257)
    (torch.uint8, torch.int16)
    """
    import torch

    return torch.uint8 if experts <= 256 else torch.int16


MOST_SLOTS = 1024
"""Requests that vLLM decodes at a time unless an option says so; each has a row of float32 logits."""


def slots_for(samples: int, engines: int = 1) -> int:
    """How many requests each engine decodes at a time by default: its share of a step's ``samples``, if these are not too many.

    >>> slots_for(640, engines=4), slots_for(5, engines=4), slots_for(2560)
    (160, 2, 1024)
    """
    return max(min(-(-samples // engines), MOST_SLOTS), 1)


def cpu_or_cuda() -> torch.device:
    """CUDA if available, else the CPU."""
    import torch

    return torch.device("cuda" if torch.cuda.is_available() else "cpu")

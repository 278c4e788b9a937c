"""What the server asks of the engine that computes: plain data and arrays, without torch.

A `Backend` trains and samples adapters (LoRA) of base models that it holds. It is called from one thread. It knows no clients,
no order of requests and no files but the directories that it is given.

When the same calls come in the same order and grouping, a backend on the CPU gives the same results bit for bit: the server
replays a journal of calls after a crash.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from dataproto.chunks import Chunk
from dataproto.errors import InvalidColumn, InvalidConfig
from workers.model.model_config import AdamParams

Array: TypeAlias = npt.NDArray[Any]
TopK: TypeAlias = tuple[Array, Array]
"""The k most probable tokens of n positions: ids ``(n, k)`` int32, most probable first, and log-probs ``(n, k)`` float32."""

Later: TypeAlias = Callable[[Callable[[], None]], None]
"""Carries out some work now or later, in any thread."""

LEAST_TEMPERATURE = 1e-30  # by which float32 can divide logits
OPTIMIZER_FILE = "optimizer.safetensors"
"""The file of `Backend.save` with the AdamW state; the other files are the adapter, as `Backend.export` writes it."""

DIGESTS_FILE = "sha256.json"
"""A file in which a backend may leave the SHA-256 of files that it has written, by their names."""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A base model.

    Args:
        name: by which clients call it, such as ``Qwen/Qwen3-VL-4B-Instruct``.
        tokenizer: the hub name or path from which clients load its tokenizer.
        max_context_length: tokens of prompt and answer, media included.
        max_lora_rank: of its adapters.
    """

    name: str
    tokenizer: str
    max_context_length: int
    max_lora_rank: int = 64


@dataclass(frozen=True, slots=True)
class LoraSpec:
    """A new adapter.

    Args:
        rank: of every matrix; alpha is 32.
        seed: of the initial weights; ``None`` is seed 0.
        train_mlp: the matrices of the MLPs have an adapter.
        train_attn: the matrices of attention have one.
        train_unembed: the output matrix has one.
    """

    rank: int
    seed: int | None = None
    train_mlp: bool = True
    train_attn: bool = True
    train_unembed: bool = True


@dataclass(frozen=True, slots=True)
class SparseRows:
    """An ``(N, K)`` array whose rows hold few values (compressed sparse rows).

    Row n has ``values[crow_indices[n]:crow_indices[n + 1]]`` at the columns ``col_indices`` of the same places, and 0 elsewhere.

    Args:
        values: ``(nonzero,)``.
        crow_indices: ``(N + 1,)`` int64, not decreasing, from 0 to ``nonzero``.
        col_indices: ``(nonzero,)`` int64, each in ``[0, K)``.
        shape: ``(N, K)``.

    Raises:
        InvalidColumn: the indices do not fit the values and the shape.
    """

    values: Array
    crow_indices: Array
    col_indices: Array
    shape: tuple[int, int]

    def __post_init__(self) -> None:
        crow, columns, (rows, width) = self.crow_indices, self.col_indices, self.shape
        if len(crow) != rows + 1 or crow[0] != 0 or crow[-1] != len(self.values) or (np.diff(crow) < 0).any():
            raise InvalidColumn(f"crow_indices must rise from 0 to {len(self.values)} in {rows + 1} numbers")
        if len(columns) != len(self.values) or (len(columns) and not 0 <= columns.min() <= columns.max() < width):
            raise InvalidColumn(f"col_indices must be {len(self.values)} numbers from 0 to {width - 1}")


@dataclass(frozen=True, slots=True)
class Datum:
    """A row of a pass.

    Args:
        chunks: the N tokens and images of the input; images count with all their tokens.
        inputs: of the loss, by the public names (``target_tokens``, ``weights``, ``logprobs``, ``advantages``, ...): ``(N,)``
            or ``(N, K)``, int64 or float32.
    """

    chunks: Sequence[Chunk]
    inputs: Mapping[str, "Array | SparseRows"]


@dataclass(frozen=True, slots=True)
class Pass:
    """A forward pass over rows, and backward unless ``forward_only``: the gradients add to those of the model.

    Args:
        loss: a name of `DATUM_LOSSES`.
        loss_config: options of the loss.
        replayed: it has been computed before: no limit applies to it.
    """

    model_id: str
    data: Sequence[Datum]
    loss: str
    loss_config: Mapping[str, float | str] = field(default_factory=dict)
    forward_only: bool = False
    replayed: bool = False


@dataclass(frozen=True, slots=True)
class PassResult:
    """The result of a pass.

    Args:
        outputs: of each datum: ``logprobs`` float32, ``(N,)`` or ``(N, K)`` like its targets, 0 where a target has none.
        metrics: names with one ``:`` and a suffix that says how parts of a pass are joined (``sum``, ``mean``, ``min``, ``max``,
            ...); always ``loss:sum``.
    """

    outputs: Sequence[Mapping[str, Array]]
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a request failed; ``user`` if its sender can correct it, and ``server`` otherwise."""

    message: str
    category: Literal["user", "server"]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How responses are sampled.

    Args:
        max_tokens: of an answer; ``None`` fills the context.
        temperature: 0 takes the most probable token.
        top_k: only the k most probable tokens; -1 is all.
        seed: of the random stream; ``None`` leaves it to the backend.
        stop: texts or token ids that end an answer; ``None`` is the model's own end tokens, and an empty list nothing at all.
    """

    max_tokens: int | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    seed: int | None = None
    stop: str | Sequence[str | int] | None = None

    def __post_init__(self) -> None:
        if self.max_tokens is not None and self.max_tokens < 1:
            raise InvalidConfig(f"max_tokens={self.max_tokens}: must be at least 1")
        if not (self.temperature == 0 or LEAST_TEMPERATURE <= self.temperature < math.inf):
            raise InvalidConfig(
                f"temperature={self.temperature}: must be 0, which takes the most probable token, or at least "
                f"{LEAST_TEMPERATURE:g}"
            )
        if not 0 < self.top_p <= 1:
            raise InvalidConfig(f"top_p={self.top_p}: must be above 0 and at most 1")
        if self.top_k != -1 and self.top_k < 1:
            raise InvalidConfig(f"top_k={self.top_k}: must be at least 1, or -1 for all")
        if "" in ([self.stop] if isinstance(self.stop, str) else self.stop or ()):
            raise InvalidConfig(f"stop={self.stop!r}: a text that ends an answer has at least one character")


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """Samples of one prompt, and log-probs of the prompt itself; both come from the weights of the sampler.

    Args:
        prompt_logprobs: the log-prob of every token of the prompt.
        topk_prompt_logprobs: at every position of the prompt, the k most probable tokens; 0 is none.
        topk_sample_logprobs: the same for every sampled token.
        target_prompt_logprobs: ``(prompt - 1, K)`` int64: tokens whose log-probs are given, in row i those of position i + 1;
            -1 asks for nothing.
        prompt_logprobs_last_n: log-probs of the last n positions of the prompt only.
    """

    request_id: str
    sampler_id: str
    chunks: Sequence[Chunk]
    num_samples: int
    sampling: Sampling
    prompt_logprobs: bool = False
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    target_prompt_logprobs: Array | None = None
    prompt_logprobs_last_n: int | None = None


@dataclass(frozen=True, slots=True)
class Sample:
    """One answer.

    Args:
        tokens: ``(n,)`` int32, with the end token or the stop text that ended it.
        logprobs: ``(n,)`` float32, under the tempered distribution.
        topk: see `SampleRequest.topk_sample_logprobs`.
    """

    tokens: Array
    logprobs: Array
    stop_reason: Literal["stop", "length"]
    topk: TopK | None = None


@dataclass(frozen=True, slots=True)
class SampleResult:
    """The samples of a request.

    Args:
        prompt_logprobs: float32, as long as the prompt with all tokens of its images: NaN at 0, and 0.0 on the tokens of images.
        topk_prompt_logprobs: of the same length; ids 0 and log-probs -99999 where there are none.
        target_prompt_logprobs: float32 of the shape of the targets, 0.0 at -1.
    """

    request_id: str
    samples: Sequence[Sample]
    prompt_logprobs: Array | None = None
    topk_prompt_logprobs: TopK | None = None
    target_prompt_logprobs: Array | None = None


def nothing() -> None:
    """Does nothing."""


def at_once(work: Callable[[], None]) -> None:
    """Carries out some work now."""
    work()


class Backend(Protocol):
    """What trains and samples. A user's mistake is an error of `dataproto.errors`, or a `Failure` where that is returned."""

    def start(self) -> None:
        """Loads what requests will need. It is called once, before the front process can connect.

        Raises:
            InvalidConfig: a model cannot be loaded, or the engine that samples does not start.
        """
        ...

    def describe(self) -> list[ModelInfo]:
        """The base models that it has."""
        ...

    def create(self, model_id: str, base_model: str, lora: LoraSpec | None, *, replayed: bool = False) -> None:
        """Makes an adapter with the initial weights of its seed, without AdamW state; ``None`` trains all weights.

        Args:
            replayed: it has been made before, or takes the place of another model for a replayed pass: no limit applies to it.

        Raises:
            InvalidConfig: there is no such base model, the rank is too large, or no slot is free.
        """
        ...

    def passes(self, passes: Sequence[Pass], *, between: Callable[[], None] = nothing) -> list[PassResult | Failure]:
        """Computes passes of any models in one packed batch; the gradients of a model add up until its `optim_step`.

        A pass that fails adds no gradient and does not fail the others; one whose gradient is not finite fails, and names a row,
        unless it is ``replayed``. If the call raises, none has added any.

        Args:
            between: is called between the parts of the batch, and calls methods that sample (`open_sampler`, `close_sampler`,
                `submit`, `poll`, `abort`), so that samples do not wait for the whole batch.
        """
        ...

    def optim_step(self, model_id: str, adam: AdamParams) -> Mapping[str, float]:
        """Makes a step of AdamW on the gradients of a model, and forgets them. None is made if their norm is not finite.

        Returns:
            metrics, ``grad_norm`` before clipping among them.
        """
        ...

    def save(self, model_id: str, directory: Path, *, later: Later = at_once) -> None:
        """Writes the adapter (peft's files) and the AdamW state (`OPTIMIZER_FILE`) to an empty directory, without gradients.

        Args:
            later: gets the work of writing the files. The weights are copied before `save` returns, so other calls may follow
                before the work is done.

        Raises:
            CheckpointError: a weight is not finite; names the model.
        """
        ...

    def load(self, model_id: str, directory: Path, *, optimizer: bool) -> None:
        """Replaces the adapter of a model by a saved one, drops its gradients, and reads or drops its AdamW state.

        Raises:
            CheckpointError: the files do not fit the model, or are damaged.
        """
        ...

    def export(self, model_id: str, directory: Path, *, sampled: bool = False, later: Later = at_once) -> None:
        """Writes the adapter alone to an empty directory, as `open_sampler` and peft load it.

        Args:
            sampled: it is for samplers alone: the backend may write the weights in the precision in which it samples.
            later: see `save`.

        Raises:
            CheckpointError: a weight is not finite; names the model.
        """
        ...

    def release(self, model_id: str) -> None:
        """Forgets a model; an unknown one is no error."""
        ...

    def open_sampler(self, sampler_id: str, base_model: str, adapter: Path | None) -> None:
        """Makes samples of an exported adapter possible, or of the base model. The directory stays until `close_sampler`."""
        ...

    def close_sampler(self, sampler_id: str) -> None:
        """Forgets a sampler, and aborts its requests; an unknown one is no error."""
        ...

    def submit(self, request: SampleRequest) -> None:
        """Takes a request in. A mistake in it becomes a `Failure` of `poll`."""
        ...

    def poll(self) -> list[SampleResult | tuple[str, Failure]]:
        """Makes a decoding step of all requests, and returns the finished ones, the failed ones by ``request_id``.

        Returns at once with an empty list when nothing is in flight.
        """
        ...

    def abort(self, request_ids: Sequence[str]) -> None:
        """Drops requests; they never appear in `poll` again. Unknown ones are no error."""
        ...

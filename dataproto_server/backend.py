"""What the server asks of the engine that computes, `dataproto_server.engine.InProcessEngine`: plain data and arrays, without
torch.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from dataproto.chunks import Chunk
from dataproto.errors import InvalidColumn, InvalidConfig, check_at_least

Array: TypeAlias = npt.NDArray[Any]
Int = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]  # what SQLite holds
TopK: TypeAlias = tuple[Array, Array]
"""The k most probable tokens of n positions: ids ``(n, k)`` int32, most probable first, and log-probs ``(n, k)`` float32."""

Later: TypeAlias = Callable[[Callable[[], None]], None]
"""Carries out some work now or later, in any thread."""

LEAST_TEMPERATURE = 1e-30  # by which float32 can divide logits
OPTIMIZER_FILE = "optimizer.safetensors"
"""The file of a saved run with its AdamW state; the other files are its adapter."""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A base model.

    Args:
        name: by which clients call it, such as ``Qwen/Qwen3-VL-4B-Instruct``.
        tokenizer: the hub name or path from which clients load its tokenizer.
        max_context_length: tokens of prompt and answer, media included.
    """

    name: str
    tokenizer: str
    max_context_length: int


class LoraSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A new adapter, as clients ask for it.

    Args:
        rank: of every matrix; alpha is 32.
        seed: of the initial weights; ``None`` is seed 0.
        train_mlp: the matrices of the MLPs have an adapter.
        train_attn: the matrices of attention have one.
        train_unembed: the output matrix has one.
    """

    rank: Int
    seed: Int | None = None
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

    @property
    def most(self) -> int:
        """The largest number of values of a row."""
        return int(np.diff(self.crow_indices).max(initial=0))

    @property
    def nbytes(self) -> int:
        """Bytes of `padded`."""
        return self.shape[0] * self.most * self.values.itemsize

    @property
    def listed(self) -> Array:
        """Which places of `padded` have a value, ``(N, most)``."""
        return np.arange(self.most) < np.diff(self.crow_indices)[:, None]

    def padded(self, filler: int) -> Array:
        """``(N, most)`` with the values of each row first, and then filler.

        >>> SparseRows(np.array([7, 8, 9]), np.array([0, 1, 3]), np.array([5, 0, 2]), (2, 6)).padded(-1).tolist()
        [[7, -1], [8, 9]]
        """
        rows = np.full((self.shape[0], self.most), filler, self.values.dtype)
        rows[self.listed] = self.values
        return rows


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
        stand_in: base model and options of a new adapter that takes the model's place, for a pass that only has to be among the
            others, as the grouping changes their rounding.
    """

    model_id: str
    data: Sequence[Datum]
    loss: str
    loss_config: Mapping[str, float | str] = field(default_factory=dict)
    forward_only: bool = False
    replayed: bool = False
    stand_in: tuple[str, LoraSpec] | None = None


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


class Sampling(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How responses are sampled, as clients ask for it.

    Args:
        max_tokens: of an answer; ``None`` fills the context.
        temperature: 0 takes the most probable token.
        top_k: only the k most probable tokens; -1 is all.
        seed: of the random stream; ``None`` leaves it to the backend.
        stop: texts or token ids that end an answer; ``None`` is the model's own end tokens, and an empty list nothing at all.
    """

    max_tokens: Int | None = None
    temperature: float = 1.0
    top_k: Int = -1
    top_p: float = 1.0
    seed: Int | None = None
    stop: str | list[str | Int] | None = None

    def __post_init__(self) -> None:
        check_at_least(1, self, "max_tokens")
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
class Snapshot:
    """What is sampled from: a base model, an exported adapter of it, or a checkpoint of all its weights. The directory does not
    change.
    """

    base_model: str
    directory: Path | None = None


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """Samples of one prompt, and log-probs of the prompt itself; both come from the weights of the snapshot.

    Args:
        prompt_logprobs: the log-prob of every token of the prompt.
        topk_prompt_logprobs: at every position of the prompt, the k most probable tokens; 0 is none.
        topk_sample_logprobs: the same for every sampled token.
        target_prompt_logprobs: ``(prompt - 1, K)`` int64, or sparse: tokens whose log-probs are given, in row i those of
            position i + 1; -1 asks for nothing.
        prompt_logprobs_last_n: log-probs of the last n positions of the prompt only.
    """

    request_id: str
    snapshot: Snapshot
    chunks: Sequence[Chunk]
    num_samples: int
    sampling: Sampling
    prompt_logprobs: bool = False
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    target_prompt_logprobs: "Array | SparseRows | None" = None
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
        target_prompt_logprobs: float32 in the layout of the targets, 0.0 at -1.
    """

    samples: Sequence[Sample]
    prompt_logprobs: Array | None = None
    topk_prompt_logprobs: TopK | None = None
    target_prompt_logprobs: "Array | SparseRows | None" = None


def nothing() -> None:
    """Does nothing."""


def at_once(work: Callable[[], None]) -> None:
    """Carries out some work now."""
    work()

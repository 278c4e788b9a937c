"""A frozen model and passes of rows with different adapters over it, packed so that rows that begin alike have their beginning
once.

Letters: N tokens of a row (or states), T packed tokens of a part, M targets of a row, H hidden size, V vocabulary, r rank.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from dataproto.packing import PackedRows, boundaries
from dataproto.transfer import move
from dataproto.vlm import VLMFamily
from rollout.adapter_layers import AdapterRouter, Run, add_head
from rollout.adapters import Adapter, AdapterConfig, PromptScores, new_adapter
from rollout.image_features import ImageFeatures, KeyedInputs
from rollout.pretrained import load_model
from rollout.prompts import PlacedSequence
from rollout.sampling import project
from workers.model.logprobs import chunk_size
from workers.model.model_config import ModelConfig
from workers.model.packed_model import PackedVLM, select_rows
from workers.model.precision import compute_dtype
from workers.parallel import parallelize
from workers.ranks.mesh import Ranks
from workers.training.loading import checkpoint_family


def adapted_log_probs(
    states: Tensor,
    weight: Tensor,
    places: Tensor,
    targets: Tensor,
    pair: tuple[Tensor, Tensor] | None = None,
    scaling: float = 1.0,
    chunk_elements: int | None = None,
) -> Tensor:
    """``log softmax(states (W + scaling B A)^T)`` at targets of the states: no temperature, and no id masked.

    The backward pass computes the logits again, unless they are one chunk on the CPU.

    Args:
        states: ``(N, H)``.
        weight: W ``(V, H)``.
        places: ``(M,)`` int64 on the CPU: the state that predicts each target.
        targets: ``(M,)`` int64.
        pair: A ``(r, H)`` and B ``(V, r)``; ``None`` for the head only.
        chunk_elements: logits in memory at a time, see `workers.model.logprobs.chunk_size`.

    Returns:
        ``(M,)`` float32 (float64 for float64 states).

    >>> adapted_log_probs(torch.zeros(1, 2), torch.ones(4, 2), torch.tensor([0, 0]), torch.tensor([0, 3])).exp()
    tensor([0.2500, 0.2500])
    """
    if not bool((places.diff() >= 0).all()):
        return _once_each(states, weight, places, targets, pair, scaling, chunk_elements)
    size = chunk_size(len(weight), states.device, chunk_elements)
    bounds = [*torch.searchsorted(places, torch.arange(0, len(states), size)).tolist(), len(places)]
    places, targets = move(places, states.device), move(targets, states.device)
    return _AdaptedLogProbs.apply(states, weight, places, targets, _Settings(scaling, size, bounds), *(pair or ()))


def _once_each(
    states: Tensor, weight: Tensor, places: Tensor, targets: Tensor, pair: tuple[Tensor, Tensor] | None, *settings: Any
) -> Tensor:
    """`adapted_log_probs` for places in any order: each target of a place is computed once, in their order."""
    keys, which = torch.unique(places * len(weight) + targets.cpu(), return_inverse=True)
    found = adapted_log_probs(states, weight, keys // len(weight), keys % len(weight), pair, *settings)
    return select_rows(found[:, None], move(which, found.device)).squeeze(1)


class _Settings(NamedTuple):
    scaling: float
    size: int  # states of a chunk
    bounds: Sequence[int]  # the targets of each chunk


class _AdaptedLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, states: Tensor, weight: Tensor, places: Tensor, targets: Tensor, at: _Settings, *pair: Tensor
    ) -> Tensor:
        keep = len(states) <= at.size and not states.is_cuda
        parts, sums, kept = [], [], None
        for number, part in enumerate(states.split(at.size)):
            logits, _ = _logits(part, weight, at.scaling, pair)
            log_sum = logits.logsumexp(1)
            own = slice(*at.bounds[number : number + 2])
            rows = places[own] - number * at.size
            parts.append(logits[rows, targets[own]] - log_sum[rows])
            sums.append(log_sum)
            kept = logits if keep else None
        ctx.save_for_backward(states, weight, places, targets, torch.cat(sums), kept, *pair)
        ctx.at = at
        return torch.cat(parts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        states, weight, places, targets, sums, kept, *pair = ctx.saved_tensors
        at: _Settings = ctx.at
        grad_states = torch.empty_like(states)
        grad_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        grads = [torch.zeros_like(matrix) for matrix in pair]
        for number, start in enumerate(range(0, len(states), at.size)):
            rows, own = slice(start, start + at.size), slice(*at.bounds[number : number + 2])
            where = places[own] - start
            logits, inner = (kept, None) if kept is not None else _logits(states[rows], weight, at.scaling, pair)
            # d log p_t / d z_j = [j = t] - p_j
            of_rows = grad.new_zeros(len(logits)).index_add_(0, where, grad[own])
            slope = (logits - sums[rows, None]).exp_().mul_(-of_rows[:, None])
            slope.index_put_((where, targets[own]), grad[own], accumulate=True)
            torch.mm(slope.to(states.dtype), weight, out=grad_states[rows])
            if grad_weight is not None:
                grad_weight += torch.mm(slope.to(states.dtype).t(), states[rows])
            if not pair:
                continue
            down, up = (matrix.to(slope.dtype) for matrix in pair)
            part = states[rows].to(slope.dtype)
            inner = torch.mm(part, down.t()) if inner is None else inner
            grad_inner = torch.mm(slope, up).mul_(at.scaling)
            grad_states[rows] += torch.mm(grad_inner, down).to(states.dtype)
            grads[0].addmm_(grad_inner.t(), part)
            grads[1].addmm_(slope.t(), inner, alpha=at.scaling)
        return grad_states, grad_weight, None, None, None, *grads


def _logits(states: Tensor, weight: Tensor, scaling: float, pair: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
    """Logits ``(n, V)`` float32 and, with an adapter, ``states A^T``."""
    logits = project(states, weight)
    return logits, add_head(logits, states, pair[0], pair[1], scaling) if pair else None


FEWEST_SHARED = 32
"""Tokens of a beginning that is worth sharing: the keys of all rows are then gathered in every layer."""


@dataclass(frozen=True)
class AdaptedRow:
    """A row and its adapter."""

    rendered: PlacedSequence
    adapter: Adapter | None


@dataclass(frozen=True)
class ScoredRow(AdaptedRow):
    """A row, and the targets whose log-probs are wanted: the token ``places[i]`` of the input predicts ``targets[i]``."""

    places: Tensor  # (M,) int64
    targets: Tensor  # (M,) int64, in the vocabulary


@dataclass(frozen=True)
class ScoredPrompt(AdaptedRow):
    """A prompt, and the scores to fill in."""

    scores: PromptScores


def shared_tokens(before: AdaptedRow, row: AdaptedRow) -> int:
    """How many tokens at the beginning of a row are those of the row before it, with the same adapter; 0 for a few.

    Their states are the same, since no token sees a later one. The last token of a row is never shared. A beginning with images
    is shared by rows that have the same images, and none after it.
    """
    one, two = before.rendered, row.rendered
    most = min(len(one), len(two) - 1)
    if before.adapter is not row.adapter or most < FEWEST_SHARED:
        return 0
    equal = (one.input_ids[:most] == two.input_ids[:most]) & (one.token_types[:most] == two.token_types[:most])
    equal &= (one.position_ids[..., :most] == two.position_ids[..., :most]).reshape(-1, most).all(0)
    shared = most if bool(equal.all()) else int(equal.int().argmin())
    media = two.token_types.nonzero().squeeze(1)
    if len(media) and (shared <= int(media[-1]) or [i.key for i in one.images] != [i.key for i in two.images]):
        shared = min(shared, int(media[0]))
    return shared if shared >= FEWEST_SHARED else 0


@dataclass(frozen=True)
class PackedPart:
    """Rows of which one pass over the base is made; those of one adapter follow each other."""

    rows: Sequence[AdaptedRow]

    @cached_property
    def shared(self) -> list[int]:
        """Tokens of each row that are those of the row before it; see `shared_tokens`."""
        return [shared_tokens(self.rows[n - 1], row) if n else 0 for n, row in enumerate(self.rows)]

    @cached_property
    def lengths(self) -> list[int]:
        """Tokens that each row adds to the packed ones."""
        return [len(row.rendered) - shared for row, shared in zip(self.rows, self.shared, strict=True)]

    @property
    def runs(self) -> list[Run]:
        """The packed tokens of each row with its adapter."""
        return [(row.adapter, length) for row, length in zip(self.rows, self.lengths, strict=True)]

    @cached_property
    def places(self) -> list[Tensor]:
        """For each row, where its tokens are among the packed ones, ``(N,)`` int64."""
        found: list[Tensor] = []
        for shared, own in zip(self.shared, torch.arange(sum(self.lengths)).split(self.lengths), strict=True):
            found.append(torch.cat([found[-1][:shared], own]) if shared else own)
        return found

    @property
    def images(self) -> list[Sequence[KeyedInputs]]:
        """The images of the packed tokens of each row."""
        later = (bool((row.rendered.token_types[shared:] != 0).any()) for row, shared in zip(self.rows, self.shared))
        return [row.rendered.images if any_ else () for row, any_ in zip(self.rows, later)]

    def packed(self) -> PackedRows:
        """The packed rows; every token predicts something."""
        rows, shared = [row.rendered for row in self.rows], self.shared
        pairs = list(zip(rows, shared, strict=True))
        bounds, longest = boundaries(torch.tensor(self.lengths))
        key_bounds, key_longest = boundaries(torch.tensor([len(row) for row in rows]))
        ids = torch.cat([row.input_ids[n:] for row, n in pairs])
        every = torch.arange(len(ids))
        return PackedRows(
            input_ids=ids[None],
            position_ids=torch.cat([row.position_ids[..., n:] for row, n in pairs], dim=-1).unsqueeze(-2),
            token_types=torch.cat([row.token_types[n:] for row, n in pairs])[None],
            cu_seqlens=bounds,
            max_length=longest,
            key_index=torch.cat(self.places) if any(shared) else None,
            key_cu_seqlens=key_bounds,
            key_max_length=key_longest,
            predictors=every,
            targets=ids,
            response_cells=every,
        )


Gradients = dict[Tensor, Tensor]
"""Of the matrices of adapters, or of all weights; those that nothing depends on have none."""

LossOf = Callable[[Sequence[int], Sequence[Tensor]], Tensor | None]
"""From the numbers of rows and their log-probs ``(M,)`` each to the number () that the backward pass starts from, if any."""


class AdapterTrainer:
    """The base model of many adapters. Its weights are frozen and in memory once; the adapters belong to the caller.

    Rows with the same adapter are computed one after the other, and all rows of a part in one pass over the base. What a row has
    in common with the row before it, such as the prompt of several samples, is computed once.
    """

    def __init__(
        self,
        model_path: str,
        device: torch.device | None = None,
        token_budget: int = 16_384,
        activation_checkpointing: bool = False,
        trains_weights: bool = False,
    ) -> None:
        """Loads the checkpoint at ``model_path``: in bfloat16 on CUDA, in float32 elsewhere.

        Args:
            token_budget: tokens of a part; a longer row is a part of its own.
            activation_checkpointing: the backward pass computes layers again instead of keeping their activations.
            trains_weights: rows without an adapter train all weights, which are in float32 on any device.

        Raises:
            InvalidConfig, UnknownModel: see `checkpoint_family`.
        """
        self.device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.token_budget = token_budget
        self.family = checkpoint_family(model_path)
        dtype = torch.float32 if trains_weights else compute_dtype("auto", self.device.type)
        self.model = load_model(self.family, model_path, dtype).to(self.device).eval().requires_grad_(False)
        self.weights = trainable_weights(self.model, self.family) if trains_weights else {}
        self.packed = PackedVLM(self.model, self.family, temperature=1.0)
        self.router = AdapterRouter(self.model, self.family)
        if activation_checkpointing:
            parallelize(self.packed, Ranks(), ModelConfig(activation_checkpointing="full"))
        self.features = ImageFeatures(self.model, self.family, self.device)

    def new_adapter(self, config: AdapterConfig, seed: int) -> Adapter:
        """See `rollout.adapters.new_adapter`."""
        return new_adapter(self.model, self.family, config, seed, self.device)

    def trained(self, adapter: Adapter | None) -> list[Tensor]:
        """The matrices that rows with an adapter train; without one all weights, if these are trained."""
        matrices = self.weights.items() if adapter is None else adapter.named_parameters()
        return [matrix for _, matrix in matrices if matrix.requires_grad]

    def run(
        self,
        rows: Sequence[ScoredRow],
        loss_of: LossOf,
        backward: bool = True,
        between: Callable[[], None] | None = None,
    ) -> Gradients:
        """Computes all rows, part by part, and the gradients of the adapters by the sum of what ``loss_of`` returns.

        The gradients are returned, and added to nothing, so that a pass that fails changes nothing.

        Args:
            loss_of: called for each part with the numbers of its rows.
            backward: whether there may be gradients.
            between: is called between two parts.
        """
        gradients: Gradients = {}
        for place, numbers in enumerate(self.parts(rows)):
            if place and between is not None:
                between()
            mine = [rows[number] for number in numbers]
            with self.router.routed(PackedPart(mine).runs):  # in the backward pass, too: it may compute layers again
                with torch.set_grad_enabled(backward):
                    total = loss_of(numbers, self.log_probs(mine))
                if total is not None and total.requires_grad:
                    adapters = dict.fromkeys(row.adapter for row in mine)
                    matrices = [matrix for adapter in adapters for matrix in self.trained(adapter)]
                    found = zip(matrices, torch.autograd.grad(total, matrices, allow_unused=True), strict=True)
                    merge(gradients, {matrix: gradient for matrix, gradient in found if gradient is not None})
        return gradients

    def parts(self, rows: Sequence[AdaptedRow]) -> list[list[int]]:
        """The numbers of the rows of each part: those of one adapter together, in the order of their first rows."""
        first = {row.adapter: number for number, row in reversed(list(enumerate(rows)))}
        parts: list[list[int]] = []
        room = 0
        for number in sorted(range(len(rows)), key=lambda number: first[rows[number].adapter]):
            length = len(rows[number].rendered)
            own = length - (shared_tokens(rows[parts[-1][-1]], rows[number]) if parts else 0)
            if own > room:
                parts.append([])
                room, own = self.token_budget, length
            parts[-1].append(number)
            room -= own
        return parts

    @torch.no_grad()
    def score(self, prompts: Sequence[ScoredPrompt]) -> None:
        """Fills in the scores of prompts, for engines that do not compute them."""
        for numbers in self.parts(prompts):
            mine = [prompts[number] for number in numbers]
            part = PackedPart(mine)
            states = self._states(part)
            for each, places in zip(mine, part.places, strict=True):
                logits_of = partial(self.router.logits_of, each.adapter)
                own = states[move(places, states.device)]
                each.scores.fill(each.rendered.input_ids, each.rendered.token_types, own, logits_of)

    def _states(self, part: PackedPart) -> Tensor:
        """The states ``(T, H)`` after each packed token."""
        packed = part.packed()
        features, spans = self.features.placed(packed.token_types, part.images)
        packed = packed.to(self.device)
        embeddings, extras = self.packed.merge(packed.input_ids, features, None if features is None else spans)
        with self.router.routed(part.runs):
            return self.packed.decode(embeddings, extras, packed)[0]

    def log_probs(self, rows: Sequence[ScoredRow]) -> list[Tensor]:
        """Log-probs of each row's targets, ``(M,)`` float32 each, by one pass over the base.

        Rows one after the other with the same adapter go through the head together.
        """
        part = PackedPart(rows)
        states, weight = self._states(part), self.family.lm_head(self.model).weight
        found: list[Tensor] = []
        start = 0
        members = zip(rows, part.places, part.lengths, strict=True)
        for adapter, group in groupby(members, lambda member: member[0].adapter):
            mine = list(group)
            stop = start + sum(length for _, _, length in mine)
            where = torch.cat([places[row.places] for row, places, _ in mine]) - start
            targets = torch.cat([row.targets for row, _, _ in mine])
            pair = None if adapter is None else adapter.pairs.get(self.family.head)
            scaling = 1.0 if adapter is None else adapter.config.scaling
            log_probs = adapted_log_probs(states[start:stop], weight, where, targets, pair, scaling)
            found += log_probs.split([len(row.targets) for row, _, _ in mine])
            start = stop
        return found


def merge(gradients: Gradients, more: Gradients) -> None:
    """Adds ``more`` to gradients."""
    for matrix, new in more.items():
        gradients[matrix] = gradients[matrix] + new if matrix in gradients else new


def trainable_weights(model: nn.Module, family: VLMFamily) -> dict[str, Tensor]:
    """The parameters of a model under their names, tied ones once, whose gradients are turned on. Those of its vision tower and
    mergers are not among them, and stay frozen.
    """
    frozen = tuple(f"{part}." for part in family.vision_parts)
    return {
        name: parameter.requires_grad_() for name, parameter in model.named_parameters() if not name.startswith(frozen)
    }

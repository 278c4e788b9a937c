"""A frozen model and passes of rows with different adapters over it. Letters: T packed tokens of a part, M targets of a row."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from dataproto.transfer import move
from rollout.adapters import Adapter, AdapterConfig, AdapterRouter, PromptScores, new_adapter
from rollout.image_features import ImageFeatures
from rollout.pretrained import load_model
from rollout.prompts import PlacedSequence
from workers.adapters.adapted_logprobs import adapted_log_probs
from workers.adapters.full_weights import FullWeights
from workers.adapters.packed_part import PackedPart, shared_tokens
from workers.adapters.trained_adapter import Trainable
from workers.model.model_config import ModelConfig
from workers.model.packed_model import PackedVLM
from workers.model.precision import compute_dtype
from workers.parallel import parallelize
from workers.ranks.mesh import Ranks
from workers.training.loading import checkpoint_family

Gradients = Mapping[Trainable, list[Tensor | None]]
"""For each adapter, or for all weights, the gradients of the matrices in their order."""

LossOf = Callable[[Sequence[int], Sequence[Tensor]], Tensor | None]
"""From the numbers of rows and their log-probs ``(M,)`` each to the number () that the backward pass starts from, if any."""


@dataclass(frozen=True)
class ScoredRow:
    """A row, and the targets whose log-probs are wanted: the token ``places[i]`` of the input predicts ``targets[i]``."""

    rendered: PlacedSequence
    places: Tensor  # (M,) int64
    targets: Tensor  # (M,) int64, in the vocabulary
    adapter: Adapter | None


@dataclass(frozen=True)
class ScoredPrompt:
    """A prompt, and the scores to fill in."""

    rendered: PlacedSequence
    adapter: Adapter | None
    scores: PromptScores


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
            trains_weights: rows without an adapter train all weights (`FullWeights`), which are in float32 on any device.

        Raises:
            InvalidConfig, UnknownModel: see `checkpoint_family`.
        """
        self.device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.token_budget = token_budget
        self.family = checkpoint_family(model_path)
        dtype = torch.float32 if trains_weights else compute_dtype("auto", self.device.type)
        self.model = load_model(self.family, model_path, dtype).to(self.device).eval().requires_grad_(False)
        self.weights = FullWeights(self.model, self.family) if trains_weights else None
        self.packed = PackedVLM(self.model, self.family, temperature=1.0)
        self.router = AdapterRouter(self.model, self.family)
        if activation_checkpointing:
            parallelize(self.packed, Ranks(), ModelConfig(activation_checkpointing="full"))
        self.features = ImageFeatures(self.model, self.family, self.device)

    def new_adapter(self, config: AdapterConfig, seed: int) -> Adapter:
        """See `rollout.adapters.new_adapter`."""
        return new_adapter(self.model, self.family, config, seed, self.device)

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
        gradients: dict[Trainable, list[Tensor | None]] = {}
        for place, numbers in enumerate(self.parts(rows)):
            if place and between is not None:
                between()
            mine = [rows[number] for number in numbers]
            with self.router.routed(PackedPart(mine).runs):  # in the backward pass, too: it may compute layers again
                with torch.set_grad_enabled(backward):
                    total = loss_of(numbers, self.log_probs(mine))
                if total is not None and total.requires_grad:
                    sources = dict.fromkeys(row.adapter or self.weights for row in mine)
                    _add_gradients(gradients, total, [each for each in sources if each is not None and each.trained])
        return gradients

    def parts(self, rows: Sequence[ScoredRow | ScoredPrompt]) -> list[list[int]]:
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
            part = PackedPart([prompts[number] for number in numbers])
            states = self._states(part)
            for each, places in zip(part.rows, part.places, strict=True):
                logits_of = partial(self._logits_of, each.adapter)
                own = states[move(places, states.device)]
                each.scores.fill(each.rendered.input_ids, each.rendered.token_types, own, logits_of)

    def _logits_of(self, adapter: Adapter | None, states: Tensor) -> Tensor:
        return self.router.logits(states, [(adapter, len(states))])

    def _states(self, part: PackedPart[Any]) -> Tensor:
        """The states ``(T, H)`` after each packed token."""
        packed = part.packed()
        features, spans = self.features.placed(packed.token_types, part.images)
        packed = packed.to(self.device)
        where = None if features is None else spans
        embeddings, extras = self.packed.merge(packed.input_ids, features, where)
        with self.router.routed(part.runs):
            states: Tensor = self.packed.decode(embeddings, extras, packed)[0]
        return states

    def log_probs(self, rows: Sequence[ScoredRow]) -> list[Tensor]:
        """Log-probs of each row's targets, ``(M,)`` float32 each, by one pass over the base.

        Rows one after the other with the same adapter go through the head together.
        """
        part = PackedPart(rows)
        states, weight = self._states(part), self.family.lm_head(self.model).weight
        found: list[Tensor] = []
        start = 0
        members = zip(part.rows, part.places, part.lengths, strict=True)
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


def _add_gradients(
    gradients: dict[Trainable, list[Tensor | None]], total: Tensor, sources: Sequence[Trainable]
) -> None:
    matrices = [matrix for source in sources for _, matrix in source.named_parameters()]
    found = iter(torch.autograd.grad(total, matrices, allow_unused=True))
    for source in sources:
        new = [next(found) for _ in source.named_parameters()]
        old = gradients.get(source, [None] * len(new))
        gradients[source] = [b if a is None else a if b is None else a + b for a, b in zip(old, new, strict=True)]

"""The sizes of the rows of a step, without their contents: tokens, patches and micro-batches.

Dimension letters: P prompts, B rows.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from dataproto import DataProto
from dataproto.errors import DataProtoError, InvalidConfig
from dataproto.vlm import family_of
from recipes.data.loader import draws
from rollout.prompts import PromptBuilder, SupervisedBuilder
from rollout.prompts.images import image_size
from rollout.prompts.prepared_rows import conversation_of
from workers.training.micro_batches import plan_rows

SIGMA = 0.7  # of the logarithm of a response's length
SAMPLE = 64  # rows of the data that are measured
PREPARED = 16  # rows whose preparation is timed


@dataclass(frozen=True)
class PromptSizes:
    """The prompts of some rows."""

    tokens: tuple[int, ...]  # media included
    grids: tuple[tuple[tuple[int, int, int], ...], ...]  # patches of the media of each prompt: time, height, width

    def repeated(self, prompts: int) -> "PromptSizes":
        """As many prompts as that, the given ones over and over.

        >>> PromptSizes((5, 9), ((), ((1, 2, 2),))).repeated(3).tokens
        (5, 9, 5)
        """
        places = [place % len(self.tokens) for place in range(prompts)]
        return PromptSizes(tuple(self.tokens[at] for at in places), tuple(self.grids[at] for at in places))

    def first(self, prompts: int) -> "PromptSizes":
        """The first ones."""
        return PromptSizes(self.tokens[:prompts], self.grids[:prompts])


@dataclass(frozen=True)
class MicroBatchSize:
    """One forward pass."""

    tokens: int  # packed; a shared prompt counts once
    patches: int  # of distinct media
    logits: int  # tokens whose logits are computed
    keys: int = 0  # that attention reads; those of a shared prompt count for each row and for the prompt; 0: ``tokens``


@dataclass(frozen=True)
class BatchSizes:
    """Rows in order, with the samples of a prompt next to each other; ``samples`` rows for each prompt.

    ``shown`` is what an environment shows in each row behind the prompt, (B,). A picture of several rows counts several times.
    """

    config: Any  # the checkpoint's
    prompts: PromptSizes
    responses: tuple[int, ...]  # (B,) sampled tokens
    samples: int = 1
    shown: PromptSizes | None = None

    @cached_property
    def lengths(self) -> Tensor:
        """``(B,)`` int64 tokens of prompt, response and what is shown in between."""
        prompts = torch.tensor(self.prompts.tokens, dtype=torch.int64)
        own = torch.tensor(self.responses, dtype=torch.int64)
        if self.shown is not None:
            own = own + torch.tensor(self.shown.tokens, dtype=torch.int64)
        return prompts.repeat_interleave(self.samples) + own

    @cached_property
    def shared(self) -> Tensor:
        """``(B,)`` int64 prompt tokens that a row has from the row before it."""
        prompts = torch.tensor(self.prompts.tokens, dtype=torch.int64).repeat_interleave(self.samples)
        return torch.where(torch.arange(len(prompts)) % self.samples == 0, 0, prompts)

    @cached_property
    def prompt_tokens(self) -> Tensor:
        """``(B,)`` int64 tokens of each row's prompt."""
        return torch.tensor(self.prompts.tokens, dtype=torch.int64).repeat_interleave(self.samples)

    @property
    def packed_tokens(self) -> int:
        """Tokens that are computed."""
        return int((self.lengths - self.shared).sum())

    @cached_property
    def patches(self) -> Tensor:
        """``(P,)`` int64 patches of each prompt."""
        return _patches(self.prompts)

    @cached_property
    def shown_patches(self) -> Tensor:
        """``(B,)`` int64 patches of each row behind its prompt."""
        return torch.zeros(len(self.responses), dtype=torch.int64) if self.shown is None else _patches(self.shown)

    @cached_property
    def vision_flops(self) -> Tensor:
        """``(P,)`` operations of a forward pass through the tower for each prompt."""
        return self._tower(self.prompts)

    @cached_property
    def shown_flops(self) -> Tensor:
        """``(B,)`` operations of a forward pass through the tower for what is shown behind each prompt."""
        return torch.zeros(len(self.responses)) if self.shown is None else self._tower(self.shown)

    @property
    def tower_flops(self) -> float:
        """Operations of a forward pass through the tower for all rows; media of prompts count once."""
        return float(self.vision_flops.sum() + self.shown_flops.sum())

    def _tower(self, sizes: PromptSizes) -> Tensor:
        counts = [len(each) for each in sizes.grids]
        grids = _grids([grid for each in sizes.grids for grid in each])
        costs = family_of(self.config).vision_flops(self.config, grids).sum(1)
        return torch.stack([part.sum() for part in costs.split(counts)])

    @cached_property
    def language_flops(self) -> int:
        """Operations of a forward pass through decoder layers and head; shared prompts once, logits of responses."""
        family, responses = family_of(self.config), sum(self.responses)
        rows = family.flops(self.config, self.lengths, logit_tokens=responses)
        return rows.language - family.flops(self.config, self.shared, logit_tokens=0).language

    def part(self, prompts: int) -> "BatchSizes":
        """The rows of the first prompts."""
        rows = prompts * self.samples
        shown = None if self.shown is None else self.shown.first(rows)
        return BatchSizes(self.config, self.prompts.first(prompts), self.responses[:rows], self.samples, shown)

    def micro_batches(self, token_budget: int) -> list[MicroBatchSize]:
        """The micro-batches that an update plans for these rows, by `workers.training.micro_batches.plan_rows`."""
        own, responses = self.lengths - self.shared, torch.tensor(self.responses)
        first = torch.arange(len(own)) % self.samples == 0
        parts = [torch.arange(len(own)).numpy()]
        if self.packed_tokens > token_budget:
            vision = self.vision_flops.repeat_interleave(self.samples)
            whole = family_of(self.config).row_flops(self.config, self.lengths, None, responses) + vision
            whole = whole + self.shown_flops
            lead = torch.where(
                first,
                0,
                vision
                + family_of(self.config).row_flops(self.config, self.shared, None, torch.zeros_like(self.shared)),
            )
            parts = plan_rows(own, self.shared, whole - lead, lead, token_budget)
        found = []
        for rows in parts:
            index = torch.from_numpy(rows)
            prompts = (index // self.samples).unique()
            lead_tokens = int(self.shared[index[0]]) if len(index) else 0
            patches = int(self.patches[prompts].sum()) + int(self.shown_patches[index].sum())
            tokens, keys = int(own[index].sum()) + lead_tokens, int((own + self.shared)[index].sum())
            repeats = int(self.prompt_tokens[index][first[index]].sum()) if self.samples > 1 else 0
            found.append(MicroBatchSize(tokens, patches, int(responses[index].sum()), keys + repeats))
        return found


def _patches(sizes: PromptSizes) -> Tensor:
    return torch.stack([_grids(each).prod(-1).sum() for each in sizes.grids])


def _grids(grids: Sequence[Sequence[int]]) -> Tensor:
    return torch.tensor(list(grids), dtype=torch.int64).reshape(-1, 3)


def response_lengths(count: int, mean: int, longest: int) -> tuple[int, ...]:
    """Lengths of ``count`` responses: the quantiles of a log-normal distribution, cut at ``longest``, in a fixed random order.

    Before the cut their mean is ``mean``; all are ``longest`` if ``mean`` is.

    >>> sorted(response_lengths(5, mean=100, longest=150)), response_lengths(2, mean=8, longest=8)
    ([32, 54, 78, 113, 150], (8, 8))
    """
    if mean >= longest:
        return (longest,) * count
    middles = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    drawn = mean * torch.exp(SIGMA * torch.special.ndtri(middles) - SIGMA**2 / 2)
    lengths = drawn.round().long().clamp(1, longest)
    return tuple(lengths[torch.randperm(count, generator=torch.Generator().manual_seed(0))].tolist())


def measure_prompts(rows: Any, builder: PromptBuilder, seed: int = 0, sample: int = SAMPLE) -> PromptSizes:
    """The prompts of the first ``sample`` rows that a training run draws, from the headers of their images.

    An image processor splits a blank image of an image's size as it splits the image. Rows with videos, whose number of frames
    no header tells, are prepared.
    """
    tokens, grids = [], []
    blanks: dict[tuple[int, int], tuple[tuple[int, int, int], ...]] = {}
    for _, place, raw in islice(draws(rows, seed), sample):
        row = rows[place] if raw is None else rows.read_row(raw, place)
        conversation = conversation_of(row)
        if conversation.videos:
            prompt = builder.prepare(row)
            tokens.append(len(prompt.input_ids))
            parts = [*(one.inputs for one in prompt.images), *(one.inputs for one in prompt.videos)]
            grids.append(tuple(grid for part in parts for grid in grids_of(builder, part)))
            continue
        length = builder.prompt_length(row)
        if length > builder.max_prompt_length:
            continue
        tokens.append(length)
        found: list[tuple[int, int, int]] = []
        for source in conversation.images:
            size = image_size(source, row.get("media_root"))
            if size not in blanks:
                blank = Image.new("RGB", size[::-1])
                blanks[size] = grids_of(builder, builder.process_image(blank).inputs)
            found += blanks[size]
        grids.append(tuple(found))
    if not tokens:
        raise InvalidConfig(f"none of the first {sample} rows fits into {builder.max_prompt_length} tokens")
    return PromptSizes(tuple(tokens), tuple(grids))


def preparation_seconds(
    rows: Any, builder: PromptBuilder, batch_size: int, seed: int, clock: Callable[[], float]
) -> float:
    """Seconds to read and prepare a batch, from its first rows: images are decoded and processed. Rows that fail count too."""
    places = [(place, raw) for _, place, raw in islice(draws(rows, seed), 1 + min(batch_size, PREPARED))]
    for number, (place, raw) in enumerate(places):
        if number == 1:  # the first one loads what it needs
            start = clock()
        with suppress(DataProtoError):
            builder.prepare(rows[place] if raw is None else rows.read_row(raw, place))
    return (clock() - start) / (len(places) - 1) * batch_size if len(places) > 1 else 0.0


def sizes_of_prompts(prompts: DataProto, builder: PromptBuilder) -> PromptSizes:
    """The sizes of a batch of prompts."""
    grids = tuple(grids_of(builder, media) if media else () for media in prompts["multi_modal_inputs"])
    return PromptSizes(tuple(prompts["attention_mask"].sum(1).tolist()), grids)


def sizes_of_conversations(rows: DataProto, builder: PromptBuilder) -> BatchSizes:
    """The sizes of a batch of rows to learn from. The learnt tokens of a row count as its response."""
    learnt = rows["response_mask"].sum(1).tolist()
    whole = sizes_of_prompts(rows, builder)
    prompts = PromptSizes(tuple(length - own for length, own in zip(whole.tokens, learnt, strict=True)), whole.grids)
    return BatchSizes(builder.config, prompts, tuple(int(each) for each in learnt))


def measure_conversations(
    rows: Any, builder: SupervisedBuilder, batch_size: int, seed: int = 0, sample: int = SAMPLE
) -> BatchSizes:
    """A batch of conversations like the first ``sample`` ones, prepared: which tokens are learnt follows from their texts.

    The learnt tokens of a row count as its response.
    """
    prompts, learnt, grids = [], [], []
    for _, place, raw in islice(draws(rows, seed), sample):
        row = builder.prepare(rows[place] if raw is None else rows.read_row(raw, place))
        learnt.append(int(row.loss_mask.sum()))
        prompts.append(len(row.input_ids) - learnt[-1])
        parts = [*(one.inputs for one in row.images), *(one.inputs for one in row.videos)]
        grids.append(tuple(grid for part in parts for grid in grids_of(builder, part)))
    sizes = PromptSizes(tuple(prompts), tuple(grids)).repeated(batch_size)
    return BatchSizes(builder.config, sizes, tuple(learnt[place % len(learnt)] for place in range(batch_size)))


def grids_of(builder: PromptBuilder, inputs: Mapping[str, Tensor]) -> tuple[tuple[int, int, int], ...]:
    grids = builder.family.grids(inputs, builder.config).tolist()
    return tuple((int(t), int(h), int(w)) for t, h, w in grids)

"""The sizes of the rows of a step, without their contents: tokens, patches, operations and micro-batches.

Dimension letters: P prompts, B rows.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import Any, TypeVar, cast

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from dataproto.errors import DataProtoError, InvalidConfig
from dataproto.vlm import family_of
from dataproto.vlm.costs import Flops
from recipes.data.loader import PromptLoader, draws
from rollout.answers import AnsweredPrompt
from rollout.prompts import Prompt, PromptBuilder, SupervisedBuilder
from rollout.prompts.images import image_size
from rollout.prompts.prepared_rows import by_kind, conversation_of
from workers.training.micro_batches import plan_rows
from workers.training.mini_batches import spread

SIGMA = 0.7  # of the logarithm of a response's length
SAMPLE = 512  # prompts of the data that are measured, by their headers
CONVERSATIONS = 64  # rows to learn from that are measured, prepared
VARIATION = 0.1  # share by which the tokens of a step are more or fewer than expected

Grids = tuple[tuple[int, int, int], ...]
"""Patches of each medium: time, height, width."""
Value = TypeVar("Value")


@dataclass(frozen=True)
class PromptSizes:
    """The prompts of some rows."""

    tokens: tuple[int, ...]  # media included
    grids: tuple[Grids, ...]  # of the media of each prompt

    def repeated(self, prompts: int) -> "PromptSizes":
        """As many prompts as that, the given ones over and over."""
        places = [place % len(self.tokens) for place in range(prompts)]
        return PromptSizes(tuple(self.tokens[at] for at in places), tuple(self.grids[at] for at in places))


@dataclass(frozen=True)
class MicroBatchSize:
    """One forward pass."""

    tokens: float  # packed; a shared prompt counts once
    patches: int  # of distinct media
    logits: float  # tokens whose logits are computed

    def times(self, share: float) -> "MicroBatchSize":
        """With so many times the tokens; media stay."""
        return MicroBatchSize(self.tokens * share, self.patches, self.logits * share)


@dataclass(frozen=True)
class BatchSizes:
    """Rows in order, with the samples of a prompt next to each other; ``samples`` rows for each prompt."""

    config: Any  # the checkpoint's
    prompts: PromptSizes
    responses: tuple[int, ...]  # (B,) sampled tokens
    samples: int = 1
    known: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)  # what many settings ask for

    def once(self, key: Any, make: Callable[[], Value]) -> Value:
        """The value of ``make``, which is called for the first such ``key`` only."""
        if key not in self.known:
            self.known[key] = make()
        return cast(Value, self.known[key])

    @cached_property
    def lengths(self) -> Tensor:
        """``(B,)`` int64 tokens of prompt and response."""
        return self.prompt_tokens + torch.tensor(self.responses, dtype=torch.int64)

    @cached_property
    def prompt_tokens(self) -> Tensor:
        """``(B,)`` int64 tokens of each row's prompt."""
        return torch.tensor(self.prompts.tokens, dtype=torch.int64).repeat_interleave(self.samples)

    @cached_property
    def first(self) -> Tensor:
        """``(B,)`` bool, whether a row is the first one of its prompt."""
        return torch.arange(len(self.responses)) % self.samples == 0

    @cached_property
    def shared(self) -> Tensor:
        """``(B,)`` int64 prompt tokens that a row has from the row before it."""
        return torch.where(self.first, 0, self.prompt_tokens)

    @property
    def packed_tokens(self) -> int:
        """Tokens that are computed."""
        return int((self.lengths - self.shared).sum())

    @cached_property
    def patches(self) -> Tensor:
        """``(P,)`` int64 patches of each prompt."""
        return torch.stack([_grids(each).prod(-1).sum() for each in self.prompts.grids])

    @cached_property
    def vision_flops(self) -> Tensor:
        """``(P,)`` operations of a forward pass through the tower for each prompt."""
        counts = [len(each) for each in self.prompts.grids]
        grids = _grids([grid for each in self.prompts.grids for grid in each])
        costs = family_of(self.config).vision_flops(self.config, grids).sum(1)
        return torch.stack([part.sum() for part in costs.split(counts)])

    @cached_property
    def flops(self) -> tuple[Flops, Flops]:
        """Operations of a forward pass through decoder layers and head, with the logits of responses: of all rows, and of the
        prompts that rows have from the row before them, which are not computed again.
        """
        family = family_of(self.config)
        whole = family.flops(self.config, self.lengths, logit_tokens=sum(self.responses))
        return whole, family.flops(self.config, self.shared, logit_tokens=0)

    @cached_property
    def row_flops(self) -> tuple[Tensor, Tensor]:
        """``(B,)`` operations of each row without its prompt, and of its prompt with its media."""
        family, responses = family_of(self.config), torch.tensor(self.responses)
        whole = family.row_flops(self.config, self.lengths, None, responses)
        prompts = family.row_flops(self.config, self.prompt_tokens, None, torch.zeros_like(responses))
        return whole - prompts, prompts + self.vision_flops.repeat_interleave(self.samples)

    def share(self, prompts: int, ranks: int = 1) -> "BatchSizes":
        """The rows of one of ``ranks`` ranks out of those of the first ``prompts``; of few prompts, some samples of one."""
        if ranks <= prompts:
            return self.once(("share", -(-prompts // ranks)), lambda: self._part(-(-prompts // ranks), self.samples))
        samples = max(-(-prompts * self.samples // ranks), 1)
        return self.once(("samples", samples), lambda: self._part(1, samples))

    def _part(self, prompts: int, samples: int) -> "BatchSizes":
        sizes = PromptSizes(self.prompts.tokens[:prompts], self.prompts.grids[:prompts])
        return BatchSizes(self.config, sizes, self.responses[: prompts * samples], samples)

    def fullest_micro_batches(self, token_budget: int, variation: float = VARIATION) -> list[MicroBatchSize]:
        """The micro-batches of whichever of three batches has the fullest one: this batch, and batches with a share of
        ``variation`` more and fewer tokens.

        Fewer tokens can take more memory: rows that do not quite fit into one micro-batch are two halves.
        """
        found = []
        for share in (1.0, 1 - variation, 1 + variation) if variation else (1.0,):
            parts = self.micro_batches(round(token_budget / share))
            found.append([part.times(share) for part in parts])
        return max(found, key=lambda parts: max(part.tokens for part in parts))

    def micro_batches(self, token_budget: int) -> list[MicroBatchSize]:
        """The micro-batches that an update plans for these rows, by `workers.training.micro_batches.plan_rows`."""
        return self.once(("micro-batches", token_budget), lambda: self._micro_batches(token_budget))

    def _micro_batches(self, token_budget: int) -> list[MicroBatchSize]:
        tokens, responses = self.lengths - self.shared, torch.tensor(self.responses)
        parts = [np.arange(len(tokens))]
        if self.packed_tokens > token_budget:
            own, prompts = self.row_flops
            lead = torch.where(self.first, 0, prompts)
            parts = plan_rows(tokens, self.shared, own + prompts - lead, lead, token_budget)
        found = []
        for rows in parts:
            index = torch.from_numpy(rows)
            lead_tokens = int(self.shared[index[0]]) if len(index) else 0
            patches = int(self.patches[(index // self.samples).unique()].sum())
            found.append(MicroBatchSize(int(tokens[index].sum()) + lead_tokens, patches, int(responses[index].sum())))
        return found

    def imbalance(self, ranks: int) -> float:
        """Work of the fullest of ``ranks`` dp ranks compared with the mean, as `spread` shares these rows out."""
        return self.once(("imbalance", ranks), lambda: self._imbalance(ranks)) if ranks > 1 else 1.0

    def _imbalance(self, ranks: int) -> float:
        own, lead = (each.double().numpy() for each in self.row_flops)
        groups = np.arange(len(own)) // self.samples
        shares = spread(own, lead, groups.tolist(), ranks)
        firsts = [share[np.unique(groups[share], return_index=True)[1]] for share in shares]
        work = [own[share].sum() + lead[first].sum() for share, first in zip(shares, firsts, strict=True)]
        return float(max(work) * ranks / sum(work))


def _grids(grids: Sequence[Sequence[int]]) -> Tensor:
    return torch.tensor(list(grids), dtype=torch.int64).reshape(-1, 3)


def response_lengths(count: int, mean: int, longest: int) -> tuple[int, ...]:
    """Lengths of ``count`` responses: the quantiles of a log-normal distribution, cut at ``longest``, in a fixed random order.

    Before the cut their mean is ``mean``; all are ``longest`` if ``mean`` is.
    """
    if mean >= longest:
        return (longest,) * count
    middles = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    expected = mean * torch.exp(SIGMA * torch.special.ndtri(middles) - SIGMA**2 / 2)
    lengths = expected.round().long().clamp(1, longest)
    return tuple(lengths[torch.randperm(count, generator=torch.Generator().manual_seed(0))].tolist())


def measure_prompts(loader: PromptLoader) -> PromptSizes:
    """The prompts of the first batch that a loader draws, at most `SAMPLE`, from the headers of their images.

    An image processor splits a blank image of an image's size as it splits the image. Rows with videos, whose number of frames
    no header tells, are prepared. The loader stays where it is.
    """
    builder, wanted = loader.builder, min(loader.batch_size, SAMPLE)
    tokens, grids = [], []
    blanks: dict[tuple[int, int], Grids] = {}
    for row in islice(first_rows(loader), 2 * wanted):
        length, media = _prompt_size(row, builder, blanks)
        if length <= builder.max_prompt_length:
            tokens.append(length)
            grids.append(media)
        if len(tokens) == wanted:
            break
    if not tokens:
        raise InvalidConfig(f"none of the first {2 * wanted} rows fits into {builder.max_prompt_length} tokens")
    return PromptSizes(tuple(tokens), tuple(grids))


def _prompt_size(row: Any, builder: PromptBuilder, blanks: dict[tuple[int, int], Grids]) -> tuple[int, Grids]:
    """Tokens and grids of a row; ``blanks`` are those of blank images of each size so far."""
    conversation = conversation_of(row)
    if {"video", "audio"} & {*conversation.kinds()}:
        prompt = builder.prepare(row)
        return len(prompt.input_ids), media_grids_of(builder, prompt)
    found: Grids = ()
    for source in conversation.of_kind("image"):
        size = image_size(source, row.get("media_root"))
        if size not in blanks:
            blanks[size] = grids_of(builder, builder.process_image(Image.new("RGB", size[::-1])).inputs)
        found += blanks[size]
    return builder.prompt_length(row), found


def first_rows(loader: PromptLoader) -> Iterator[Any]:
    """The rows as the loader draws them, from its first one on; where it skips unusable ones, without those."""
    rows = loader.rows
    for _, place, raw in draws(rows, loader.seed, loader.shuffle):
        with suppress(*((DataProtoError,) if loader.on_bad_row == "skip" else ())):
            row = rows[place] if raw is None else rows.read_row(raw, place)
            conversation_of(row)
            yield row


def measure_answers(loader: PromptLoader) -> BatchSizes:
    """A batch of conversations, or of pairs of answers, like the first ones that a loader draws, at most `CONVERSATIONS`, which
    are prepared: which tokens are learnt follows from their texts. The loader stays where it is.

    The learnt tokens of a conversation count as its response. Both answers of a pair are responses to their prompt.
    """
    builder, batch_size = cast(SupervisedBuilder, loader.builder), loader.batch_size
    prompts: list[int] = []
    learnt: list[tuple[int, ...]] = []
    grids = []
    for raw in islice(first_rows(loader), min(batch_size, CONVERSATIONS)):
        with suppress(*((DataProtoError,) if loader.on_bad_row == "skip" else ())):
            row = builder.prepare(raw)
            if isinstance(row, AnsweredPrompt):
                learnt.append(tuple(map(len, row.answers)))
                prompts.append(len(row.input_ids))
            else:
                learnt.append((int(row.loss_mask.sum()),))
                prompts.append(len(row.input_ids) - learnt[-1][0])
            grids.append(media_grids_of(builder, row))
    if not prompts:
        raise InvalidConfig(f"none of the first {min(batch_size, CONVERSATIONS)} rows can be used")
    sizes = PromptSizes(tuple(prompts), tuple(grids)).repeated(batch_size)
    lengths = [each for place in range(batch_size) for each in learnt[place % len(learnt)]]
    return BatchSizes(builder.config, sizes, tuple(lengths), samples=len(learnt[0]))


def media_grids_of(builder: PromptBuilder, prompt: Prompt) -> Grids:
    return tuple(grid for medium in by_kind(prompt.media) for grid in grids_of(builder, medium.inputs))


def grids_of(builder: PromptBuilder, inputs: Mapping[str, Tensor]) -> Grids:
    grids = builder.family.grids(inputs, builder.config).tolist()
    return tuple((int(t), int(h), int(w)) for t, h, w in grids)

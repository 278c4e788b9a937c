"""The sizes of the rows of a step, without their contents: tokens, patches and micro-batches.

Dimension letters: P prompts, B rows.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import Any, cast

import torch
from PIL import Image
from torch import Tensor

from dataproto.errors import DataProtoError, InvalidConfig
from dataproto.vlm import family_of
from dataproto.vlm.costs import Flops
from recipes.data.loader import PromptLoader, draws, may_recur
from rollout.engine import SamplingParams
from rollout.environments import EnvironmentFailed, EpisodeLimits, MakeEnvironment, Observation, TurnRenderer
from rollout.environments.environment_host import EnvironmentHost
from rollout.environments.episodes.episode_rows import episode_starts
from rollout.environments.episodes.turn_renderer import RenderedTurn
from rollout.prompts import PromptBuilder, SupervisedBuilder
from rollout.prompts.images import image_size
from rollout.prompts.prepared_rows import conversation_of
from workers.training.micro_batches import plan_rows

SIGMA = 0.7  # of the logarithm of a response's length
SAMPLE = 512  # prompts of the data that are measured, by their headers
CONVERSATIONS = 64  # rows to learn from that are measured, prepared
PREPARED = 16  # rows whose preparation is timed
VARIATION = 0.1  # share by which the tokens of a step are more or fewer than expected

Grids = tuple[tuple[int, int, int], ...]
"""Patches of each medium: time, height, width."""


@dataclass(frozen=True)
class PromptSizes:
    """The prompts of some rows."""

    tokens: tuple[int, ...]  # media included
    grids: tuple[Grids, ...]  # of the media of each prompt

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

    def times(self, share: float) -> "MicroBatchSize":
        """With so many times the tokens; media stay.

        >>> MicroBatchSize(tokens=100, patches=8, logits=50).times(1.1)
        MicroBatchSize(tokens=110, patches=8, logits=55, keys=0)
        """
        return replace(
            self, tokens=round(self.tokens * share), logits=round(self.logits * share), keys=round(self.keys * share)
        )


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

    @property
    def language_flops(self) -> int:
        """Operations of a forward pass through decoder layers and head; shared prompts once, logits of responses."""
        whole, shared = self._row_flops
        return whole.language - shared.language

    @property
    def attention_flops(self) -> int:
        """Of `language_flops`, those between queries and keys."""
        whole, shared = self._row_flops
        return whole.language_attention - shared.language_attention

    @cached_property
    def _row_flops(self) -> tuple[Flops, Flops]:
        """Of all rows, and of the prompts that rows have from the row before them."""
        family = family_of(self.config)
        whole = family.flops(self.config, self.lengths, logit_tokens=sum(self.responses))
        return whole, family.flops(self.config, self.shared, logit_tokens=0)

    def part(self, prompts: int) -> "BatchSizes":
        """The rows of the first prompts."""
        rows = prompts * self.samples
        shown = None if self.shown is None else self.shown.first(rows)
        return BatchSizes(self.config, self.prompts.first(prompts), self.responses[:rows], self.samples, shown)

    def fullest_micro_batches(self, token_budget: int, variation: float = VARIATION) -> list[MicroBatchSize]:
        """The micro-batches of whichever of three batches has the fullest one: this batch, and batches with a share of
        ``variation`` more and fewer tokens.

        Fewer tokens can take more memory: rows that do not quite fit into one micro-batch are two halves.

        >>> rows = BatchSizes(None, PromptSizes((1,) * 4, ((),) * 4), (9,) * 4)
        >>> rows.fullest_micro_batches(60)[0].tokens
        44
        """
        found = []
        for share in (1.0, 1 - variation, 1 + variation) if variation else (1.0,):
            parts = self.micro_batches(round(token_budget / share))
            found.append([part.times(share) for part in parts])
        return max(found, key=lambda parts: max(part.tokens for part in parts))

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
    if conversation.videos:
        prompt = builder.prepare(row)
        parts = [*(one.inputs for one in prompt.images), *(one.inputs for one in prompt.videos)]
        return len(prompt.input_ids), tuple(grid for part in parts for grid in grids_of(builder, part))
    found: Grids = ()
    for source in conversation.images:
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


def preparation_seconds(loader: PromptLoader, clock: Callable[[], float]) -> float:
    """Seconds to read and prepare a row, from the first ones: images are decoded and processed. Rows that fail count too."""
    start, number = clock(), 0
    for number, row in enumerate(islice(first_rows(loader), 1 + min(loader.batch_size, PREPARED))):
        with suppress(DataProtoError):
            loader.builder.prepare(row)
        if number == 0:  # the first one loads what it needs
            start = clock()
    return (clock() - start) / max(number, 1)


def measure_conversations(loader: PromptLoader) -> BatchSizes:
    """A batch of conversations like the first ones that a loader draws, at most `CONVERSATIONS`, which are prepared: which tokens
    are learnt follows from their texts. The loader stays where it is.

    The learnt tokens of a row count as its response.
    """
    builder, batch_size = cast(SupervisedBuilder, loader.builder), loader.batch_size
    prompts, learnt, grids = [], [], []
    for raw in islice(first_rows(loader), min(batch_size, CONVERSATIONS)):
        with suppress(*((DataProtoError,) if loader.on_bad_row == "skip" else ())):
            row = builder.prepare(raw)
            learnt.append(int(row.loss_mask.sum()))
            prompts.append(len(row.input_ids) - learnt[-1])
            parts = [*(one.inputs for one in row.images), *(one.inputs for one in row.videos)]
            grids.append(tuple(grid for part in parts for grid in grids_of(builder, part)))
    if not prompts:
        raise InvalidConfig(f"none of the first {min(batch_size, CONVERSATIONS)} rows can be used")
    sizes = PromptSizes(tuple(prompts), tuple(grids)).repeated(batch_size)
    return BatchSizes(builder.config, sizes, tuple(learnt[place % len(learnt)] for place in range(batch_size)))


def kept_image_bytes(loader: PromptLoader, sizes: PromptSizes, drawn: int, held_out: int) -> int:
    """Bytes of the processed images that the builder's cache holds at the end of a run of ``drawn`` rows and ``held_out`` ones.

    Images of rows that other processes prepare, or that never come back, are not kept (`recipes.data.loader.may_recur`).
    """
    family, config = loader.builder.family, loader.builder.config
    if family.vision_tower is None:
        return 0
    kept = 0 if loader.num_workers or not may_recur(loader.rows) else drawn
    if hasattr(loader.rows, "__len__"):
        kept = min(kept, len(loader.rows))
    row = patch_bytes(config) * float(_patches(sizes).double().mean())
    return min(round((kept + held_out) * row), loader.builder.image_cache_bytes)


def patch_bytes(config: Any) -> float:
    """Bytes of a processed image for each patch of it, in float32."""
    family = family_of(config)
    media = family.dummy_media(config)
    return sum(each.nbytes for each in media.values()) / int(family.grids(media, config).prod(-1).sum())


def grids_of(builder: PromptBuilder, inputs: Mapping[str, Tensor]) -> Grids:
    grids = builder.family.grids(inputs, builder.config).tolist()
    return tuple((int(t), int(h), int(w)) for t, h, w in grids)


@dataclass(frozen=True)
class EpisodeSizes:
    """One episode."""

    prompts: PromptSizes  # of its prompt, the first observation included
    shown: PromptSizes  # of all observations behind it
    sampled: int | None = None  # tokens of the actions, end tokens included; None: not known


def measure_episode(
    loader: PromptLoader,
    make_environment: MakeEnvironment,
    limits: EpisodeLimits,
    actions: Sequence[str] = (),
) -> EpisodeSizes:
    """Plays an episode from the first prompt of a loader, which stays where it is.

    Args:
        actions: of the episode. Without them the environment is only reset, and each further turn counts as if it showed the same
            again.

    Raises:
        EnvironmentFailed: the environment raised, took too long, or returned something that is no observation.
    """
    builder = loader.builder
    alone = PromptLoader(loader.rows, builder, 1, loader.seed, loader.shuffle, loader.on_bad_row)
    start = episode_starts(next(alone), SamplingParams())[0]
    renderer = TurnRenderer(builder)
    name = "forecast"
    with EnvironmentHost(make_environment, limits.seconds, limits.memory_gib) as host:
        host.reset(name, start.row, start.environment_seed)
        first = _answer(host)
        prompt = renderer.prompt(start.row, first)
        turns: list[RenderedTurn] = []
        if not actions:
            turns = [renderer.turn(first)] * (limits.turns - 1)
        for number, action in enumerate(actions[: limits.turns], 1):
            host.step(name, action)
            shown = _answer(host)
            if shown.done or number == limits.turns:
                break
            turns.append(renderer.turn(shown))
    played = actions[: len(turns) + 1]
    return EpisodeSizes(
        PromptSizes((len(prompt.input_ids),), (_shown_grids(builder, prompt.images),)),
        PromptSizes(
            (sum(len(turn.ids) for turn in turns),),
            (tuple(grid for turn in turns for grid in _shown_grids(builder, turn.images)),),
        ),
        sum(len(builder.encode_text(action)) + 1 for action in played) if actions else None,
    )


def _answer(host: EnvironmentHost) -> Observation:
    """The observation that answers the last call."""
    ((_, outcome),) = host.poll(None)
    if isinstance(outcome, EnvironmentFailed):
        raise outcome
    return outcome


def _shown_grids(builder: PromptBuilder, images: Sequence[Any]) -> tuple[tuple[int, int, int], ...]:
    return tuple(grid for image in images for grid in grids_of(builder, image.inputs))

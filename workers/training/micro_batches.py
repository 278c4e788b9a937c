"""Micro-batches: the rows that one forward pass computes together, full ones of about equal work.

Ranks that share a model run in step: FSDP gathers weights layer by layer, so all of them run the same number of micro-batches,
and in each of them the vision tower if one rank has media there.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dataproto import DataProto
from dataproto.columns import PAIR, media_parts
from dataproto.packing import PackedRows, unpack_cells
from dataproto.planning import balance, first_fit_decreasing, split_by_tokens
from dataproto.vlm import MediaSpans
from workers.model.packed_model import MediaPart, PackedVLM
from workers.ranks.mesh import Ranks
from workers.training.forward_pass import PreparedRows, media_of, media_tokens, needs_tower, shared_tokens, sharing

NOTHING = slice(0, 0)

EARLY = 4096
"""The most patches of media on a rank that are encoded early, before the backward pass of the micro-batch before. A tower
computes so few faster than the host launches its kernels, and only at that time is the host ahead of the device. Until their
own backward pass their activations take up to 4 GB.
"""


@dataclass(frozen=True)
class MicroBatch:
    """Rows of one forward pass."""

    index: slice | Tensor  # the rows of the batch; empty for an inert micro-batch
    rows: DataProto  # at least one row; that of an inert micro-batch has no response token
    tower: bool  # whether to run the vision tower: some rank has media in its micro-batch of this number
    length: int = 0  # packed tokens that it is filled up to, where ranks exchange tokens; 0: it is not
    early: bool = False  # whether its media are encoded early, on all ranks or none, since they gather weights together

    @property
    def inert(self) -> bool:
        """Whether it is there only because other ranks have rows left."""
        return isinstance(self.index, slice) and self.index.start == self.index.stop


def micro_batches(
    data: DataProto, module: PackedVLM, token_budget: int, ranks: Ranks | None = None
) -> list[MicroBatch]:
    """Parts of at most ``token_budget`` packed tokens, a shared prompt counted once; the same number of parts on every rank.

    Rows without response tokens are in none of them. The rows of a pair are in one, next to each other. Every rank calls it; a
    rank with fewer rows spreads them over the same number of parts and, if it has too few, gets inert ones.
    """
    ranks = ranks or Ranks()
    wanted = data["response_mask"].bool().any(1)
    places = None if bool(wanted.all()) else wanted.nonzero().squeeze(1)
    chosen = data if places is None else data[places]
    plan = _plan(chosen, module, token_budget, ranks)
    if ranks.size("dp") > 1:
        plan = _by_media(chosen, module, plan)
    parts = [as_index(rows) for rows in plan]
    rows = [inert_rows(module) if part == NOTHING else chosen[part] for part in parts]
    indices = [part if places is None or part == NOTHING else places[part] for part in parts]
    lengths = common_lengths(rows, module, ranks)
    patches = module.family.merge_size(module.model.config) ** 2  # of a token of media: 4, or 16 in Gemma 3
    media = [patches * media_tokens(module, part) for part in rows]
    flags, counts = zip(*ranks.all_gather((needs_tower(module, rows), media), "dp"), strict=True)
    towers = [any(each) for each in zip(*flags, strict=True)]
    early = [max(each) <= EARLY for each in zip(*counts, strict=True)]
    return [MicroBatch(*each) for each in zip(indices, rows, towers, lengths, early, strict=True)]


def common_lengths(parts: Sequence[DataProto], module: PackedVLM, ranks: Ranks) -> list[int]:
    """The packed tokens of the longest micro-batch of each number, where ranks with other rows share experts."""
    if ranks.size("ep") == 1 or ranks.size("dp") == 1:
        return [0] * len(parts)
    here = [int(rows["attention_mask"].sum() - shared_tokens(module, rows).sum()) for rows in parts]
    return [max(lengths) for lengths in zip(*ranks.all_gather(here, "dp"), strict=True)]


def _plan(data: DataProto, module: PackedVLM, token_budget: int, ranks: Ranks) -> list[np.ndarray]:
    whole, saved = data["attention_mask"].sum(1), shared_tokens(module, data)
    stages = ranks.size("pp")  # a pipeline takes a multiple of its stages
    if ranks.size("dp") == stages == 1 and int((whole - saved).sum()) <= token_budget:
        return [np.arange(len(data))] if len(data) else []
    costs, first_costs = module.family.row_costs(
        module.model.config, whole, media_of(data), saved, data["response_mask"].sum(1)
    )
    starts = _starts(data)
    own, work = (torch.from_numpy(np.add.reduceat(each.numpy(), starts)) for each in (whole - saved, costs))
    plan = plan_rows(
        own,
        saved[starts],
        work,
        first_costs[starts],
        token_budget,
        agree=lambda count: -(-max(ranks.all_gather(count, "dp")) // stages) * stages,
    )
    units = np.split(np.arange(len(data)), starts[1:])
    return [np.concatenate([part[:0], *(units[unit] for unit in part)]) for part in plan]


def _starts(data: DataProto) -> np.ndarray:
    """The first row of each pair; without the column, each row."""
    if PAIR not in data:
        return np.arange(len(data))
    pairs = data[PAIR].numpy()
    return np.flatnonzero(np.append(True, pairs[1:] != pairs[:-1])[: len(pairs)])


def _by_media(data: DataProto, module: PackedVLM, plan: list[np.ndarray]) -> list[np.ndarray]:
    """The micro-batches with the most media first.

    Ranks wait for each other both in the tower and in the decoder, so each should be about equal work on all of them.
    """
    shared = sharing(module, data).tolist()
    whole = [sum(len(value) for part in media_parts(row) for value in part.values()) for row in media_of(data)]
    sizes = [0 if continues else size for continues, size in zip(shared, whole, strict=True)]
    return sorted(plan, key=lambda rows: -sum(sizes[row] for row in rows))


def inert_rows(module: PackedVLM) -> DataProto:
    """One row of two text tokens, without a response token."""
    ids, mask = torch.zeros(1, 2, dtype=torch.int64), torch.ones(1, 2, dtype=torch.int64)
    types = ids.to(torch.int8)
    return DataProto.from_dict(
        {
            "input_ids": ids,
            "attention_mask": mask,
            "mm_token_type_ids": types,
            "position_ids": module.family.position_ids(types, mask, None, None, None, module.model.config),
            "response_mask": ids[:, :1],
        }
    )


def plan_rows(
    lengths: Tensor,
    lead: Tensor,
    costs: Tensor,
    lead_costs: Tensor,
    token_budget: int,
    agree: Callable[[int], int] = int,
) -> list[np.ndarray]:
    """Row indices, ascending, of micro-batches of at most ``token_budget`` tokens; some are empty if another rank needs more.

    Rows that share the prompt or media of the row before (``lead_costs`` above 0) stay after it as far as the budget allows. The
    number of micro-batches is that of first-fit decreasing; their costs are made as
    equal as the budget allows, since a small one would not keep the device busy, and all ranks wait for the slowest.

    Args:
        lengths, costs: ``(B,)`` tokens and work of each row.
        lead, lead_costs: ``(B,)`` further tokens and work of a row that is the first of its micro-batch.
        agree: from the number of micro-batches that these rows need to the number on all ranks, which is not smaller.

    >>> ones, none = torch.ones(5), torch.zeros(5)
    >>> [part.tolist() for part in plan_rows(torch.tensor([6, 5, 4, 3, 2]), none, ones, none, token_budget=10)]
    [[0, 2], [1, 3, 4]]
    """
    pieces = _pieces(lengths, lead, lead_costs > 0, token_budget)
    tokens, work = (
        np.array([float(own[piece].sum() + first[piece.start]) for piece in pieces])
        for own, first in ((lengths, lead), (costs, lead_costs))
    )
    bins = first_fit_decreasing(np.minimum(tokens, token_budget), token_budget)
    count = agree(len(bins))
    parts = balance(work, count) if count else []
    if any(len(part) > 1 and tokens[part].sum() > token_budget for part in parts):
        parts = bins + [np.zeros(0, dtype=np.int64)] * (count - len(bins))
    rows = np.arange(len(lengths))
    return [np.concatenate([rows[:0], *(rows[pieces[number]] for number in sorted(part))]) for part in parts]


def _pieces(lengths: Tensor, lead: Tensor, follows: Tensor, token_budget: int) -> list[slice]:
    """Runs of rows that share something, cut where they exceed the budget."""
    starts = [row for row, continues in enumerate(follows.tolist()) if not continues or row == 0]
    return [
        slice(start + part.start, start + part.stop)
        for start, stop in pairwise([*starts, len(lengths)])
        for part in split_by_tokens(lengths[start:stop], token_budget, lead=lead[start:stop])
    ]


def as_index(rows: np.ndarray) -> slice | Tensor:
    """The rows as a slice, which copies nothing, if they are consecutive.

    >>> as_index(np.array([2, 3])), as_index(np.array([2, 4]))
    (slice(2, 4, None), tensor([2, 4]))
    """
    if len(rows) == 0:
        return slice(0, 0)
    if rows[-1] - rows[0] == len(rows) - 1:
        return slice(int(rows[0]), int(rows[-1]) + 1)
    return torch.from_numpy(rows)


Conclude = Callable[[MicroBatch, Any], None]
"""Takes a micro-batch and its outputs, and runs the backward pass from its loss to these outputs."""


class MicroBatchFeed:
    """The `Feed` of a pipeline: micro-batches, packed."""

    def __init__(
        self, module: PackedVLM, parts: Sequence[MicroBatch], device: torch.device, conclude: Conclude
    ) -> None:
        self.module, self.parts, self.device, self._conclude = module, parts, device, conclude
        self.prepared = [PreparedRows(module, part.rows) for part in parts]
        self.count = len(parts)
        self.length = max((each.packed.input_ids.shape[-1] for each in self.prepared), default=0)
        self.length = max(self.length, *(part.length for part in parts), 0)
        self.has_media = any(part.tower for part in parts)

    def inputs(self, number: int, media: bool) -> tuple[PackedRows, MediaPart | None, MediaSpans]:
        """The arguments of a forward pass over micro-batch ``number``, filled up to `length`; pixels only with ``media``."""
        prepared, nothing = self.prepared[number], torch.zeros(0, dtype=torch.int64)
        tokens = prepared.tokens(self.module, self.device, self.length)
        if not media:
            return tokens, None, MediaSpans(nothing, nothing)
        part, spans, _ = prepared.media(self.module, self.device, self.parts[number].tower, keeps=False)
        return tokens, part, spans

    def conclude(self, number: int, rows: PackedRows, scores: Tensor, entropies: Tensor | None) -> Tensor:
        """From the result of `PackedVLM.forward` to the number () that the backward pass starts from.

        The backward pass of the loss function runs here already, so that an error in it stops no stage: stages wait for each
        other.
        """
        part, given = self.parts[number], [each for each in (scores, entropies) if each is not None]
        leaves = [each.detach().requires_grad_(each.requires_grad) for each in given]
        shape, cells = tuple(part.rows["response_mask"].shape), rows.response_cells
        self._conclude(part, self.module.outputs(*(unpack_cells(each, cells, shape) for each in leaves)))
        slopes = [0 if leaf.grad is None else leaf.grad for leaf in leaves]
        return torch.stack([(each * slope).sum() for each, slope in zip(given, slopes, strict=True)]).sum()

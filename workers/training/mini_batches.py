"""Mini-batches of an update, cut from the whole batch, and each rank's share of their rows."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from dataproto import DataProto
from dataproto.columns import PAIR, require
from dataproto.errors import InvalidColumn, InvalidConfig
from dataproto.planning import balance, cut_minibatches, places_in_groups
from workers.ranks.dispatch_modes import Arguments, even_bounds
from workers.ranks.mesh import Ranks

TOLERANCE = 1.1
"""How much more work than the average the busiest rank may have before the samples of a prompt are split over ranks."""

# Where a batch has no column "cost": in units of a token's linear layers, as in a model of 7 billion weights.
IMAGE_TOKEN = 0.4  # further work of the vision tower for an image token
ATTENTION = 1 / 43_000  # further work of attention for a pair of tokens


ROW = "_row"
"""The column with each row's index in the whole batch."""
MINIBATCH = "_minibatch"
"""The column with the number of each row's mini-batch."""


def split_update(call: Arguments, parts: int) -> list[Arguments]:
    """The call ``update(data, loss_fn, minibatch, ...)`` for each of ``parts`` data-parallel ranks, see `share_out`."""
    named = dict(zip(("data", "loss_fn", "minibatch"), call.args)) | call.kwargs
    return call.with_first("data", share_out(named["data"], parts, named.get("minibatch")))


def share_out(data: DataProto, parts: int, minibatch: int | None = None) -> list[DataProto]:
    """The rows of each of ``parts`` ranks, with the columns `ROW` and `MINIBATCH`.

    A mini-batch is ``minibatch`` prompts of the whole batch (all of it if ``None``), and its work is spread evenly. Samples of
    a prompt stay on one rank, where the prompt is computed once, unless a rank would have `TOLERANCE` times the average; those of
    a pair always do. Work is read from the column ``cost`` ``(B,)`` if there is one (`VLMFamily.row_costs`), else estimated.
    """
    groups = np.asarray(data["uid"] if "uid" in data else np.arange(len(data)))
    own, lead = row_work(data)
    numbers = np.zeros(len(data), dtype=np.int64)
    shares: list[list[np.ndarray]] = [[] for _ in range(parts)]
    batches = [np.arange(len(data))] if minibatch is None else cut_minibatches(groups, minibatch)
    for number, rows in enumerate(batches):
        numbers[rows] = number
        found = spread(own[rows], lead[rows], groups[rows].tolist(), parts, whole=PAIR in data)
        for share, chosen in zip(shares, found, strict=True):
            share.append(rows[chosen])
    numbered = data[:]
    numbered[MINIBATCH], numbered[ROW] = numbers, np.arange(len(data))
    return [numbered[np.concatenate(share)] for share in shares]


def split_scoring(call: Arguments, parts: int) -> list[Arguments]:
    """The call ``method(data, ...)`` for each of ``parts`` data-parallel ranks: contiguous rows of about equal work.

    Samples of a prompt that are next to each other stay together as in `share_out`.
    """
    data = call.first("data")
    return call.with_first("data", (data[start:stop] for start, stop in pairwise(scoring_bounds(data, parts))))


def scoring_bounds(data: DataProto, parts: int) -> list[int]:
    """Where `split_scoring` cuts: between prompts, or between rows if a part would have `TOLERANCE` times the average work.

    >>> rows = {"attention_mask": torch.ones(8, 2), "response_mask": torch.ones(8, 1)}
    >>> [scoring_bounds(DataProto.from_dict(rows, {"uid": list(uids)}), 2) for uids in ("aabbccdd", "aaaaaaab")]
    [[0, 4, 8], [0, 4, 8]]
    """
    groups = np.asarray(data["uid"] if "uid" in data else np.arange(len(data)))
    own, lead = row_work(data)
    first = np.append(True, groups[1:] != groups[:-1])[: len(data)]  # the first row of its prompt
    work, starts = own + np.where(first, lead, 0.0), np.flatnonzero(first)
    if len(starts) >= parts:
        bounds = [*starts, len(data)]
        cuts = [int(bounds[cut]) for cut in even_bounds(np.add.reduceat(work, starts), parts)]
        busiest = max(float(work[start:stop].sum()) for start, stop in pairwise(cuts))
        if busiest <= TOLERANCE * work.sum() / parts:
            return cuts
    return even_bounds(work, parts)


def row_work(data: DataProto) -> tuple[np.ndarray, np.ndarray]:
    """Work of each row ``(B,)`` without its prompt, and of its prompt."""
    attended = np.asarray(data["attention_mask"].cpu(), dtype=np.float64)
    prompt = attended.shape[1] - data["response_mask"].shape[1]
    tokens, prompts = attended.sum(1), attended[:, :prompt].sum(1)
    images = np.zeros(len(data))
    if "mm_token_type_ids" in data:
        images = np.asarray((data["mm_token_type_ids"] > 0).sum(1).cpu(), dtype=np.float64)
    lead = prompts + IMAGE_TOKEN * images + ATTENTION * prompts**2
    whole = tokens + IMAGE_TOKEN * images + ATTENTION * tokens**2
    if "cost" in data:
        cost = np.asarray(data["cost"], dtype=np.float64)
        lead, whole = cost * lead / np.maximum(whole, 1), cost
    return whole - lead, lead


def spread(
    own: np.ndarray, lead: np.ndarray, groups: Sequence[object], parts: int, whole: bool = False
) -> list[np.ndarray]:
    """Row indices, ascending, of ``parts`` parts of about equal work.

    Args:
        own, lead: ``(B,)`` work of each row, and further work of the first row of its group in a part.
        groups: ``(B,)`` labels; rows of a group stay together unless a part would have too much work.
        whole: rows of a group stay together even then.

    >>> [part.tolist() for part in spread(np.ones(4), np.ones(4), ["a", "a", "b", "b"], parts=2)]
    [[0, 1], [2, 3]]
    >>> [part.tolist() for part in spread(np.ones(4), np.ones(4), ["a", "a", "a", "a"], parts=2)]
    [[0, 1], [2, 3]]
    """
    best: list[np.ndarray] = []
    least, pieces = np.inf, 1
    order = places_in_groups(groups)
    largest = int(order.max(initial=0)) + 1
    while True:
        size = -(-largest // pieces)  # rows of a piece
        keys = [(group, int(place) // size) for group, place in zip(groups, order, strict=True)]
        costs = own + np.where(order % size == 0, lead, 0.0)
        found = balance(costs, parts, groups=keys)
        busiest = max(float(costs[part].sum()) for part in found)
        if busiest < least:
            best, least = found, busiest
        if busiest <= TOLERANCE * costs.sum() / parts or size == 1 or whole:
            return best
        pieces *= 2


def cut_minibatches_of_rank(data: DataProto, prompts: int | None, ranks: Ranks) -> list[np.ndarray | None]:
    """Row indices of this rank's part of each mini-batch; ``None`` means all rows."""
    if MINIBATCH in data:
        numbers = np.asarray(data[MINIBATCH])
        return [np.flatnonzero(numbers == number) for number in range(int(numbers.max(initial=-1)) + 1)]
    if prompts is None:
        return [None]
    if ranks.size("dp") > 1:
        raise InvalidConfig(
            f"minibatch={prompts} counts prompts of all ranks: cut the batch by workers.training.mini_batches.share_out before "
            "it is spread"
        )
    require(data, "uid")
    return list(cut_minibatches(data["uid"], prompts))


def pad_minibatches(parts: Sequence[np.ndarray | None], mask: Tensor, ranks: Ranks) -> list[np.ndarray | None]:
    """The mini-batches, with empty ones added at the end so that every rank has the same number.

    Raises:
        InvalidColumn: a mini-batch has no response token on any rank; names it.
    """
    masks = (mask if part is None else mask[torch.from_numpy(part)] for part in parts)
    everybody = ranks.all_gather([(len(each), int((each != 0).sum())) for each in masks], "dp")
    count = max(map(len, everybody))
    for number in range(count):
        held = [found[number] for found in everybody if number < len(found)]
        if not any(tokens for _, tokens in held):
            rows = sum(rows for rows, _ in held)
            raise InvalidColumn(f"none of the {rows} rows of mini-batch {number} has a response token to learn from")
    return [*parts, *[np.zeros(0, dtype=np.int64)] * (count - len(parts))]

"""What rows cost, for planning: which rows share a micro-batch, and which rank gets which rows. See `flops` for the counting."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from dataproto.vlm.family import VLMFamily


def row_costs(
    family: "VLMFamily",
    config: Any,
    lengths: Tensor,
    media: Sequence[Mapping[str, Any]] | None = None,
    shared: Tensor | None = None,
    logit_tokens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Operations of a forward pass by row, without and because of what a row shares with the row before, ``(B,)`` int64 each.

    The second is what a row costs more where it is the first of its part: ``lead_costs`` of `dataproto.planning.split_by_budget`.
    The two together are ``family.row_flops``.

    Args:
        lengths: ``(B,)`` attended tokens.
        media: the rows' ``multi_modal_inputs``; rows that hold the very objects of the row before share them.
        shared: ``(B,)`` prompt tokens that a row shares with the row before; 0 for all unless given.
        logit_tokens: ``(B,)`` tokens whose logits are computed, all unless given.
    """
    prompts = torch.zeros_like(lengths) if shared is None else shared
    whole = family.row_flops(config, lengths, media, logit_tokens)
    lead = family.row_flops(config, prompts, None, torch.zeros_like(prompts))
    if media is not None:
        keys = [{name: id(value) for name, value in row.items()} for row in media]
        repeated = torch.tensor([row > 0 and key == keys[row - 1] for row, key in enumerate(keys)], dtype=torch.bool)
        vision = whole - family.row_flops(config, lengths, None, logit_tokens)
        lead = lead + torch.where(repeated, vision, 0)
    return whole - lead, lead


def grid_sums(
    media: Sequence[Mapping[str, Any]],
    grids_of: Callable[[Mapping[str, Any]], Tensor],
    cost: Callable[[Tensor], Tensor],
) -> Tensor:
    """The cost ``(B,)`` of each row's media, from the grids ``(N, 3)`` of a row's and the cost ``(N,)`` of grids; rows that
    hold the same objects are looked at once.

    >>> one = {"image_grid_thw": torch.tensor([[1, 2, 4], [1, 2, 2]])}
    >>> none = torch.zeros(0, 3, dtype=torch.int64)
    >>> grid_sums([one, {}, one], lambda row: row.get("image_grid_thw", none), lambda grids: grids.prod(-1)).tolist()
    [12, 0, 12]
    """
    numbers: dict[tuple[tuple[str, int], ...], int] = {}
    distinct: list[Tensor] = []
    owners = []
    for row in media:
        key = tuple((name, id(value)) for name, value in row.items())
        if key not in numbers:
            numbers[key] = len(distinct)
            distinct.append(grids_of(row))
        owners.append(numbers[key])
    sums = torch.zeros(len(distinct), dtype=torch.int64)
    if distinct:
        counts = torch.tensor([len(grids) for grids in distinct])
        sums.index_add_(0, torch.repeat_interleave(counts), cost(torch.cat(distinct)))
    return sums[torch.tensor(owners, dtype=torch.int64)]

"""What rows cost, for planning: which rows share a micro-batch, and which rank gets which rows. See `flops` for the counting."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from dataproto.vlm.family import VLMFamily

_GRIDS = ("image_grid_thw", "video_grid_thw")


def row_costs(
    family: "VLMFamily",
    config: Any,
    lengths: Tensor,
    media: Sequence[Mapping[str, Any]] | None = None,
    shared: Tensor | None = None,
    logit_tokens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Operations of a forward pass by row, without and because of what a row shares with the row before, ``(B,)`` int64 each.

    The second is what a row costs more where it is the first of its part: ``lead_costs`` of `dataproto.batching.split_by_budget`.
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


def grid_sums(media: Sequence[Mapping[str, Any]], cost: Callable[[Tensor], Tensor]) -> Tensor:
    """The cost ``(B,)`` of each row's media, from that of grids ``(N, 3) -> (N,)``, which sees each grid tensor once.

    >>> one = {"image_grid_thw": torch.tensor([[1, 2, 4], [1, 2, 2]])}
    >>> grid_sums([one, {}, one], lambda grids: grids.prod(-1)).tolist()
    [12, 0, 12]
    """
    distinct: dict[int, Tensor] = {}
    for row in media:
        for name in _GRIDS:
            if (grid := row.get(name)) is not None:
                distinct.setdefault(id(grid), torch.as_tensor(grid).long().cpu().view(-1, 3))
    sums = torch.zeros(len(distinct) + 1, dtype=torch.int64)  # the last stays 0, for what a row does not have
    if distinct:
        owners = torch.repeat_interleave(torch.tensor([len(grid) for grid in distinct.values()]))
        sums.index_add_(0, owners, cost(torch.cat(list(distinct.values()))))
    place = {key: number for number, key in enumerate(distinct)}
    absent = len(distinct)
    table = [[place.get(id(row.get(name)), absent) for name in _GRIDS] for row in media]
    return sums[torch.tensor(table, dtype=torch.int64).view(-1, len(_GRIDS))].sum(1)

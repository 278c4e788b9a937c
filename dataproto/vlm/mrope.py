"""Multimodal rotary positions: arithmetic on token types and grids, without a loop over rows or tokens.

Rule (Qwen2-VL, arXiv 2409.12191, section 2.1): a text token takes the next position in all three rows; the tokens of an
image or of a piece of video take ``start + (time, height, width)`` of their place in the grid, and what follows starts
``max(height, width)`` later.

Letters: B rows, L tokens, N media, K media tokens of one kind.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from dataproto.errors import MediaMismatch

IMAGE, VIDEO = 1, 2
"""Values of ``mm_token_type_ids``; 0 is text."""

_NAMES = {IMAGE: "image", VIDEO: "video"}


@dataclass(frozen=True)
class Pieces:
    """Media of one kind in row order, each a contiguous run of placeholder tokens.

    ``sizes (N, 3)`` int64: time, height, width in tokens (after spatial merging); ``intervals (N,)`` float: positions
    from one time step to the next.
    """

    sizes: Tensor
    intervals: Tensor

    @classmethod
    def of_grids(cls, grid_thw: Tensor, merge_size: int, intervals: Tensor | None = None) -> "Pieces":
        """From grids in patches ``(N, 3)``.

        >>> Pieces.of_grids(torch.tensor([[1, 4, 6]]), merge_size=2).sizes
        tensor([[1, 2, 3]])
        """
        sizes = grid_thw.long() // grid_thw.new_tensor([1, merge_size, merge_size]).long()
        return cls(sizes, sizes.new_ones(len(sizes), dtype=torch.float32) if intervals is None else intervals)

    @classmethod
    def none(cls) -> "Pieces":
        """No media of this kind."""
        return cls(torch.zeros(0, 3, dtype=torch.int64), torch.zeros(0))

    def to(self, device: torch.device) -> "Pieces":
        """The same on another device."""
        return Pieces(self.sizes.to(device), self.intervals.to(device))


def mrope_positions(token_types: Tensor, attention_mask: Tensor, images: Pieces, videos: Pieces) -> Tensor:
    """Positions ``(B, 4, L)`` int64: the rank among attended tokens, then time, height, width.

    ``token_types (B, L)``, ``attention_mask (B, L)``; ``images`` and ``videos`` list the media of all rows in row
    order. Padding, left, right or in between, has position 0 in every row, as in Hugging Face. Raises `MediaMismatch`
    where placeholder tokens and media disagree.

    >>> types = torch.tensor([[0, 1, 1, 1, 1, 1, 1, 0]])
    >>> image = Pieces.of_grids(torch.tensor([[1, 4, 6]]), merge_size=2)
    >>> mrope_positions(types, torch.ones(1, 8), image, Pieces.none())[0]
    tensor([[0, 1, 2, 3, 4, 5, 6, 7],
            [0, 1, 1, 1, 1, 1, 1, 4],
            [0, 1, 1, 1, 2, 2, 2, 4],
            [0, 1, 2, 3, 1, 2, 3, 4]])
    """
    attended = attention_mask.bool()
    types = torch.where(attended, token_types.long(), 0)
    ranks = attended.long().cumsum(-1) - 1
    width = attended.long()  # how far the token's run moves what follows
    steps = attended.long()  # the same, counted once a run
    offsets = types.new_zeros(3, types.numel())
    for kind, pieces in ((IMAGE, images), (VIDEO, videos)):
        pieces = pieces.to(types.device)
        index, piece, within = _assign(types, ranks, kind, pieces)
        time, height, column = _unravel(pieces, piece, within)
        extent = pieces.sizes[:, 1:].amax(1)[piece]
        width.view(-1)[index] = extent
        steps.view(-1)[index] = torch.where(within == 0, extent, 0)
        offsets[:, index] = torch.stack([time, height, column])
    start = (steps.cumsum(-1) - width).expand(3, -1, -1)
    spatial = start + offsets.view(3, *types.shape)
    return (torch.cat([ranks[None], spatial]) * attended).transpose(0, 1).contiguous()


def extend_positions(position_ids: Tensor, attention_mask: Tensor, length: int) -> Tensor:
    """Positions ``(B, 4, R)`` of ``length`` text tokens that follow each row's last attended token.

    ``position_ids (B, 4, P)``, ``attention_mask (B, P)``. A row without attended tokens starts at 0. Text starts behind
    the last token's height and width; time does not count, since a video does not push what follows by its duration.

    >>> prompt = torch.tensor([[[0, 0, 1, 2], [0, 0, 1, 1], [0, 0, 1, 1], [0, 0, 1, 2]]])
    >>> extend_positions(prompt, torch.tensor([[0, 1, 1, 1]]), 2)[0]
    tensor([[3, 4],
            [3, 4],
            [3, 4],
            [3, 4]])
    """
    places = torch.arange(1, attention_mask.shape[-1] + 1, device=attention_mask.device)
    last = (attention_mask.long() * places).amax(-1)  # (B,), one-based; 0 where nothing is attended
    index = (last - 1).clamp(min=0)[:, None, None].expand(-1, 4, 1)
    final = torch.where((last > 0)[:, None, None], position_ids.gather(-1, index), -1)  # (B, 4, 1)
    behind = final[:, 2:].amax(1, keepdim=True).expand(-1, 3, -1)
    return torch.cat([final[:, :1], behind], 1) + torch.arange(1, length + 1, device=position_ids.device)


def _assign(types: Tensor, ranks: Tensor, kind: int, pieces: Pieces) -> tuple[Tensor, Tensor, Tensor]:
    """Of each token of a kind ``(K,)``: its flat index, the medium it belongs to, and its place in that medium."""
    name = _NAMES[kind]
    index = (types == kind).view(-1).nonzero().squeeze(-1)
    counts = pieces.sizes.prod(-1)
    piece = torch.repeat_interleave(torch.arange(len(counts), device=counts.device), counts)
    if len(index) != len(piece):
        raise MediaMismatch(
            f"{len(index)} {name} placeholder tokens in the batch, but its {len(counts)} grids count {len(piece)} "
            f"(placeholders in each row: {(types == kind).sum(-1).tolist()}, grids: {counts.tolist()})"
        )
    starts = (counts.cumsum(0) - counts)[piece]
    within = torch.arange(len(index), device=index.device) - starts
    rows, flat_ranks = index // types.shape[-1], ranks.view(-1)
    broken = (rows != rows[starts]) | (flat_ranks[index] - flat_ranks[index[starts]] != within)
    if broken.any():
        first = int(broken.nonzero()[0])
        row, medium = int(rows[first]), int(piece[first])
        raise MediaMismatch(
            f"row {row}: {name} {medium} of the batch needs a run of {int(counts[medium])} placeholder tokens, "
            f"which breaks after {int(within[first])} ({int((types[row] == kind).sum())} in the row)"
        )
    return index, piece, within


def _unravel(pieces: Pieces, piece: Tensor, within: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Time, height and width offsets ``(K,)`` of each token in its grid."""
    _, height, width = pieces.sizes[piece].unbind(-1)
    time = ((within // (height * width)) * pieces.intervals[piece]).long()
    return time, within // width % height, within % width

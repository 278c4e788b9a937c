"""Multimodal rotary positions: arithmetic on token types and grids, without a loop over rows or tokens.

Rule (Qwen2-VL, arXiv 2409.12191, section 2.1): a text token takes the next position in all three dimensions. The tokens of an
image, or of a piece of video, take ``start + (time, height, width)``, where the triple is their place in the grid. The token
after them takes the position ``start + max(height, width)``.

Letters: B rows, L tokens, N media, K media tokens of one kind.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from dataproto.errors import MediaMismatch

IMAGE, VIDEO, AUDIO = 1, 2, 3
"""Values of ``mm_token_type_ids``; 0 is text."""

TOKEN_TYPES = {"image": IMAGE, "video": VIDEO, "audio": AUDIO}
"""The kinds of media, in the order of their features, with the types of their tokens."""

_NAMES = {kind: name for name, kind in TOKEN_TYPES.items()}


@dataclass(frozen=True)
class Pieces:
    """Media of one kind in row order. Each is a contiguous run of placeholder tokens.

    ``sizes (N, 3)`` int64 are time, height and width in tokens (after spatial merging). ``intervals (N,)`` float are the
    distances in positions from one time step to the next.
    """

    sizes: Tensor
    intervals: Tensor

    @classmethod
    def of_grids(cls, grid_thw: Tensor, merge_size: int, intervals: Tensor | None = None) -> "Pieces":
        """Pieces of grids ``(N, 3)``, which count patches.

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
        """The same pieces on another device."""
        return Pieces(self.sizes.to(device), self.intervals.to(device))


def mrope_positions(token_types: Tensor, attention_mask: Tensor, images: Pieces, videos: Pieces) -> Tensor:
    """Positions ``(B, 4, L)`` int64: the rank among attended tokens, then time, height, width.

    ``images`` and ``videos`` list the media of all rows of ``token_types (B, L)`` in row order. Padding, anywhere in the row, has
    position 0 in all dimensions, as in Hugging Face. Raises `MediaMismatch` if placeholder tokens and media do not agree.

    >>> types = torch.tensor([[0, 1, 1, 1, 1, 1, 1, 0]])
    >>> image = Pieces.of_grids(torch.tensor([[1, 4, 6]]), merge_size=2)
    >>> mrope_positions(types, torch.ones(1, 8), image, Pieces.none())[0]
    tensor([[0, 1, 2, 3, 4, 5, 6, 7],
            [0, 1, 1, 1, 1, 1, 1, 4],
            [0, 1, 1, 1, 2, 2, 2, 4],
            [0, 1, 2, 3, 1, 2, 3, 4]])
    """
    attended = attention_mask.bool()
    types = torch.where(attended, token_types, 0)
    ranks = attended.cumsum(-1).sub_(1)
    if not (len(images.sizes) or len(videos.sizes) or types.any()):  # For text all four dimensions are equal.
        return ranks.masked_fill_(~attended, 0)[:, None].expand(-1, 4, -1).contiguous()
    # The distance to the next token; the first token of a medium has all of it.
    steps = (attended & (types == 0)).long()
    media = []
    for kind, pieces in ((IMAGE, images), (VIDEO, videos)):
        pieces = pieces.to(types.device)
        index, starts, counts = _assign(types, ranks, kind, pieces)
        some = counts > 0
        steps.view(-1)[index[starts[some]]] = pieces.sizes[some, 1:].amax(1)
        media.append((index, _offsets(pieces, starts, counts)))
    rows, length = types.shape
    following = steps.cumsum(-1)
    positions = ranks.new_empty(rows, 4, length)
    padding = ~attended
    positions[:, 0] = ranks.masked_fill_(padding, 0)
    positions[:, 1:] = (following - 1).masked_fill_(padding, 0)[:, None]
    for index, grid in media:
        end = following.view(-1)[index]
        place = index + index // length * 3 * length  # The index of the token's rank in the flat result.
        for offset in grid:
            positions.view(-1).index_copy_(0, place.add_(length), offset.add_(end))
    return positions


def text_positions(attention_mask: Tensor) -> Tensor:
    """One-dimensional positions ``(B, L)`` int64: the rank among attended tokens. Padding has 0.

    >>> text_positions(torch.tensor([[0, 1, 1, 1]]))
    tensor([[0, 0, 1, 2]])
    """
    attended = attention_mask.long()
    return (attended.cumsum(-1) - 1) * attended


def extend_positions(position_ids: Tensor, attention_mask: Tensor, length: int) -> Tensor:
    """Positions ``(B, 4, R)`` or ``(B, R)`` of ``length`` text tokens that follow each row's last attended token.

    ``position_ids`` are ``(B, 4, P)`` or ``(B, P)``, ``attention_mask`` is ``(B, P)``. A row without attended tokens starts at 0.
    Text continues after the larger of the last token's height and width. Time is ignored, because the duration of a video does
    not move the text after it.

    >>> prompt = torch.tensor([[[0, 0, 1, 2], [0, 0, 1, 1], [0, 0, 1, 1], [0, 0, 1, 2]]])
    >>> extend_positions(prompt, torch.tensor([[0, 1, 1, 1]]), 2)[0]
    tensor([[3, 4],
            [3, 4],
            [3, 4],
            [3, 4]])
    """
    places = torch.arange(1, attention_mask.shape[-1] + 1, device=attention_mask.device)
    last = (attention_mask.long() * places).amax(-1)  # (B,), from 1 on; 0 where nothing is attended
    rows = position_ids if position_ids.ndim == 3 else position_ids[:, None]
    index = (last - 1).clamp(min=0)[:, None, None].expand(-1, rows.shape[1], 1)
    final = torch.where((last > 0)[:, None, None], rows.gather(-1, index), -1)  # (B, 4 or 1, 1)
    if position_ids.ndim == 3:
        largest = final[:, 2:].amax(1, keepdim=True).expand(-1, 3, -1)
        final = torch.cat([final[:, :1], largest], 1)
    following = final + torch.arange(1, length + 1, device=position_ids.device)
    return following if position_ids.ndim == 3 else following[:, 0]


def _assign(types: Tensor, ranks: Tensor, kind: int, pieces: Pieces) -> tuple[Tensor, Tensor, Tensor]:
    """Flat indices ``(K,)`` of the tokens of a kind; for each medium the index of its first token among them, and the number of
    its tokens, both ``(N,)``.
    """
    name = _NAMES[kind]
    index = (types == kind).view(-1).nonzero().squeeze(-1)
    counts = pieces.sizes.prod(-1)
    starts = counts.cumsum(0) - counts
    if len(index) != int(counts.sum()):
        raise MediaMismatch(
            f"{len(index)} {name} placeholder tokens in the batch, but its {len(counts)} grids count {int(counts.sum())} "
            f"(placeholders in each row: {(types == kind).sum(-1).tolist()}, grids: {counts.tolist()})"
        )
    some = counts > 0
    first, last = index[starts[some]], index[(starts + counts - 1)[some]]
    # Ranks ascend within a row, so tokens are consecutive if the ranks of the first and the last say so.
    runs = ranks.view(-1)[last] - ranks.view(-1)[first] == counts[some] - 1
    if not bool((runs & (first // types.shape[-1] == last // types.shape[-1])).all()):
        raise MediaMismatch(_broken_run(types, ranks, index, kind, counts))
    return index, starts, counts


def _broken_run(types: Tensor, ranks: Tensor, index: Tensor, kind: int, counts: Tensor) -> str:
    """The error message that names the first medium whose run of placeholder tokens is broken."""
    name = _NAMES[kind]
    piece = torch.arange(len(counts), device=counts.device).repeat_interleave(counts)
    starts = (counts.cumsum(0) - counts)[piece]
    within = torch.arange(len(index), device=index.device) - starts
    rows, flat_ranks = index // types.shape[-1], ranks.view(-1)
    broken = (rows != rows[starts]) | (flat_ranks[index] - flat_ranks[index[starts]] != within)
    first = int(broken.nonzero()[0])
    row, medium = int(rows[first]), int(piece[first])
    return (
        f"row {row}: {name} {medium} of the batch needs a run of {int(counts[medium])} placeholder tokens, "
        f"which breaks after {int(within[first])} ({int((types[row] == kind).sum())} in the row)"
    )


def _offsets(pieces: Pieces, starts: Tensor, counts: Tensor) -> list[Tensor]:
    """Time, height and width ``(K,)`` of each token in its grid, minus the distance from the medium to the text after it.

    Computed once for all media of equal size and interval, such as those of samples of one prompt.
    """
    number, one_of = _distinct([*pieces.sizes.unbind(1), pieces.intervals])
    sizes, tokens = pieces.sizes[one_of], pieces.sizes[one_of].prod(-1)
    first = tokens.cumsum(0) - tokens
    within = torch.arange(int(tokens.sum()), device=number.device) - first.repeat_interleave(tokens)
    height, width, extent = (
        each.repeat_interleave(tokens) for each in (sizes[:, 1], sizes[:, 2], sizes[:, 1:].amax(1))
    )
    line = within // width
    step = line // height
    time = (step * pieces.intervals[one_of].repeat_interleave(tokens)).long()
    table = time - extent, line - step * height - extent, within - line * width - extent
    place = torch.arange(int(counts.sum()), device=number.device) + (first[number] - starts).repeat_interleave(counts)
    return [each.index_select(0, place) for each in table]


def _distinct(columns: list[Tensor]) -> tuple[Tensor, Tensor]:
    """A number ``(N,)`` for each row of the columns ``(N,)``, equal for equal rows, and for each number the index of such a row.

    `Tensor.unique` with a dimension compares rows in a loop, which is slow.

    >>> _distinct([torch.tensor([2, 1, 2]), torch.tensor([5.0, 5.0, 5.0])])[0]
    tensor([1, 0, 1])
    """
    number = columns[0].new_zeros(len(columns[0]), dtype=torch.int64)
    for column in columns:
        values, code = column.unique(return_inverse=True)
        number = (number * len(values) + code).unique(return_inverse=True)[1]  # The numbers stay small.
    one_of = number.new_empty(int(number.max()) + 1 if len(number) else 0)
    one_of[number] = torch.arange(len(number), device=number.device)
    return number, one_of

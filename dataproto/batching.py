"""Padded rows to packed sequences and back, and the cutting of batches: pure functions over tensors.

A packed sequence holds the attended tokens of all rows one after the other, ``(1, T)``; ``cu_seqlens`` says where rows begin.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dataproto.errors import InvalidColumn, InvalidConfig


@dataclass(frozen=True)
class PackedRows:
    """Rows without their padding, and where their response tokens stand.

    Shapes: T packed tokens, B rows, N response tokens that the loss can see.
    """

    input_ids: Tensor  # (1, T) int64
    position_ids: Tensor  # (4, 1, T) m-RoPE with text positions first, or (1, T)
    token_types: Tensor  # (1, T) int8: 0 text, 1 image, 2 video
    cu_seqlens: Tensor  # (B + 1,) int32
    max_length: int
    predictors: Tensor  # (N,) index into T of the token before each response token
    targets: Tensor  # (N,) the response tokens
    response_cells: Tensor  # (N,) index into the flattened (B, R) grid

    def to(self, device: torch.device | str) -> "PackedRows":
        return PackedRows(
            **{
                name: value.to(device, non_blocking=True) if isinstance(value, Tensor) else value
                for name, value in vars(self).items()
            }
        )


def pack_rows(
    input_ids: Tensor,
    attention_mask: Tensor,
    position_ids: Tensor,
    response_mask: Tensor,
    token_types: Tensor | None = None,
) -> PackedRows:
    """Drops padding and lays the rows out one after the other.

    Args:
        input_ids, attention_mask: ``(B, L)``.
        position_ids: ``(B, 4, L)`` or ``(B, L)``.
        response_mask: ``(B, R)``, 1 on tokens whose log-prob is wanted; the last R columns of ``input_ids``.
        token_types: ``(B, L)``, or ``None`` for text only.

    Raises:
        InvalidColumn: a row has no token, or a response token has no attended token before it; names the row.

    >>> ids = torch.tensor([[0, 5, 6, 7], [3, 4, 8, 0]])
    >>> mask = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 0]])
    >>> packed = pack_rows(ids, mask, mask.cumsum(1) - 1, torch.tensor([[1, 1], [1, 0]]))
    >>> packed.input_ids.tolist(), packed.cu_seqlens.tolist()
    ([[5, 6, 7, 3, 4, 8]], [0, 3, 6])
    >>> packed.targets.tolist(), packed.predictors.tolist(), packed.response_cells.tolist()
    ([6, 7, 8], [0, 1, 4], [0, 1, 2])
    """
    rows, length = input_ids.shape
    width = response_mask.shape[1]
    attended = attention_mask.bool()
    lengths = attended.sum(1)
    if rows and int(lengths.min()) == 0:
        raise InvalidColumn(f"row {int(lengths.argmin())} has no attended token: every row needs a prompt")

    flat = attended.flatten().nonzero().squeeze(1)
    packed_index = attended.flatten().cumsum(0) - 1  # (B * L,) position of each attended token in T
    cu_seqlens = torch.zeros(rows + 1, dtype=torch.int32, device=input_ids.device)
    cu_seqlens[1:] = lengths.cumsum(0)

    cells = response_mask.bool().flatten().nonzero().squeeze(1)
    row, column = cells // max(width, 1), cells % max(width, 1) + length - width
    predictors = packed_index[row * length + column] - 1
    misplaced = ~attended[row, column] | (predictors < cu_seqlens[:-1].long()[row])
    if bool(misplaced.any()):
        raise InvalidColumn(
            f"row {int(row[misplaced][0])}: response_mask is 1 on a token that is not attended to or has no token before it"
        )
    if position_ids.ndim == 3:
        positions = position_ids.transpose(0, 1).flatten(1)[:, flat].unsqueeze(1)
    else:
        positions = position_ids.flatten()[flat].unsqueeze(0)
    types = torch.zeros_like(flat, dtype=torch.int8) if token_types is None else token_types.flatten()[flat]
    return PackedRows(
        input_ids=input_ids.flatten()[flat].unsqueeze(0),
        position_ids=positions,
        token_types=types.unsqueeze(0),
        cu_seqlens=cu_seqlens,
        max_length=int(lengths.max()) if rows else 0,
        predictors=predictors,
        targets=input_ids[row, column],
        response_cells=cells,
    )


def unpack_cells(values: Tensor, cells: Tensor, shape: tuple[int, int]) -> Tensor:
    """Puts per-token values ``(N,)`` back into a ``(B, R)`` grid, zero elsewhere; gradients flow.

    >>> unpack_cells(torch.tensor([1.0, 2.0]), torch.tensor([0, 3]), (2, 2)).tolist()
    [[1.0, 0.0], [0.0, 2.0]]
    """
    return values.new_zeros(shape[0] * shape[1]).index_put((cells,), values).view(shape)


def split_by_tokens(lengths: Sequence[int] | np.ndarray | Tensor, budget: int) -> list[slice]:
    """Cuts rows, in order, into the fewest contiguous parts of at most ``budget`` tokens that a greedy pass finds.

    Keeping the order keeps the samples of one prompt together, so their image is encoded once. A row longer than the budget
    stands alone.

    >>> split_by_tokens([3, 3, 3, 9, 1], budget=6)
    [slice(0, 2, None), slice(2, 3, None), slice(3, 4, None), slice(4, 5, None)]
    """
    if budget < 1:
        raise InvalidConfig(f"token budget {budget}: must be at least 1")
    ends = np.cumsum(np.asarray(lengths, dtype=np.int64))
    parts: list[slice] = []
    start, used = 0, 0
    while start < len(ends):
        stop = max(int(np.searchsorted(ends, used + budget, side="right")), start + 1)
        parts.append(slice(start, stop))
        start, used = stop, int(ends[stop - 1])
    return parts


def cut_minibatches(groups: Sequence[object] | np.ndarray, prompts: int) -> list[np.ndarray]:
    """Row indices of mini-batches that hold ``prompts`` prompts each, all samples of a prompt together, in order of appearance.

    The last one may be smaller.

    >>> [part.tolist() for part in cut_minibatches(["a", "a", "b", "c", "b"], prompts=2)]
    [[0, 1, 2, 4], [3]]
    """
    if prompts < 1:
        raise InvalidConfig(f"a mini-batch of {prompts} prompts: must be at least 1")
    order: dict[object, int] = {}
    numbers = np.array([order.setdefault(group, len(order)) for group in groups], dtype=np.int64) // prompts
    return [np.flatnonzero(numbers == part) for part in range(int(numbers.max(initial=-1)) + 1)]

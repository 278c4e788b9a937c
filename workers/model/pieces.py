"""Which token each packed token comes after, and the pieces of the packed sequence that a recurrence runs over.

Attention of a row that shares its prompt reads the keys of the row whose prompt it is (`dataproto.packing.PackedRows`). A
recurrence has one state instead of keys, so the row continues from the state after that prompt. For this the sequence is cut into
pieces: at each row's start, and where other rows branch off. A piece starts from the final state of another piece, or from zero.
All of this is computed on the host, and then moved to the device of the tokens.

Letters: T packed tokens, S segments, K keys, P pieces.
"""

from collections.abc import MutableMapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from dataproto.errors import UnsupportedAttention
from dataproto.transfer import move, on_host


def previous_tokens(cu_seqlens: Tensor, key_cu_seqlens: Tensor, key_index: Tensor | None) -> Tensor:
    """The token ``(T,)`` int64 that each packed token follows, -1 for the first token of a row.

    Args:
        cu_seqlens: ``(S + 1,)`` boundaries of segments among tokens; key_cu_seqlens among keys.
        key_index: ``(K,)`` tokens that are keys, ``None`` if each segment has its own; see `PackedRows`.

    >>> bounds = torch.tensor([0, 4, 6])  # row 0: a prompt of 3 tokens and 1 more; row 1: 2 more tokens after that prompt
    >>> previous_tokens(bounds, torch.tensor([0, 4, 9]), torch.tensor([0, 1, 2, 3, 0, 1, 2, 4, 5])).tolist()
    [-1, 0, 1, 2, 2, 4]
    """
    cu, key_cu = cu_seqlens.long(), key_cu_seqlens.long()
    previous = torch.arange(-1, int(cu[-1]) - 1, device=cu.device)
    counts = cu[1:] - cu[:-1]
    starts, shared = cu[:-1], (key_cu[1:] - key_cu[:-1]) - counts
    before = torch.full_like(starts, -1)
    if key_index is not None:
        last = (key_cu[:-1] + shared - 1).clamp_min(0)
        before = torch.where(shared > 0, key_index[last].long(), before)
    filled = counts > 0
    previous[starts[filled]] = before[filled]
    return previous


@dataclass(frozen=True, eq=False)
class Level:
    """Pieces that run at the same time, since all of them start from states that are known by then.

    Their tokens are ``tokens (n,)``, piece after piece.
    """

    tokens: Tensor
    lengths: list[int]
    starts: Tensor | None
    """For each piece the piece whose final state it starts from: its place among all pieces of earlier levels. ``None`` for the
    first level, which starts from zero.
    """

    @cached_property
    def bounds(self) -> Tensor:
        """``(P + 1,)`` int64 boundaries of the pieces among the tokens, on the host.

        These tensors are the same ones for all layers, so that the kernels, which remember what they have computed of a tensor,
        wait for the device once in a forward pass and not in each layer.
        """
        return torch.tensor([0, *self.lengths]).cumsum(0)

    @cached_property
    def bounds_on_device(self) -> Tensor:
        """`bounds` on the device of the tokens."""
        return move(self.bounds, self.tokens.device)


class Pieces:
    """The pieces of a packed sequence. Made once for all layers, and for what a backward pass computes again."""

    def __init__(self, previous: Tensor, device: torch.device | str = "cpu") -> None:
        """``previous``: see `previous_tokens`, on the host; the tokens of the sequence lie on ``device``."""
        self.previous, self.device = previous, device
        self._taps: dict[int, tuple[Tensor, Tensor]] = {}

    @classmethod
    def of(cls, cu_seqlens: Tensor, key_cu_seqlens: Tensor | None, key_index: Tensor | None) -> "Pieces":
        """The pieces of segments with these boundaries and keys; the arguments of attention in the same forward pass.

        They are kept as long as the boundaries: a pipeline runs other micro-batches between a forward pass and its backward pass.
        """
        version, pieces = cls._made.get(cu_seqlens, (None, None))
        if pieces is None or version != cu_seqlens._version:
            bounds = on_host(cu_seqlens)
            keys = bounds if key_cu_seqlens is None else on_host(key_cu_seqlens)
            previous = previous_tokens(bounds, keys, None if key_index is None else on_host(key_index))
            pieces = cls(previous, cu_seqlens.device)
            cls._made[cu_seqlens] = cu_seqlens._version, pieces
        return pieces

    _made: "MutableMapping[Tensor, tuple[int, Pieces]]" = WeakTensorKeyDictionary()

    def taps(self, count: int) -> tuple[Tensor, Tensor]:
        """What a convolution over ``count`` tokens reads where a row does not lie in one piece.

        Returns:
            Tokens ``(m,)`` that do not simply read the places before them, because their row starts there or continues from
            another place; and for each of them the ``count`` tokens ``(m, count)`` that it reads, itself last, and -1 for none.
        """
        total = len(self.previous)
        if count not in self._taps:
            places = torch.arange(total)
            steps = [places]
            for _ in range(count - 1):
                steps.append(torch.where(steps[-1] < 0, -1, self.previous[steps[-1].clamp_min(0)]))
            read = torch.stack(steps[::-1], dim=1)
            plain = places[:, None] + torch.arange(1 - count, 1)
            chosen = (read != plain.clamp_min(-1)).any(1).nonzero().squeeze(1)
            self._taps[count] = move(chosen, self.device), move(read[chosen], self.device)
        return self._taps[count]

    @cached_property
    def levels(self) -> list[Level]:
        """The pieces, level by level."""
        previous = self.previous
        total = len(previous)
        places = torch.arange(total)
        jumps = (previous != places - 1).nonzero().squeeze(1)  # where a piece begins because its row does
        sources = previous[jumps]
        ends = sources[sources >= 0] + 1  # where a piece begins because rows branch off before
        begins = torch.cat([torch.zeros(1, dtype=torch.int64), jumps, ends[ends < total]]).unique()
        finishes = torch.cat([begins[1:], torch.tensor([total])])
        before = previous[begins]
        parents = torch.where(before < 0, -1, torch.searchsorted(begins, before, right=True) - 1)
        if total == 0:
            return []
        depth = self._depths(parents.tolist())
        order = sorted(range(len(begins)), key=depth.__getitem__)
        rank = {piece: place for place, piece in enumerate(order)}
        found = []
        for level in range(max(depth) + 1):
            mine = [piece for piece in order if depth[piece] == level]
            tokens = torch.cat([torch.arange(int(begins[piece]), int(finishes[piece])) for piece in mine])
            starts = torch.tensor([rank[int(parents[piece])] for piece in mine]) if level else None
            lengths = [int(finishes[piece] - begins[piece]) for piece in mine]
            starts = None if starts is None else move(starts, self.device)
            found.append(Level(move(tokens, self.device), lengths, starts))
        return found

    @staticmethod
    def _depths(parents: list[int]) -> list[int]:
        depth: list[int] = []
        for piece, parent in enumerate(parents):
            if parent >= piece:
                raise UnsupportedAttention(
                    f"piece {piece} of a packed sequence continues from piece {parent}, which comes after it: rows that share a "
                    "prompt follow the row that holds it"
                )
            depth.append(0 if parent < 0 else depth[parent] + 1)
        return depth

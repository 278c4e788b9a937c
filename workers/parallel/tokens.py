"""The tokens that each rank of sp x tp computes, out of rows that are the same on all of them.

The sequence is cut into equal slices over sp, and a slice into equal parts over tp; inert tokens at the end make it long enough.
A rank embeds its slice, and computes the projections of attention and the MLPs for all of it. Between those, it computes the
residual stream, norms, deep vision features, routers and whole experts for its part only. After the decoder the parts of a slice
are joined. Along sp, states that predict response tokens are then shared evenly before the head, whose work would otherwise fall
to the ranks that hold the responses: a rank sends those that others get, and receives its share. So no rank ever holds states of
more tokens than its slice has. Every rank returns the log-probs of all response tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from dataproto.packing import PackedRows, fill_up
from dataproto.transfer import move, on_host
from dataproto.vlm import MediaSpans
from workers.model.packed_model import PackedVLM, TokenShare, select_rows
from workers.parallel.transform import Transform
from workers.ranks.autograd_collectives import Peers, exchange_rows, gather_shared


class TokenSplit(Transform):
    """The tokens of a packed sequence, split over sp x tp."""

    axes = ("sp", "tp")

    def apply(self, module: PackedVLM) -> None:
        """Gives ``module`` a `SplitTokens`."""
        groups = self.ranks.group("sp"), self.ranks.group("tp")
        module.tokens = SplitTokens(*(None if group is None else Peers.of(group) for group in groups))


@dataclass(frozen=True)
class StateShare:
    """How the states that predict N response tokens are shared along sp: ``count`` for each rank, fewer for the last ones."""

    sent: Tensor  # (m,) index into this rank's states, those for rank 0 first
    sent_counts: list[int]
    received_counts: list[int]
    mine: Tensor  # (n,) the response tokens whose states this rank gets, in the order in which they arrive
    places: Tensor  # (N,) where each response token is among those of rank 0, rank 1, ..., filled up to ``count`` each
    count: int

    @classmethod
    def of(cls, predictors: Tensor, length: int, size: int, rank: int) -> "StateShare":
        """The share of a rank, where ranks have ``length`` states each.

        Args:
            predictors: ``(N,)`` on the host, see `PackedRows`.

        >>> share = StateShare.of(torch.tensor([5, 1, 2, 5]), length=3, size=2, rank=0)
        >>> share.sent.tolist(), share.sent_counts, share.received_counts, share.mine.tolist(), share.places.tolist()
        ([1, 2], [1, 1], [1, 1], [1, 0], [1, 0, 2, 3])
        """
        tokens = torch.arange(len(predictors))
        count = max(-(-len(predictors) // size), 1)
        holder, receiver = predictors // length, tokens // count
        order = torch.argsort(receiver * size + holder, stable=True)  # of arrival, receiver by receiver
        sent, mine = holder == rank, order[rank * count : (rank + 1) * count]
        sent_counts, received_counts = (
            torch.bincount(ranks, minlength=size).tolist() for ranks in (receiver[sent], holder[mine])
        )
        places = torch.empty_like(order).index_copy_(0, order, tokens)
        return cls(predictors[sent] - rank * length, sent_counts, received_counts, mine, places, count)


@dataclass(frozen=True)
class SlicedRows(PackedRows):
    """Rows with this rank's slice of tokens."""

    share: StateShare | None = None  # None without sp


@dataclass(frozen=True)
class SplitTokens(TokenShare):
    """This rank's slice of a packed sequence, and its part of the slice."""

    sp: Peers | None
    tp: Peers | None

    def rows(self, rows: PackedRows, spans: MediaSpans) -> tuple[SlicedRows, Sequence[MediaSpans]]:
        """The rows with this rank's slice of ``input_ids`` and ``position_ids``, and the media spans in the part of each rank.

        ``spans`` lie on the host.
        """
        (sp, sp_size), (tp, tp_size) = self._place(self.sp), self._place(self.tp)
        part = self.num_states(rows.input_ids.shape[-1])
        length = part * tp_size
        start = length * sp
        whole = fill_up(rows, self.filled(rows.input_ids.shape[-1]))
        first = start + part * tp
        experts, routed = whole.routed_experts, whole.routed
        share = None if self.sp is None else StateShare.of(on_host(rows.predictors), length, sp_size, sp)
        sliced = {
            "input_ids": whole.input_ids[..., start : start + length],
            "position_ids": whole.position_ids[..., start : start + length],
            "routed_experts": None if experts is None else experts[first : first + part],
            "routed": None if routed is None else routed[first : first + part],
        }
        windows = [spans.window(part * rank, part * (rank + 1)) for rank in range(sp_size * tp_size)]
        return SlicedRows(**vars(whole) | sliced, share=share), windows

    def num_states(self, tokens: int) -> int:
        return -(-tokens // (self._place(self.sp)[1] * self._place(self.tp)[1]))

    def filled(self, tokens: int) -> int:
        return self.num_states(tokens) * self._place(self.sp)[1] * self._place(self.tp)[1]

    def attention(self) -> dict[str, Any]:
        return {} if self.sp is None else {"peers": self.sp}

    def states(self, hidden: Tensor, rows: PackedRows) -> tuple[Tensor, Tensor]:
        """Out of this rank's part ``(S, H)``, an equal share ``(n, H)`` along sp of the predicting states, wherever they were
        computed, and their targets ``(n,)``; the same along tp.
        """
        if self.tp is not None:
            hidden = gather_shared(hidden, self.tp)
        if self.sp is None or not isinstance(rows, SlicedRows) or rows.share is None:
            return super().states(hidden, rows)
        share = rows.share
        sent = select_rows(hidden, move(share.sent, hidden.device))
        states = exchange_rows(sent, share.sent_counts, share.received_counts, self.sp)
        targets = rows.targets.index_select(0, move(share.mine, rows.targets.device))
        missing = share.count - len(targets)  # of the last ranks: all join equally many values
        return (pad(states, (0, 0, 0, missing)), pad(targets, (0, missing))) if missing else (states, targets)

    def join(self, values: Tensor, rows: PackedRows) -> Tensor:
        if self.sp is None or not isinstance(rows, SlicedRows) or rows.share is None:
            return values
        return gather_shared(values, self.sp).index_select(0, move(rows.share.places, values.device))

    @staticmethod
    def _place(peers: Peers | None) -> tuple[int, int]:
        """This rank's number among ``peers``, and theirs."""
        return (0, 1) if peers is None else (peers.rank, peers.size)

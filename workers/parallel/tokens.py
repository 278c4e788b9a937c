"""The tokens that each rank of sp x tp computes, out of rows that are the same on all of them.

The sequence is cut into equal slices over sp, and a slice into equal parts over tp; inert tokens at the end make it long enough.
A rank embeds its slice, and computes the projections of attention and the MLPs for all of it. Between those, it computes the
residual stream, norms, deep vision features, routers and whole experts for its part alone. After the decoder the parts are
joined. Along sp, states that predict response tokens are then shared evenly before the head, whose work would otherwise fall to
the ranks that hold the responses. Every rank returns the log-probs of all response tokens.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from dataproto.packing import PackedRows, fill_up
from dataproto.vlm import MediaSpans
from workers.model.model_config import ModelConfig
from workers.model.packed_model import PackedVLM, TokenShare, select_rows
from workers.parallel.transform import Transform
from workers.ranks.autograd_collectives import Peers, gather_shared, sum_and_split
from workers.ranks.mesh import Ranks


class TokenSplit(Transform):
    """The tokens of a packed sequence, split over sp x tp."""

    @classmethod
    def is_due(cls, ranks: Ranks, options: ModelConfig) -> bool:
        return ranks.size("sp", "tp") > 1

    def apply(self, module: PackedVLM) -> None:
        """Gives ``module`` a `SplitTokens`."""
        groups = self.ranks.group("sp"), self.ranks.group("tp")
        module.tokens = SplitTokens(*(None if group is None else Peers.of(group) for group in groups))


@dataclass(frozen=True)
class SplitTokens(TokenShare):
    """This rank's slice of a packed sequence, and its part of the slice."""

    sp: Peers | None
    tp: Peers | None

    def rows(self, rows: PackedRows, spans: MediaSpans) -> tuple[PackedRows, MediaSpans]:
        """The rows with this rank's slice of ``input_ids`` and ``position_ids``, and the media in its part of the slice.

        ``spans`` are read on the host.
        """
        part = self.num_states(rows.input_ids.shape[-1])
        length = part * self._size(self.tp)
        start = length * (0 if self.sp is None else self.sp.rank)
        whole = fill_up(rows, length * self._size(self.sp))
        first = start + part * (0 if self.tp is None else self.tp.rank)
        experts, routed = whole.routed_experts, whole.routed
        mine = replace(
            whole,
            input_ids=whole.input_ids[..., start : start + length],
            position_ids=whole.position_ids[..., start : start + length],
            routed_experts=None if experts is None else experts[first : first + part],
            routed=None if routed is None else routed[first : first + part],
        )
        return mine, spans.window(first, first + part).to(mine.input_ids.device)

    def num_states(self, tokens: int) -> int:
        return -(-tokens // (self._size(self.sp) * self._size(self.tp)))

    def attention(self) -> dict[str, Any]:
        return {} if self.sp is None else {"peers": self.sp}

    def states(self, hidden: Tensor, rows: PackedRows) -> tuple[Tensor, Tensor]:
        """Out of this rank's part ``(S, H)``, an equal share ``(n, H)`` along sp of the predicting states, wherever they were
        computed, and their targets ``(n,)``; the same along tp.
        """
        if self.tp is not None:
            hidden = gather_shared(hidden, self.tp)
        if self.sp is None:
            return super().states(hidden, rows)
        count = max(-(-len(rows.targets) // self.sp.size), 1)
        owner = torch.div(rows.predictors, len(hidden), rounding_mode="floor")
        mine = (owner == self.sp.rank)[:, None]
        states = torch.where(
            mine, select_rows(hidden, rows.predictors % len(hidden)), 0.0
        )  # 0 where another rank has it
        missing = count * self.sp.size - len(states)
        states = sum_and_split(pad(states, (0, 0, 0, missing)), self.sp)
        return states, pad(rows.targets, (0, missing)).chunk(self.sp.size)[self.sp.rank]

    def join(self, values: Tensor, rows: PackedRows) -> Tensor:
        if self.sp is None:
            return values
        return gather_shared(values, self.sp)[: len(rows.targets)].clone()  # FSDP wants no view from its root

    @staticmethod
    def _size(peers: Peers | None) -> int:
        return 1 if peers is None else peers.size

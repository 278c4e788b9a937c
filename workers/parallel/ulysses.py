"""Ulysses sequence parallelism (arXiv:2309.14509) for packed rows: every rank computes a slice of the tokens, and in attention
all tokens for a part of the heads.

All ranks of the group get the same rows. Each embeds and decodes its slice, at the slice's own m-RoPE positions. Around
attention an all-to-all turns "my tokens, all heads" into "all tokens, my heads" and back, so segments, shared prompts and
kernels are those of one process. The states that predict response tokens are dealt out evenly before the head, whose work
would otherwise fall to whoever holds the responses; every rank returns the log-probs of all.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import AttentionInterface

from dataproto.batching import PackedRows
from dataproto.vlm import MediaSpans
from workers.attention import packed_attention
from workers.engine_config import EngineConfig
from workers.mesh import Ranks
from workers.packed import PackedVLM, TokenShare
from workers.parallel.collectives import Peers, exchange, gather_shared, sum_and_split
from workers.parallel.heads import check_heads, key_value_repeats

ULYSSES_ATTENTION = "ulysses_packed_flash"


def apply(module: PackedVLM, ranks: Ranks, options: EngineConfig) -> None:
    """Splits the tokens of ``module`` over sp, in place.

    Raises:
        InvalidConfig: sp x tp does not divide the query heads.
    """
    group = ranks.group("sp")
    if group is None:
        return
    check_heads(module.model.config.text_config.num_attention_heads, ranks.size("sp"), ranks.size("tp"))
    AttentionInterface.register(ULYSSES_ATTENTION, ulysses_attention)
    decoder = module.model.get_submodule(module.family.language_model)
    for part in decoder.modules():
        config = getattr(part, "config", None)
        if config is not None and hasattr(config, "_attn_implementation"):
            config._attn_implementation_internal = ULYSSES_ATTENTION
    module.tokens = TokenSlice(Peers.of(group))


@dataclass(frozen=True)
class TokenSlice(TokenShare):
    """This rank's slice of a packed sequence: ``ceil(T / size)`` tokens, the last slices filled up with padding."""

    peers: Peers

    def rows(self, rows: PackedRows, spans: MediaSpans) -> tuple[PackedRows, MediaSpans]:
        length = self._length(rows)
        start = self.peers.rank * length
        mine = replace(
            rows,
            input_ids=_slice(rows.input_ids, start, length),
            position_ids=_slice(rows.position_ids, start, length),
        )
        return mine, spans.window(start, start + length)

    def attention(self, rows: PackedRows) -> dict[str, Any]:
        return {"peers": self.peers, "tokens": rows.input_ids.shape[-1]}

    def states(self, hidden: Tensor, rows: PackedRows) -> tuple[Tensor, Tensor]:
        """An equal part ``(n, H)`` of the predicting states, wherever they were computed, and their targets ``(n,)``."""
        length, count = self._length(rows), self._count(rows)
        owner = torch.div(rows.predictors, length, rounding_mode="floor")
        mine = (owner == self.peers.rank)[:, None]
        states = torch.where(mine, hidden[rows.predictors % length], 0.0)  # 0 where another rank has it
        states = sum_and_split(pad(states, (0, 0, 0, count * self.peers.size - len(states))), self.peers)
        return states, _slice(rows.targets, self.peers.rank * count, count)

    def join(self, values: Tensor, rows: PackedRows) -> Tensor:
        return gather_shared(values, self.peers)[: len(rows.targets)].clone()  # FSDP wants no view from its root

    def _length(self, rows: PackedRows) -> int:
        return -(-rows.input_ids.shape[-1] // self.peers.size)

    def _count(self, rows: PackedRows) -> int:
        return max(-(-len(rows.targets) // self.peers.size), 1)


def ulysses_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    peers: Peers,
    tokens: int,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """`packed_attention` over the whole sequence, for this rank's part of the heads.

    Args:
        query: ``(1, H, S, D)`` of this rank's slice; key and value ``(1, H_kv, S, D)``.
        tokens: T, of the whole sequence; the last ``size * S - T`` tokens are padding, which attends to nothing.

    Returns:
        ``(1, S, H, D)`` and ``None``.
    """
    device = query.device.type
    if torch.is_autocast_enabled(device):  # half the traffic, and one dtype: some families norm queries in float32
        dtype = torch.get_autocast_dtype(device)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    heads, length = query.shape[1], query.shape[2]
    repeats = key_value_repeats(heads, key.shape[1], peers.size)
    if repeats > 1:
        key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    shares = [heads // peers.size, *[key.shape[1] // peers.size] * 2]
    parts = [
        x[0].unflatten(0, (peers.size, share)) for x, share in zip((query, key, value), shares, strict=True)
    ]  # (size, h, S, D)
    sent = torch.cat(parts, dim=1).transpose(1, 2)  # (size, S, h_q + 2 h_kv, D), one message for all three
    whole = exchange(sent, peers).flatten(0, 1)[:tokens].transpose(0, 1)[None]  # (1, h_q + 2 h_kv, T, D)
    query, key, value = whole.split(shares, dim=1)
    out, _ = packed_attention(module, query, key, value, attention_mask, **kwargs)  # (1, T, h_q, D)
    out = pad(out[0], (0, 0, 0, 0, 0, peers.size * length - tokens)).unflatten(0, (peers.size, length))
    return exchange(out, peers).transpose(0, 1).flatten(1, 2)[None], None


def _slice(x: Tensor, start: int, length: int) -> Tensor:
    """``length`` entries of the last dimension from ``start``, zeros where there are no more."""
    part = x[..., start : start + length]
    return pad(part, (0, length - part.shape[-1]))

"""The mixer of Qwen3.5's recurrent layers, Gated DeltaNet (arXiv:2412.06464), over packed rows and a part of the heads.

Projections and the gated norm are computed token by token, by the model's own modules. Convolution and recurrence run along the
rows of the packed sequence (`workers.model.delta_rule`), where each head is on its own: so ranks share them by heads,
as they share attention. Under Ulysses an all-to-all turns "my tokens, all heads" into "all tokens, my heads" and back; no state
travels between ranks.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu, softplus
from transformers import Cache

from dataproto.errors import UnsupportedAttention
from dataproto.vlm import VLMFamily
from workers.model.delta_rule import delta_rule_along_rows, packed_convolution
from workers.model.patches import replace_forward, set_on_module
from workers.model.pieces import Pieces
from workers.ranks.autograd_collectives import Peers, exchange


@dataclass(frozen=True)
class HeadShare:
    """This rank's part of a mixer's heads: part number ``rank`` of ``size``."""

    rank: int = 0
    size: int = 1

    def inside(self, other: "HeadShare") -> "HeadShare":
        """This part of another part."""
        return HeadShare(other.rank * self.size + self.rank, other.size * self.size)

    def of(self, count: int) -> range:
        """Its places among ``count``."""
        share = count // self.size
        return range(self.rank * share, (self.rank + 1) * share)


def packed_gated_delta_net(
    mixer: Any,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    key_index: Tensor | None = None,
    peers: Peers | None = None,
    taps: tuple[Tensor, Tensor] | None = None,
    **others: Any,
) -> Tensor:
    """The forward of a ``Qwen3_5GatedDeltaNet`` over packed rows: mixed states ``(1, S, H)`` of ``hidden_states (1, S, H)``.

    Args:
        mixer: its ``head_share`` says which heads its projections compute.
        cu_seq_lens_q, cu_seq_lens_k, key_index: as in `workers.model.attention.packed_attention`.
        peers: ranks that have the other tokens of the sequence.
        taps: `Pieces.taps` of these boundaries; by default they are computed here, which ``torch.compile`` cannot follow.

    Raises:
        UnsupportedAttention: there is a mask or a cache, or the boundaries are missing.
    """
    cached = any(isinstance(each, Cache) for each in others.values())  # its name depends on the version of transformers
    if cached or attention_mask is not None or cu_seq_lens_q is None:
        raise UnsupportedAttention(
            "packed recurrent layers need cu_seq_lens_q and take no mask or cache; for padded batches load a separate model"
        )
    parts = [projection(hidden_states)[0] for projection in (mixer.in_proj_qkv, mixer.in_proj_b, mixer.in_proj_a)]
    gate = mixer.in_proj_z(hidden_states)[0]
    share: HeadShare = mixer.head_share
    if peers is not None:
        parts = _all_tokens(mixer, parts, peers)
        share = HeadShare(peers.rank, peers.size).inside(share)
    out = _mix(mixer, parts, share, cu_seq_lens_q, cu_seq_lens_k, key_index, taps)  # (T, h, E)
    if peers is not None:
        out = exchange(out.unflatten(0, (peers.size, -1)), peers).transpose(0, 1).flatten(1, 2)  # (S, heads, E)
    normed = gated_norm(out, gate.view(out.shape), mixer.norm.weight, mixer.layer_norm_epsilon)
    mixed: Tensor = mixer.out_proj(normed.view(1, len(gate), -1))
    return mixed


def _all_tokens(mixer: Any, parts: list[Tensor], peers: Peers) -> list[Tensor]:
    """From this rank's tokens ``(S, .)`` of all channels to all tokens ``(T, .)`` of this rank's part, by one message."""
    qkv, rate, step = parts
    keys = mixer.key_dim // mixer.head_share.size
    split = [*qkv.split([keys, keys, qkv.shape[1] - 2 * keys], dim=1), rate, step]
    by_rank = [x.unflatten(1, (peers.size, -1)) for x in split]  # (S, ranks, .)
    widths = [x.shape[-1] for x in by_rank]
    sent = torch.cat(by_rank, dim=-1).transpose(0, 1).contiguous()
    received = exchange(sent, peers).flatten(0, 1)
    *qkv_parts, rate, step = received.split(widths, dim=1)
    return [torch.cat(qkv_parts, dim=1), rate, step]


def _mix(
    mixer: Any,
    parts: list[Tensor],
    share: HeadShare,
    cu_seqlens: Tensor,
    key_cu_seqlens: Tensor | None,
    key_index: Tensor | None,
    taps: tuple[Tensor, Tensor] | None,
) -> Tensor:
    """Values ``(T, h, E)`` that the heads of ``share`` read, from their projections ``(T, .)``."""
    qkv, rate, step = parts
    weight = channels(mixer, mixer.conv1d.weight.squeeze(1), share)
    if taps is None:
        taps = Pieces.of(cu_seqlens, key_cu_seqlens, key_index).taps(weight.shape[1])
    mixed = silu(packed_convolution(qkv, weight, *taps))
    keys, values = share.of(mixer.num_k_heads), share.of(mixer.num_v_heads)
    width = len(keys) * mixer.head_k_dim
    query, key, value = mixed.split([width, width, len(values) * mixer.head_v_dim], dim=1)
    query, key = (x.unflatten(1, (len(keys), -1)) for x in (query, key))
    value = value.unflatten(1, (len(values), -1))
    here = slice(values.start, values.stop)
    decay = -mixer.A_log[here].float().exp() * softplus(step.float() + mixer.dt_bias[here].float())
    bounds = cu_seqlens, key_cu_seqlens, key_index
    return delta_rule_along_rows(query, key, value, decay, rate.float().sigmoid(), *bounds)


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """``x (T, h, E)`` normalized over its last dimension, in float32, times ``weight (E,)`` and silu of ``gate (T, h, E)``."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    return (weight * normed.to(x.dtype) * silu(gate.float())).to(x.dtype)


def channels(mixer: Any, weight: Tensor, share: HeadShare) -> Tensor:
    """The rows of ``weight (C, .)``, one for each channel of queries, keys and values, that belong to a part of the heads."""
    if share.size == 1:
        return weight
    keys, values = share.of(mixer.num_k_heads), share.of(mixer.num_v_heads)
    parts = [
        weight.narrow(0, begin + heads.start * size, len(heads) * size)
        for begin, heads, size in (
            (0, keys, mixer.head_k_dim),
            (mixer.key_dim, keys, mixer.head_k_dim),
            (2 * mixer.key_dim, values, mixer.head_v_dim),
        )
    ]
    return torch.cat(parts)


def use_packed_recurrence(model: nn.Module, family: VLMFamily) -> None:
    """Makes the recurrent layers of ``model``, if its family has some, run over packed rows.

    The forward is a method of each layer, not an object of its own: so one compiled code serves all layers.
    """
    for mixer in recurrent_mixers(model, family).values():
        set_on_module(mixer, "head_share", HeadShare())
        replace_forward(mixer, MethodType(packed_gated_delta_net, mixer))


def recurrent_mixers(model: nn.Module, family: VLMFamily) -> Mapping[str, Any]:
    """The modules of ``model`` that `VLMFamily.recurrent_mixers` names, by path."""
    pattern = family.recurrent_mixers
    if pattern is None:
        return {}
    return {name: module for name, module in model.named_modules() if fnmatchcase(name, pattern)}

"""Ulysses sequence parallelism (arXiv:2309.14509) for packed rows: every rank computes a slice of the tokens, and in attention
all tokens for a part of the heads.

All ranks of the group get the same rows. Each embeds and decodes its slice (`workers.parallel.tokens`), at the slice's own
m-RoPE positions. Around attention an all-to-all turns "my tokens, all heads" into "all tokens, my heads" and back, so segments,
shared prompts and kernels are those of one process.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from workers.model.attention import FLASH_KERNELS, packed_attention, set_attention
from workers.model.model_config import ModelConfig
from workers.model.packed_model import PackedVLM
from workers.parallel.autograd_collectives import Peers, exchange
from workers.parallel.heads import check_heads, key_value_repeats
from workers.ranks.mesh import Ranks


def apply(module: PackedVLM, ranks: Ranks, options: ModelConfig) -> None:
    """Splits the heads in attention of ``module`` over sp, in place.

    Raises:
        InvalidConfig: sp x tp does not divide the query heads.
    """
    group = ranks.group("sp")
    if group is None:
        return
    check_heads(module.model.config.text_config.num_attention_heads, ranks.size("sp"), ranks.size("tp"))
    name = f"ulysses_packed_flash_{options.flash_attention}"
    decoder = module.model.get_submodule(module.family.language_model)
    set_attention(decoder, name, partial(ulysses_attention, flash=FLASH_KERNELS[options.flash_attention]))


def ulysses_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    peers: Peers,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """`packed_attention` over the whole sequence of T tokens, for this rank's part of the heads.

    Args:
        query: ``(1, H, S, D)`` of this rank's slice, S = T / size; key and value ``(1, H_kv, S, D)``.

    Returns:
        ``(1, S, H, D)`` and ``None``.
    """
    device = query.device.type
    if torch.is_autocast_enabled(device):  # half the traffic, and one dtype: some families norm queries in float32
        dtype = torch.get_autocast_dtype(device)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    heads = query.shape[1]
    repeats = key_value_repeats(heads, key.shape[1], peers.size)
    if repeats > 1:
        key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    shares = [heads // peers.size, *[key.shape[1] // peers.size] * 2]
    parts = [
        x[0].unflatten(0, (peers.size, share)) for x, share in zip((query, key, value), shares, strict=True)
    ]  # (size, h, S, D)
    sent = torch.cat(parts, dim=1).transpose(1, 2)  # (size, S, h_q + 2 h_kv, D), one message for all three
    whole = exchange(sent, peers).flatten(0, 1).transpose(0, 1)[None]  # (1, h_q + 2 h_kv, T, D)
    query, key, value = whole.split(shares, dim=1)
    out, _ = packed_attention(module, query, key, value, attention_mask, **kwargs)  # (1, T, h_q, D)
    return exchange(out[0].unflatten(0, (peers.size, -1)), peers).transpose(0, 1).flatten(1, 2)[None], None

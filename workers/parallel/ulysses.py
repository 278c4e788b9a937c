"""Ulysses sequence parallelism (arXiv:2309.14509) for packed rows: every rank computes a slice of the tokens, and in attention
all tokens for a part of the heads.

All ranks of the group get the same rows. Each embeds and decodes its slice (`workers.parallel.tokens`), at the slice's m-RoPE
positions. Around attention an all-to-all turns "my tokens, all heads" into "all tokens, my heads" and back, so segments, shared
prompts and kernels are the same as in one process. Heads are shared by sp x tp, so tensor parallelism uses these functions too.
"""

from collections.abc import Sequence
from functools import partial
from math import gcd
from typing import Any

import torch
from torch import Tensor, nn

from dataproto.errors import InvalidConfig
from workers.model.attention import FLASH_KERNELS, packed_attention, set_attention
from workers.model.packed_model import PackedVLM
from workers.model.precision import in_autocast_dtype
from workers.parallel.transform import Transform
from workers.ranks.autograd_collectives import Peers, exchange


class UlyssesParallel(Transform):
    """The heads of attention, split over sp."""

    axes = ("sp",)

    def apply(self, module: PackedVLM) -> None:
        """Makes the language model attend through `ulysses_attention`.

        Raises:
            InvalidConfig: sp x tp does not divide the query heads.
        """
        text, flash = module.model.config.get_text_config(), self.options.flash_attention
        check_heads(text, module.family.recurrent_mixers is not None, self.ranks.size("sp"), self.ranks.size("tp"))
        decoder = module.model.get_submodule(module.family.language_model)
        set_attention(decoder, f"ulysses_packed_flash_{flash}", partial(ulysses_attention, flash=FLASH_KERNELS[flash]))


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
        query: ``(1, H, S, D)`` of this rank's slice, S = T / size; key ``(1, H_kv, S, D)``, value ``(1, H_kv, S, E)``.

    Returns:
        ``(1, S, H, E)`` and ``None``.
    """
    # half the traffic, and one dtype: some families norm queries in float32
    query, key, value = (in_autocast_dtype(x) for x in (query, key, value))
    repeats = key_value_repeats(query.shape[1], key.shape[1], peers.size)
    if repeats > 1:
        key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    states = query, key, value
    # The message itself is freed before attention.
    received = exchange(_by_rank(states, peers.size), peers).flatten(0, 1)  # (T, F)
    features = received.split([x.shape[1] // peers.size * x.shape[-1] for x in states], dim=-1)
    query, key, value = (
        mine.unflatten(-1, (-1, x.shape[-1])).transpose(0, 1)[None] for mine, x in zip(features, states, strict=True)
    )
    out, _ = packed_attention(module, query, key, value, attention_mask, **kwargs)  # (1, T, h_q, D)
    return exchange(out[0].unflatten(0, (peers.size, -1)), peers).transpose(0, 1).flatten(1, 2)[None], None


def _by_rank(states: Sequence[Tensor], size: int) -> Tensor:
    """``(size, S, F)``: for each rank the features of its heads, of all states ``(1, H, S, D)`` one after another."""
    return torch.cat([x[0].unflatten(0, (size, -1)).transpose(1, 2).flatten(2) for x in states], dim=-1)


def check_heads(text: Any, recurrent: bool, sp: int, tp: int) -> None:
    """Raises `InvalidConfig` unless sp x tp divides the query heads and, of ``recurrent`` models, key heads of those layers."""
    counts = {"query heads of this model": text.num_attention_heads}
    if recurrent:
        counts["key heads of this model's recurrent layers"] = text.linear_num_key_heads
    for name, heads in counts.items():
        if heads % (sp * tp):
            fitting = [degree for degree in range(1, heads + 1) if heads % degree == 0]
            raise InvalidConfig(
                f"layout.sp={sp} x layout.tp={tp} = {sp * tp} must divide the {heads} {name}: use one of {fitting}"
            )


def key_value_repeats(heads: int, key_value_heads: int, ranks: int) -> int:
    """How often to repeat each key-value head, so that equal parts of them serve equal parts of the query heads.

    1 if ``ranks`` divides the key-value heads.

    >>> key_value_repeats(28, 4, 2), key_value_repeats(16, 2, 8), key_value_repeats(28, 4, 7)
    (1, 4, 7)
    """
    group = heads // key_value_heads
    return group // gcd(group, heads // ranks)


def key_value_share(heads: int, key_value_heads: int, ranks: int, rank: int) -> list[int]:
    """The key-value heads that one rank's query heads use, repeated as `key_value_repeats` says.

    >>> [key_value_share(16, 2, 4, rank) for rank in range(4)], key_value_share(6, 3, 2, 1)
    ([[0], [0], [1], [1]], [1, 2, 2])
    """
    repeats = key_value_repeats(heads, key_value_heads, ranks)
    share = key_value_heads * repeats // ranks
    return [place // repeats for place in range(rank * share, (rank + 1) * share)]

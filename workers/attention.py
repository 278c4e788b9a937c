"""The one attention of the packed path, registered with transformers' `AttentionInterface`.

Language model and vision tower both call it with ``cu_seq_lens_q``: rows, images or windows are segments of one sequence that
do not see each other. On CUDA in half precision it is variable-length flash attention; elsewhere scaled-dot-product attention,
one call for all segments of equal length.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel

from dataproto.errors import UnsupportedAttention

# Vision towers make one variable-length call a layer only for names that contain "flash".
PACKED_ATTENTION = "packed_flash"


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention within the segments of one packed sequence.

    Args:
        query: ``(1, H, T, D)``; key and value ``(1, H_kv, T, D)``, H a multiple of H_kv.
        cu_seq_lens_q: ``(S + 1,)`` boundaries of the S segments.
        is_causal: ``None`` asks the module (language models say yes, vision towers no).

    Returns:
        ``(1, T, H, D)`` and ``None``.

    Raises:
        UnsupportedAttention: a mask, dropout or sliding window is asked for, or the boundaries are missing.
    """
    if attention_mask is not None or sliding_window is not None or dropout:
        raise UnsupportedAttention(
            "packed attention takes no mask, sliding window or dropout: segments are all it knows"
        )
    if cu_seq_lens_q is None or query.shape[0] != 1:
        raise UnsupportedAttention(
            f"packed attention needs cu_seq_lens_q and one packed row (got shape {tuple(query.shape)}); "
            "a padded batch needs a model of its own with attn_implementation='sdpa'"
        )
    causal = bool(getattr(module, "is_causal", True)) if is_causal is None else is_causal
    q, k, v = query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)  # (T, H, D)
    if q.device.type == "cuda" and (q.dtype in HALF or torch.is_autocast_enabled("cuda")):
        dtype = q.dtype if q.dtype in HALF else torch.get_autocast_dtype("cuda")
        longest = max_length_q or int((cu_seq_lens_q[1:] - cu_seq_lens_q[:-1]).max())
        out = _flash(q.to(dtype), k.to(dtype), v.to(dtype), cu_seq_lens_q.int(), longest, scaling, causal)
    else:
        out = attend_segments(q, k, v, cu_seq_lens_q, scaling, causal)
    return out.unsqueeze(0), None


HALF = (torch.bfloat16, torch.float16)


def _flash(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, longest: int, scaling: float | None, causal: bool
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    window = (-1, 0) if causal else (-1, -1)
    grouped = {"enable_gqa": True} if _takes_enable_gqa() and q.shape[1] != k.shape[1] else {}
    return varlen_attn(q, k, v, cu_seqlens, cu_seqlens, longest, longest, scale=scaling, window_size=window, **grouped)


@cache
def _takes_enable_gqa() -> bool:
    import inspect

    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters


def attend_segments(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scaling: float | None, causal: bool) -> Tensor:
    """Scaled-dot-product attention ``(T, H, D)``, one call for all segments of the same length."""
    starts, lengths = cu_seqlens[:-1].long(), (cu_seqlens[1:] - cu_seqlens[:-1]).long()
    distinct = [length for length in lengths.unique().tolist() if length]
    if len(distinct) == 1:
        return _attend_equal(q, k, v, distinct[0], scaling, causal)
    out = torch.empty_like(q)
    indices, parts = [], []
    for length in distinct:
        of_length = starts[lengths == length]
        index = (of_length[:, None] + torch.arange(length, device=q.device)).flatten()
        indices.append(index)
        parts.append(_attend_equal(q[index], k[index], v[index], length, scaling, causal))
    return out.index_copy(0, torch.cat(indices), torch.cat(parts)) if parts else out


def _attend_equal(q: Tensor, k: Tensor, v: Tensor, length: int, scaling: float | None, causal: bool) -> Tensor:
    batched = (x.unflatten(0, (-1, length)).transpose(1, 2) for x in (q, k, v))  # (S, H, length, D)
    out = scaled_dot_product_attention(*batched, is_causal=causal, scale=scaling, enable_gqa=q.shape[1] != k.shape[1])
    return out.transpose(1, 2).flatten(0, 1)


def use_packed_attention(model: PreTrainedModel) -> None:
    """Makes every part of ``model`` attend through `packed_attention`.

    Set on the configs, since `set_attn_implementation` looks for a flash-attn package behind any name with "flash" in it.
    """
    AttentionInterface.register(PACKED_ATTENTION, packed_attention)
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None and hasattr(config, "_attn_implementation"):
            config._attn_implementation_internal = PACKED_ATTENTION

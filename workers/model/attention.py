"""The one attention of the packed path, registered with transformers' `AttentionInterface`.

Language model and vision tower both call it with ``cu_seq_lens_q``: rows, images or windows are segments of one sequence that
do not see each other. On CUDA in half precision it is variable-length flash attention, by torch's own kernel or one that was
chosen by name; elsewhere scaled-dot-product attention, one call for all segments of equal length.
"""

import inspect
from collections.abc import Callable
from functools import cache, partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel

from dataproto.errors import UnsupportedAttention
from workers.model import flash_attention4 as flash4
from workers.model.patches import route_attention


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    key_index: Tensor | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    flash: "Flash | None" = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention within the segments of one packed sequence.

    Args:
        query: ``(1, H, T, D)``; key and value ``(1, H_kv, T, D)``, H a multiple of H_kv. Where attention is not causal (a
            tower that sees images of one size as a batch), more rows without boundaries are a segment each.
        cu_seq_lens_q: ``(S + 1,)`` boundaries of the S segments among queries; cu_seq_lens_k among keys.
        key_index: ``(K,)`` which of the T keys the segments see, one segment after the other; by default their own.
            The last key of a causal segment is that of its last query.
        is_causal: ``None`` asks the module (language models say yes, vision towers no).
        flash: what computes it on CUDA in half precision; by default torch's kernel.

    Returns:
        ``(1, T, H, D)``, or as many rows as the query has, and ``None``.

    Raises:
        UnsupportedAttention: a mask, dropout or sliding window is asked for, or the boundaries are missing.
    """
    if attention_mask is not None or sliding_window is not None or dropout:
        raise UnsupportedAttention(
            "packed attention takes no mask, sliding window or dropout: segments are all it knows"
        )
    rows, length = query.shape[0], query.shape[2]
    causal = bool(getattr(module, "is_causal", True)) if is_causal is None else is_causal
    if cu_seq_lens_q is None and not causal:
        cu_seq_lens_q = torch.arange(rows + 1, dtype=torch.int32, device=query.device) * length
        max_length_q = max_length_k = length
        query, key, value = (x.transpose(0, 1).flatten(1, 2).unsqueeze(0) for x in (query, key, value))
    if cu_seq_lens_q is None or query.shape[0] != 1:
        raise UnsupportedAttention(
            f"packed attention needs cu_seq_lens_q and one packed row (got shape {tuple(query.shape)}); "
            "a padded batch needs a model of its own with attn_implementation='sdpa'"
        )
    q, k, v = query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)  # (T, H, D)
    if key_index is not None:
        k, v = k.index_select(0, key_index), v.index_select(0, key_index)
    cu_k = cu_seq_lens_q if cu_seq_lens_k is None else cu_seq_lens_k
    if q.device.type == "cuda" and (q.dtype in HALF or torch.is_autocast_enabled("cuda")):
        dtype = q.dtype if q.dtype in HALF else torch.get_autocast_dtype("cuda")
        longest_q, longest_k = max_length_q or _longest(cu_seq_lens_q), max_length_k or _longest(cu_k)
        q, k, v, cu_q, cu_k = q.to(dtype), k.to(dtype), v.to(dtype), cu_seq_lens_q.int(), cu_k.int()
        out = (flash or torch_flash)(q, k, v, cu_q, cu_k, longest_q, longest_k, scaling, causal)
    elif torch.compiler.is_compiling():
        out = segment_attention(q, k, v, cu_seq_lens_q, cu_k, scaling, causal)
    else:
        out = segment_sdpa(q, k, v, cu_seq_lens_q, cu_k, scaling, causal)
    return out.view(rows, length, *out.shape[1:]), None


HALF = (torch.bfloat16, torch.float16)


def _longest(cu_seqlens: Tensor) -> int:
    return int((cu_seqlens[1:] - cu_seqlens[:-1]).max())


def torch_flash(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    longest_q: int,
    longest_k: int,
    scaling: float | None,
    causal: bool,
) -> Tensor:
    """Torch's kernel: arguments and result as `workers.model.flash_attention4.attend`."""
    from torch.nn.attention.varlen import varlen_attn

    window = (-1, 0) if causal else (-1, -1)  # aligned to the last query and key, as flash attention does
    options: dict[str, Any] = {"scale": scaling, "window_size": window}
    if _takes_enable_gqa():
        options["enable_gqa"] = q.shape[1] != k.shape[1]
    return cast(Tensor, varlen_attn(q, k, v, cu_q, cu_k, longest_q, longest_k, **options))


def flash_4(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    longest_q: int,
    longest_k: int,
    scaling: float | None,
    causal: bool,
) -> Tensor:
    """FlashAttention 4, but for short segments; arguments and result as `workers.model.flash_attention4.attend`."""
    attend = flash4.attend if longest_q > flash4.LONGER_THAN else torch_flash
    return attend(q, k, v, cu_q, cu_k, longest_q, longest_k, scaling, causal)


@cache
def _takes_enable_gqa() -> bool:
    """Whether this torch wants to be told of grouped heads (2.11 finds out by itself)."""
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters


def segment_sdpa(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, scaling: float | None, causal: bool
) -> Tensor:
    """Scaled-dot-product attention: queries ``(T, H, D)``, keys and values ``(K, H_kv, D)``, one call for all segments of
    the same lengths. Segments without queries are passed over.
    """
    kinds = _kinds(cu_q, cu_k)
    if len(kinds) == 1 and len(q) == kinds[0][0] * (len(cu_q) - 1):
        return _attend_equal(q, k, v, *kinds[0][:2], scaling, causal)
    if not kinds:
        return torch.zeros_like(q)
    # One gather for all lengths: in the backward pass each would fill a gradient of full size.
    rows, keys = torch.cat([kind[2] for kind in kinds]), torch.cat([kind[3] for kind in kinds])
    queries = q.index_select(0, rows).split([len(kind[2]) for kind in kinds])
    key_parts, value_parts = (x.index_select(0, keys).split([len(kind[3]) for kind in kinds]) for x in (k, v))
    parts = [
        _attend_equal(*qkv, length_q, length_k, scaling, causal)
        for qkv, (length_q, length_k, _, _) in zip(zip(queries, key_parts, value_parts), kinds, strict=True)
    ]
    return torch.empty_like(q).index_copy(0, rows, torch.cat(parts))


def _kinds(cu_q: Tensor, cu_k: Tensor) -> list[tuple[int, int, Tensor, Tensor]]:
    """Segments that have queries, by their lengths in queries and keys: both lengths, and where queries and keys stand."""
    lengths = torch.stack([cu_q[1:] - cu_q[:-1], cu_k[1:] - cu_k[:-1]], dim=1).long()
    kinds = []
    for length_q, length_k in lengths.unique(dim=0).tolist():
        if length_q:
            chosen = ((lengths[:, 0] == length_q) & (lengths[:, 1] == length_k)).nonzero().squeeze(1)
            at_q = cu_q[chosen].long()[:, None] + torch.arange(length_q, device=cu_q.device)
            at_k = cu_k[chosen].long()[:, None] + torch.arange(length_k, device=cu_q.device)
            kinds.append((length_q, length_k, at_q.flatten(), at_k.flatten()))
    return kinds


def _attend_equal(
    q: Tensor, k: Tensor, v: Tensor, length_q: int, length_k: int, scaling: float | None, causal: bool
) -> Tensor:
    queries, keys, values = (
        x.unflatten(0, (-1, length)).transpose(1, 2) for x, length in ((q, length_q), (k, length_k), (v, length_k))
    )  # (S, H, length, D)
    mask = _aligned_mask(length_q, length_k, q.device) if causal and length_q != length_k else None
    grouped = q.shape[1] != k.shape[1]
    out = scaled_dot_product_attention(
        queries, keys, values, mask, is_causal=causal and mask is None, scale=scaling, enable_gqa=grouped
    )
    return out.transpose(1, 2).flatten(0, 1)


def _aligned_mask(length_q: int, length_k: int, device: torch.device) -> Tensor:
    """``(length_q, length_k)`` causal, the last query aligned with the last key."""
    return torch.ones(length_q, length_k, dtype=torch.bool, device=device).tril(length_k - length_q)


@torch.library.custom_op("dataproto::segment_attention", mutates_args=())
def segment_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, scaling: float | None, causal: bool
) -> Tensor:
    """`segment_sdpa` as one operator, so that compiled layers need not know the segments' lengths."""
    return segment_sdpa(q, k, v, cu_q, cu_k, scaling, causal).contiguous()


@segment_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, scaling: float | None, causal: bool) -> Tensor:
    return q.new_empty(q.shape)


@torch.library.custom_op("dataproto::segment_attention_backward", mutates_args=())
def _segment_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, scaling: float | None, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Softmax's gradient by hand, since an operator's inside knows no autograd. H query heads are H_kv groups of G."""
    scale = q.shape[-1] ** -0.5 if scaling is None else scaling
    to_q, to_k, to_v = q.new_zeros(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape)
    for length_q, length_k, at_q, at_k in _kinds(cu_q, cu_k):
        heads = (-1, length_q, k.shape[1], q.shape[1] // k.shape[1], q.shape[2])
        queries, upstream = (x[at_q].view(heads) for x in (q, grad))
        keys, values = (x[at_k].unflatten(0, (-1, length_k)) for x in (k, v))
        scores = torch.einsum("sqhgd,skhd->shgqk", queries, keys).float() * scale
        if causal:
            scores = scores.masked_fill(~_aligned_mask(length_q, length_k, q.device), float("-inf"))
        probs = scores.softmax(-1)
        to_probs = torch.einsum("sqhgd,skhd->shgqk", upstream, values).float()
        to_scores = (probs * (to_probs - (probs * to_probs).sum(-1, keepdim=True)) * scale).to(q.dtype)
        to_q[at_q] = torch.einsum("shgqk,skhd->sqhgd", to_scores, keys).flatten(2, 3).flatten(0, 1)
        to_k[at_k] = torch.einsum("shgqk,sqhgd->skhd", to_scores, queries).flatten(0, 1)
        to_v[at_k] = torch.einsum("shgqk,sqhgd->skhd", probs.to(q.dtype), upstream).flatten(0, 1)
    return to_q, to_k, to_v


@_segment_attention_backward.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, scaling: float | None, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _keep_inputs(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.scaling, ctx.causal = inputs
    ctx.save_for_backward(*tensors)


def _to_inputs(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    grads = _segment_attention_backward(grad, *ctx.saved_tensors, ctx.scaling, ctx.causal)
    return (*grads, None, None, None, None)


segment_attention.register_autograd(_to_inputs, setup_context=_keep_inputs)


Flash = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, int, int, float | None, bool], Tensor]
"""Queries, keys, values, their segments' boundaries, their longest segments, scaling and causality, to outputs."""

FLASH_KERNELS: dict[str, Flash] = {"torch": torch_flash, "fa4": flash_4}
"""Kernels by the name under which they are chosen."""


def use_packed_attention(model: PreTrainedModel, flash: str = "torch") -> None:
    """Makes every part of ``model`` attend through `packed_attention`, by a kernel of `FLASH_KERNELS`.

    Raises:
        InvalidConfig: the kernel cannot be used here.
    """
    if flash == "fa4":
        flash4.check_usable()
    name = f"packed_flash_{flash}"  # vision towers make one variable-length call a layer only for names with "flash" in them
    set_attention(model, name, partial(packed_attention, flash=FLASH_KERNELS[flash]))


def set_attention(model: nn.Module, name: str, function: Callable[..., Any]) -> None:
    """Makes every part of ``model`` attend through ``function``, which transformers then knows by ``name``.

    Set on the configs, since `set_attn_implementation` looks for a flash-attn package behind any name with "flash" in it.
    """
    AttentionInterface.register(name, function)
    for module in model.modules():
        route_attention(module, name)

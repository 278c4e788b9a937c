"""The one attention of the packed path, registered with transformers' `AttentionInterface`.

Language model and vision tower both call it with ``cu_seq_lens_q``: rows, images or windows are segments of one sequence that
do not see each other. On CUDA in half precision it is variable-length flash attention, whose kernel is torch's own unless
another has been chosen (``torch.nn.attention.activate_flash_attention_impl("FA3")``); elsewhere scaled-dot-product attention,
one call for all segments of equal length.
"""

import inspect
from functools import cache
from typing import Any, cast

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
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    key_index: Tensor | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention within the segments of one packed sequence.

    Args:
        query: ``(1, H, T, D)``; key and value ``(1, H_kv, T, D)``, H a multiple of H_kv.
        cu_seq_lens_q: ``(S + 1,)`` boundaries of the S segments among queries; cu_seq_lens_k among keys.
        key_index: ``(K,)`` which of the T keys the segments see, one segment after the other; by default their own.
            The last key of a causal segment is that of its last query.
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
    if key_index is not None:
        k, v = k.index_select(0, key_index), v.index_select(0, key_index)
    cu_k = cu_seq_lens_q if cu_seq_lens_k is None else cu_seq_lens_k
    if q.device.type == "cuda" and (q.dtype in HALF or torch.is_autocast_enabled("cuda")):
        dtype = q.dtype if q.dtype in HALF else torch.get_autocast_dtype("cuda")
        longest_q, longest_k = max_length_q or _longest(cu_seq_lens_q), max_length_k or _longest(cu_k)
        out = _flash(q.to(dtype), k.to(dtype), v.to(dtype), cu_seq_lens_q, cu_k, longest_q, longest_k, scaling, causal)
    elif torch.compiler.is_compiling():
        out = segment_attention(q, k, v, cu_seq_lens_q, cu_k, scaling, causal)
    else:
        out = attend_segments(q, k, v, cu_seq_lens_q, cu_k, scaling, causal)
    return out.unsqueeze(0), None


HALF = (torch.bfloat16, torch.float16)


def _longest(cu_seqlens: Tensor) -> int:
    return int((cu_seqlens[1:] - cu_seqlens[:-1]).max())


def _flash(
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
    from torch.nn.attention.varlen import varlen_attn

    window = (-1, 0) if causal else (-1, -1)  # aligned to the last query and key, as flash attention does
    options: dict[str, Any] = {"scale": scaling, "window_size": window}
    if _takes_enable_gqa():
        options["enable_gqa"] = q.shape[1] != k.shape[1]
    out = varlen_attn(q, k, v, cu_q.int(), cu_k.int(), longest_q, longest_k, **options)
    return cast(Tensor, out)


@cache
def _takes_enable_gqa() -> bool:
    """Whether this torch wants to be told of grouped heads (2.11 finds out by itself)."""
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters


def attend_segments(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, scaling: float | None, causal: bool
) -> Tensor:
    """Scaled-dot-product attention: queries ``(T, H, D)``, keys and values ``(K, H_kv, D)``, one call for all segments of
    the same lengths. Segments without queries are passed over.
    """
    lengths = torch.stack([cu_q[1:] - cu_q[:-1], cu_k[1:] - cu_k[:-1]], dim=1).long()
    distinct = [(length_q, length_k) for length_q, length_k in lengths.unique(dim=0).tolist() if length_q]
    if len(distinct) == 1 and len(q) == distinct[0][0] * len(lengths):
        return _attend_equal(q, k, v, *distinct[0], scaling, causal)
    at_q, at_k = [], []
    for length_q, length_k in distinct:
        chosen = ((lengths[:, 0] == length_q) & (lengths[:, 1] == length_k)).nonzero().squeeze(1)
        at_q.append((cu_q[chosen].long()[:, None] + torch.arange(length_q, device=q.device)).flatten())
        at_k.append((cu_k[chosen].long()[:, None] + torch.arange(length_k, device=q.device)).flatten())
    if not distinct:
        return torch.zeros_like(q)
    # One gather for all lengths: in the backward pass each would fill a gradient of full size.
    rows, keys = torch.cat(at_q), torch.cat(at_k)
    queries = q.index_select(0, rows).split([len(index) for index in at_q])
    key_parts, value_parts = (x.index_select(0, keys).split([len(index) for index in at_k]) for x in (k, v))
    parts = [
        _attend_equal(*qkv, length_q, length_k, scaling, causal)
        for qkv, (length_q, length_k) in zip(zip(queries, key_parts, value_parts), distinct, strict=True)
    ]
    return torch.empty_like(q).index_copy(0, rows, torch.cat(parts))


def _attend_equal(
    q: Tensor, k: Tensor, v: Tensor, length_q: int, length_k: int, scaling: float | None, causal: bool
) -> Tensor:
    queries, keys, values = (
        x.unflatten(0, (-1, length)).transpose(1, 2) for x, length in ((q, length_q), (k, length_k), (v, length_k))
    )  # (S, H, length, D)
    mask = None
    if causal and length_q != length_k:
        mask = torch.ones(length_q, length_k, dtype=torch.bool, device=q.device).tril(length_k - length_q)
    grouped = q.shape[1] != k.shape[1]
    out = scaled_dot_product_attention(
        queries, keys, values, mask, is_causal=causal and mask is None, scale=scaling, enable_gqa=grouped
    )
    return out.transpose(1, 2).flatten(0, 1)


@torch.library.custom_op("dataproto::segment_attention", mutates_args=())
def segment_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, scaling: float | None, causal: bool
) -> Tensor:
    """`attend_segments` as one operator: compiled layers need not know the segments' lengths. Its backward recomputes."""
    return attend_segments(q, k, v, cu_q, cu_k, scaling, causal).contiguous()


@segment_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, scaling: float | None, causal: bool) -> Tensor:
    return q.new_empty(q.shape)


@torch.library.custom_op("dataproto::segment_attention_backward", mutates_args=())
def _segment_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, scaling: float | None, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    with torch.enable_grad():
        inputs = [x.detach().requires_grad_() for x in (q, k, v)]
        out = attend_segments(inputs[0], inputs[1], inputs[2], cu_q, cu_k, scaling, causal)
    grads = torch.autograd.grad(out, inputs, grad)
    return grads[0].contiguous(), grads[1].contiguous(), grads[2].contiguous()


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


def use_packed_attention(model: PreTrainedModel) -> None:
    """Makes every part of ``model`` attend through `packed_attention`.

    Set on the configs, since `set_attn_implementation` looks for a flash-attn package behind any name with "flash" in it.
    """
    AttentionInterface.register(PACKED_ATTENTION, packed_attention)
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None and hasattr(config, "_attn_implementation"):
            config._attn_implementation_internal = PACKED_ATTENTION

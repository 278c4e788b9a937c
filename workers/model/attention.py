"""The attention function of the packed model, registered with transformers' `AttentionInterface`.

Language model and vision tower both call it with ``cu_seq_lens_q``: rows, images or windows are segments of one sequence that do
not attend to each other. On CUDA in half precision a variable-length flash attention kernel computes it (`FLASH_KERNELS`),
otherwise, and for heads that are wider than the kernel's, scaled-dot-product attention (`workers.model.segment_attention`).
Causal layers may have a sliding window, and images whose tokens see each other (`workers.model.image_blocks`).
"""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import AttentionInterface, PreTrainedModel

from dataproto.errors import UnsupportedAttention
from workers.model import flash_attention4
from workers.model.image_blocks import ImageBlocks, block_attention
from workers.model.patches import route_attention
from workers.model.segment_attention import Segments, segment_attention, segment_sdpa

FlashKernel = Callable[[Tensor, Tensor, Tensor, Segments, float | None], Tensor]
"""From q, k, v, segments with their longest lengths, and scaling to the output; see `workers.model.flash_attention4.attend`."""

MAX_FLASH_HEAD = 256
"""The widest head of torch's flash attention."""

HALF_DTYPES = (torch.bfloat16, torch.float16)


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
    image_blocks: ImageBlocks | None = None,
    flash: FlashKernel | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention within the segments of one packed sequence.

    Args:
        query: ``(1, H, T, D)``; key ``(1, H_kv, T, D)``, H a multiple of H_kv; value ``(1, H_kv, T, E)``, E at most D. Attention
            that is not causal also takes several rows (a tower that processes images as a batch): each row is a segment, or
            boundaries count through all rows.
        cu_seq_lens_q: ``(S + 1,)`` boundaries of the S segments among queries; cu_seq_lens_k among keys.
        key_index: ``(K,)`` indices into the T keys, one segment after the other; by default each segment has its own keys. The
            last key of a causal segment belongs to its last query.
        is_causal: ``None`` reads it from the module (true in language models, false in vision towers).
        sliding_window: number of keys up to its own that each query of a causal segment sees; ``None`` is all.
        image_blocks: images of causal segments whose tokens see each other.
        flash: the kernel on CUDA in half precision; by default torch's.

    Returns:
        ``(1, T, H, E)``, with the rows of the query if it has several, and ``None``.

    Raises:
        UnsupportedAttention: a mask or dropout is requested, or a window or blocks without causal segments, or the boundaries
            are missing.
    """
    rows, length = query.shape[0], query.shape[2]
    causal = bool(getattr(module, "is_causal", True)) if is_causal is None else is_causal
    masked = attention_mask is not None or bool(dropout)
    if image_blocks is not None and image_blocks.windowed and sliding_window is None:
        image_blocks = None
    _check_supported(query, cu_seq_lens_q, causal, masked, sliding_window is not None or image_blocks is not None)
    if cu_seq_lens_q is None:
        cu_seq_lens_q = torch.arange(rows + 1, dtype=torch.int32, device=query.device) * length
        max_length_q = max_length_k = length
    if rows > 1:
        query, key, value = (x.transpose(0, 1).flatten(1, 2).unsqueeze(0) for x in (query, key, value))
    q, k, v = query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)  # (T, H, D)
    if key_index is not None:
        k, v = k.index_select(0, key_index), v.index_select(0, key_index)
    cu_k = cu_seq_lens_q if cu_seq_lens_k is None else cu_seq_lens_k
    ahead = None if image_blocks is None else image_blocks.ahead
    segments = Segments(cu_seq_lens_q, cu_k, max_length_q, max_length_k, causal, sliding_window, ahead)
    out = _attend(q, k, v, segments, scaling, flash or torch_flash, image_blocks)
    return out.view(rows, length, *out.shape[1:]), None


def _check_supported(query: Tensor, cu_seqlens: Tensor | None, causal: bool, masked: bool, within_causal: bool) -> None:
    if masked or (within_causal and not causal):
        raise UnsupportedAttention(
            "packed attention supports only segments: no mask, no dropout, and sliding windows or image blocks in causal layers "
            "alone"
        )
    if causal and (cu_seqlens is None or query.shape[0] != 1):
        raise UnsupportedAttention(
            f"packed attention needs cu_seq_lens_q and one packed row (got shape {tuple(query.shape)}); "
            "for padded batches load a separate model with attn_implementation='sdpa'"
        )


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    at: Segments,
    scaling: float | None,
    flash: FlashKernel,
    blocks: ImageBlocks | None,
) -> Tensor:
    """``(T, H, E)``, by the function for this device, dtype and head size."""
    half = q.dtype in HALF_DTYPES or torch.is_autocast_enabled("cuda")
    if q.device.type == "cuda" and half and q.shape[-1] <= MAX_FLASH_HEAD:
        dtype = q.dtype if q.dtype in HALF_DTYPES else torch.get_autocast_dtype("cuda")
        q, k, v, cu_q, cu_k = q.to(dtype), k.to(dtype), v.to(dtype), at.cu_q.int(), at.cu_k.int()
        longest = at.max_q or _max_length(cu_q), at.max_k or _max_length(cu_k)
        width, v = v.shape[-1], as_wide_as(v, k)
        if blocks is None:
            return flash(q, k, v, Segments(cu_q, cu_k, *longest, at.causal, at.window), scaling)[..., :width]
        scale = q.shape[-1] ** -0.5 if scaling is None else scaling
        out, _ = block_attention(q, k, v, cu_q, cu_k, *blocks[:5], *longest, scale, at.window)
        return cast(Tensor, out)[..., :width]
    if torch.compiler.is_compiling():
        return cast(Tensor, segment_attention(q, k, v, at.cu_q, at.cu_k, scaling, at.causal, at.window, at.ahead))
    return segment_sdpa(q, k, v, at, scaling)


def as_wide_as(value: Tensor, key: Tensor) -> Tensor:
    """Values with zeros after them, up to the width of the keys.

    >>> as_wide_as(torch.ones(1, 2), torch.ones(1, 3))
    tensor([[1., 1., 0.]])
    """
    return value if value.shape[-1] == key.shape[-1] else pad(value, (0, key.shape[-1] - value.shape[-1]))


def _max_length(cu_seqlens: Tensor) -> int:
    return int((cu_seqlens[1:] - cu_seqlens[:-1]).max())


def torch_flash(q: Tensor, k: Tensor, v: Tensor, at: Segments, scaling: float | None) -> Tensor:
    """Torch's variable-length flash attention; see `FlashKernel`."""
    from torch.nn.attention.varlen import varlen_attn

    before = -1 if at.window is None else at.window - 1
    size = (before, 0) if at.causal else (-1, -1)  # aligned to the last query and key, as in flash attention
    bounds: Any = at.cu_q, at.cu_k, at.max_q, at.max_k
    options: dict[str, Any] = {"scale": scaling, "window_size": size}
    if _takes_enable_gqa():
        options["enable_gqa"] = q.shape[1] != k.shape[1]
    return cast(Tensor, varlen_attn(q, k, v, *bounds, **options))


@torch.compiler.assume_constant_result
def _takes_enable_gqa() -> bool:
    """Whether this version of torch has the argument for grouped heads; torch 2.11 detects them itself."""
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters


def _flash4_or_torch(q: Tensor, k: Tensor, v: Tensor, at: Segments, scaling: float | None) -> Tensor:
    """FlashAttention 4, or torch's kernel for short segments, sliding windows and wide heads; see `FlashKernel`."""
    short = at.max_q is not None and at.max_q <= flash_attention4.MAX_TORCH_QUERIES
    wide = q.shape[-1] > flash_attention4.MAX_HEAD
    return (torch_flash if at.window is not None or short or wide else flash_attention4.attend)(q, k, v, at, scaling)


FLASH_KERNELS: dict[str, FlashKernel] = {"torch": torch_flash, "fa4": _flash4_or_torch}
"""Kernels by the names of `ModelConfig.flash_attention`."""


def use_packed_attention(model: PreTrainedModel, flash: str = "torch") -> None:
    """Sets `packed_attention` as the attention of all parts of ``model``, with a kernel of `FLASH_KERNELS`.

    Raises:
        InvalidConfig: the kernel is not installed, or the GPU does not support it.
    """
    if flash == "fa4":
        flash_attention4.check_usable()
    name = f"packed_flash_{flash}"  # vision towers call variable-length attention once a layer only if the name has "flash"
    set_attention(model, name, partial(packed_attention, flash=FLASH_KERNELS[flash]))


def set_attention(model: nn.Module, name: str, function: Callable[..., Any]) -> None:
    """Registers ``function`` with transformers as ``name`` and sets it as the attention of all parts of ``model``.

    Sets the attribute of the configs, because `set_attn_implementation` requires the flash-attn package for every name that
    contains "flash".
    """
    AttentionInterface.register(name, function)
    for module in model.modules():
        route_attention(module, name)

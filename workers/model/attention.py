"""The attention function of the packed model, registered with transformers' `AttentionInterface`.

Language model and vision tower both call it with ``cu_seq_lens_q``: rows, images or windows are segments of one sequence that do
not attend to each other. On CUDA in half precision a variable-length flash attention kernel computes it (`FLASH_KERNELS`),
otherwise scaled-dot-product attention (`workers.model.segment_attention`).
"""

import inspect
from collections.abc import Callable
from functools import cache, partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from dataproto.errors import UnsupportedAttention
from workers.model import flash_attention4
from workers.model.patches import route_attention
from workers.model.segment_attention import segment_attention, segment_sdpa

FlashKernel = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, int, int, float | None, bool], Tensor]
"""``(q, k, v, cu_q, cu_k, max_q, max_k, scaling, causal) -> out``; see `workers.model.flash_attention4.attend`."""

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
    flash: FlashKernel | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention within the segments of one packed sequence.

    Args:
        query: ``(1, H, T, D)``; key and value ``(1, H_kv, T, D)``, H a multiple of H_kv. Attention that is not causal also takes
            several rows without boundaries (a tower that processes images of one size as a batch); each row is a segment.
        cu_seq_lens_q: ``(S + 1,)`` boundaries of the S segments among queries; cu_seq_lens_k among keys.
        key_index: ``(K,)`` indices into the T keys, one segment after the other; by default each segment has its own keys. The
            last key of a causal segment belongs to its last query.
        is_causal: ``None`` reads it from the module (true in language models, false in vision towers).
        flash: the kernel on CUDA in half precision; by default torch's.

    Returns:
        ``(1, T, H, D)``, with the rows of the query if it has several, and ``None``.

    Raises:
        UnsupportedAttention: a mask, dropout or sliding window is requested, or the boundaries are missing.
    """
    rows, length = query.shape[0], query.shape[2]
    causal = bool(getattr(module, "is_causal", True)) if is_causal is None else is_causal
    masked = attention_mask is not None or sliding_window is not None or bool(dropout)
    _check_supported(query, cu_seq_lens_q, causal, masked)
    if cu_seq_lens_q is None:
        cu_seq_lens_q = torch.arange(rows + 1, dtype=torch.int32, device=query.device) * length
        max_length_q = max_length_k = length
        query, key, value = (x.transpose(0, 1).flatten(1, 2).unsqueeze(0) for x in (query, key, value))
    q, k, v = query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)  # (T, H, D)
    if key_index is not None:
        k, v = k.index_select(0, key_index), v.index_select(0, key_index)
    cu_k = cu_seq_lens_q if cu_seq_lens_k is None else cu_seq_lens_k
    out = _attend(q, k, v, cu_seq_lens_q, cu_k, max_length_q, max_length_k, scaling, causal, flash or torch_flash)
    return out.view(rows, length, *out.shape[1:]), None


def _check_supported(query: Tensor, cu_seqlens: Tensor | None, causal: bool, masked: bool) -> None:
    if masked:
        raise UnsupportedAttention("packed attention supports only segments: no mask, sliding window or dropout")
    rows_are_segments = cu_seqlens is None and not causal
    if not rows_are_segments and (cu_seqlens is None or query.shape[0] != 1):
        raise UnsupportedAttention(
            f"packed attention needs cu_seq_lens_q and one packed row (got shape {tuple(query.shape)}); "
            "for padded batches load a separate model with attn_implementation='sdpa'"
        )


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    max_q: int | None,
    max_k: int | None,
    scaling: float | None,
    causal: bool,
    flash: FlashKernel,
) -> Tensor:
    """``(T, H, D)``, by the function for this device and dtype."""
    if q.device.type == "cuda" and (q.dtype in HALF_DTYPES or torch.is_autocast_enabled("cuda")):
        dtype = q.dtype if q.dtype in HALF_DTYPES else torch.get_autocast_dtype("cuda")
        max_q, max_k = max_q or _max_length(cu_q), max_k or _max_length(cu_k)
        return flash(q.to(dtype), k.to(dtype), v.to(dtype), cu_q.int(), cu_k.int(), max_q, max_k, scaling, causal)
    if torch.compiler.is_compiling():
        return cast(Tensor, segment_attention(q, k, v, cu_q, cu_k, scaling, causal))
    return segment_sdpa(q, k, v, cu_q, cu_k, scaling, causal)


def _max_length(cu_seqlens: Tensor) -> int:
    return int((cu_seqlens[1:] - cu_seqlens[:-1]).max())


def torch_flash(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    max_q: int,
    max_k: int,
    scaling: float | None,
    causal: bool,
) -> Tensor:
    """Torch's variable-length flash attention; see `FlashKernel`."""
    from torch.nn.attention.varlen import varlen_attn

    window = (-1, 0) if causal else (-1, -1)  # aligned to the last query and key, as in flash attention
    options: dict[str, Any] = {"scale": scaling, "window_size": window}
    if _takes_enable_gqa():
        options["enable_gqa"] = q.shape[1] != k.shape[1]
    return cast(Tensor, varlen_attn(q, k, v, cu_q, cu_k, max_q, max_k, **options))


@cache
def _takes_enable_gqa() -> bool:
    """Whether this version of torch has the argument for grouped heads; torch 2.11 detects them itself."""
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters


def _flash4_or_torch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    max_q: int,
    max_k: int,
    scaling: float | None,
    causal: bool,
) -> Tensor:
    """FlashAttention 4, or torch's kernel for short segments; see `FlashKernel`."""
    kernel = flash_attention4.attend if max_q > flash_attention4.MAX_TORCH_QUERIES else torch_flash
    return kernel(q, k, v, cu_q, cu_k, max_q, max_k, scaling, causal)


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

"""FlashAttention 4 (PyPI's ``flash-attn-4``), for Hopper and data-center Blackwell: twice as fast as torch's own kernel on long
segments.

One operator with its gradient, so that compiled layers need not know what is inside and activation checkpointing can keep what it
gave.
"""

from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from dataproto.errors import InvalidConfig

LONGER_THAN = 128
"""Segments of at most so many queries, such as the 64 of a tower's window, are faster with torch's kernel."""
HEAD_MULTIPLE = 32
"""Heads of other sizes are padded: 4.0.0b36 gives wrong gradients of queries for 72 and 80."""


CAPABILITIES = {9: "Hopper", 10: "Blackwell", 11: "Blackwell"}
"""Compute capabilities, by their first number, that have kernels for both passes. FlashAttention 4 lets 8.x (Ampere) run forward
alone, and takes 12.x (Blackwell of GeForce, RTX PRO and DGX Spark), whose backward pass does not run yet.
"""


def check_usable() -> None:
    """Checks that the package is there and, where there are GPUs, that this process's one has the kernels.

    Raises:
        InvalidConfig: the package is missing, or the GPU has another compute capability than those of `CAPABILITIES`.
    """
    try:
        version("flash-attn-4")  # FlashAttention 2 has a module of the same name, too old for this
    except PackageNotFoundError:
        raise InvalidConfig(
            "flash_attention='fa4' needs the package flash-attn-4: pip install 'dataproto-vlm[fa4]', or leave it 'torch'"
        ) from None
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        if major not in CAPABILITIES:
            raise InvalidConfig(
                f"flash_attention='fa4' has no kernels for {torch.cuda.get_device_name()}, of compute capability "
                f"{major}.{minor}: it needs {', '.join(f'{number}.x ({name})' for number, name in CAPABILITIES.items())}; "
                "leave it 'torch'"
            )


def attend(
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
    """Attention within segments: queries ``(T, H, D)``, keys and values ``(K, H_kv, D)`` in half precision on CUDA.

    The last key of a causal segment is that of its last query.
    """
    width = q.shape[-1]
    scale = width**-0.5 if scaling is None else scaling
    if more := -width % HEAD_MULTIPLE:
        q, k, v = (pad(x, (0, more)) for x in (q, k, v))
    out, _ = flash_attention_4(q, k, v, cu_q, cu_k, longest_q, longest_k, scale, causal)
    return out[..., :width] if more else out


@torch.library.custom_op("dataproto::flash_attention_4", mutates_args=(), device_types="cuda")
def flash_attention_4(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    longest_q: int,
    longest_k: int,
    scale: float,
    causal: bool,
) -> tuple[Tensor, Tensor]:
    """Output ``(T, H, D)`` and log-sum-exp of the scores ``(H, T)`` float32."""
    from flash_attn.cute import flash_attn_varlen_func

    out, sums = flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q=cu_q,
        cu_seqlens_k=cu_k,
        max_seqlen_q=longest_q,
        max_seqlen_k=longest_k,
        softmax_scale=scale,
        causal=causal,
        return_lse=True,
    )
    return out, sums


@flash_attention_4.register_fake
def _(q: Tensor, *others: Any, **_: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)


@torch.library.custom_op("dataproto::flash_attention_4_backward", mutates_args=(), device_types="cuda")
def _flash_attention_4_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    sums: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    longest_q: int,
    longest_k: int,
    scale: float,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    from flash_attn.cute.interface import _flash_attn_bwd  # torch's own adapter takes it from there, too

    to_q, to_k, to_v = _flash_attn_bwd(
        q,
        k,
        v,
        out,
        grad.contiguous(),
        sums,
        softmax_scale=scale,
        causal=causal,
        cu_seqlens_q=cu_q,
        cu_seqlens_k=cu_k,
        max_seqlen_q=longest_q,
        max_seqlen_k=longest_k,
    )[:3]
    return to_q, to_k, to_v


@_flash_attention_4_backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *others: Any, **_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, cu_q, cu_k, *ctx.settings = inputs
    ctx.save_for_backward(q, k, v, *output, cu_q, cu_k)


def _to_inputs(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    grads = _flash_attention_4_backward(grad, *ctx.saved_tensors, *ctx.settings)
    return (*grads, None, None, None, None, None, None)


flash_attention_4.register_autograd(_to_inputs, setup_context=_keep)

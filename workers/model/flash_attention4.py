"""FlashAttention 4 (``flash-attn-4`` on PyPI) for Hopper and data-center Blackwell GPUs.

On long segments it is twice as fast as torch's kernel. It is registered as one operator with its gradient, so that compiled
layers treat it as opaque and activation checkpointing can save its output.
"""

import os
from contextlib import suppress
from fcntl import LOCK_NB, LOCK_SH, flock
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from dataproto.errors import InvalidConfig
from dataproto.extras import installed_version
from workers.model.compiled_code import cache_folder
from workers.model.segment_attention import Gradients, Segments, flash_operator

MAX_TORCH_QUERIES = 128
"""Torch's kernel is faster on segments of up to this number of queries, such as the 64 of a vision tower's window."""

MAX_HEAD = 128
"""The widest head whose gradients have been compared with torch's kernel (`benchmarks/attention.py`).

Torch's kernel takes wider heads.
"""

HEAD_MULTIPLE = 32
"""Heads are padded to a multiple of this size: version 4.0.0b36 returns wrong gradients of queries for sizes 72 and 80."""

CAPABILITIES = {9: "Hopper", 10: "Blackwell", 11: "Blackwell"}
"""Major compute capabilities with kernels for both passes. On 8.x (Ampere) FlashAttention 4 has only the forward pass; on 12.x
(Blackwell of GeForce, RTX PRO and DGX Spark) it accepts calls, but the backward pass does not run yet.
"""


def check_usable() -> None:
    """Checks that the package is installed and that the current GPU, if there is one, has the kernels.

    From then on the package keeps the kernels that it compiles, see `keep_compiled_kernels`.

    Raises:
        InvalidConfig: the package is missing, or the compute capability of the GPU is not in `CAPABILITIES`.
    """
    if installed_version("flash-attn-4") is None:  # FlashAttention 2 has a module of the same name
        raise InvalidConfig(
            "flash_attention='fa4' needs the package flash-attn-4: pip install 'dataproto-vlm[fa4]', or set it to 'torch'"
        )
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        if major not in CAPABILITIES:
            raise InvalidConfig(
                f"flash_attention='fa4' has no kernels for {torch.cuda.get_device_name()} (compute capability "
                f"{major}.{minor}): it needs {', '.join(f'{number}.x ({name})' for number, name in CAPABILITIES.items())}; "
                "set it to 'torch'"
            )
    keep_compiled_kernels()


def keep_compiled_kernels() -> None:
    """Has the package store its kernels in ``dataproto/flash_attention4`` of the user's cache folder for the next run.

    By itself it stores none. Its own variables, if they are set, decide. It ends where it gets no lock on its files, so it stores
    nothing in a folder that cannot be written to or, as on some network file systems, has no locks.

    Each kind of GPU has a folder, because the package names some kernels alike for all, such as that before the backward pass.
    """
    folder = cache_folder("flash_attention4")
    if torch.cuda.is_available():
        folder /= "sm{}{}".format(*torch.cuda.get_device_capability())
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "lock").open("w") as file:
            flock(file, LOCK_SH | LOCK_NB)
        os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
        os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(folder))


def attend(q: Tensor, k: Tensor, v: Tensor, at: Segments, scaling: float | None) -> Tensor:
    """Attention within segments, in half precision on CUDA.

    Args:
        q: ``(T, H, D)``; k and v ``(K, H_kv, D)``.
        at: with the lengths of the longest segments, and without a window.
        scaling: of the scores; ``None`` is ``D ** -0.5``.

    Returns:
        ``(T, H, D)``.
    """
    width = q.shape[-1]
    scale = width**-0.5 if scaling is None else scaling
    if padding := -width % HEAD_MULTIPLE:
        q, k, v = (pad(x, (0, padding)) for x in (q, k, v))
    out, _ = flash_attention_4(q, k, v, at.cu_q, at.cu_k, at.max_q, at.max_k, scale, at.causal)
    return out[..., :width] if padding else out


SEGMENTS = "Tensor cu_q, Tensor cu_k, SymInt max_q, SymInt max_k, float scale, bool causal"
"""What the operators take of `Segments`."""


def _settings(cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, scale: float, causal: bool) -> dict[str, Any]:
    """The same by the names of the package's arguments."""
    bounds = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "max_seqlen_q": max_q, "max_seqlen_k": max_k}
    return {**bounds, "softmax_scale": scale, "causal": causal}


def _forward(q: Tensor, k: Tensor, v: Tensor, *at: Any) -> tuple[Tensor, Tensor]:
    from flash_attn.cute import flash_attn_varlen_func

    out, log_sums = flash_attn_varlen_func(q, k, v, **_settings(*at), return_lse=True)
    return out, log_sums


def _backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sums: Tensor, *at: Any) -> Gradients:
    from flash_attn.cute.interface import _flash_attn_bwd  # torch's adapter imports it from there too

    grad_q, grad_k, grad_v = _flash_attn_bwd(q, k, v, out, grad.contiguous(), log_sums, **_settings(*at))[:3]
    return grad_q, grad_k, grad_v


flash_attention_4 = flash_operator("flash_attention_4", SEGMENTS, 2, _forward, _backward)

"""Images whose tokens see each other, in rows that are causal otherwise: where their blocks lie, and flash attention over them.

A block is a run of an image's tokens within a row. Its tokens see what causal attention shows them, and the tokens of the block
after their own. A kernel that knows only causal windows computes this in two pieces: causal attention of all queries, and for
the tokens of a block attention to those after their own. Each piece normalises only its own scores; the log-sum-exps of both say
how to join the outputs. The gradient of a piece is the kernel's, given the joined output and log-sum-exp (as in ring attention,
arXiv:2310.01889).

Letters: T queries, K keys, H heads, D head size; M queries that see keys after their own, N blocks.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from dataproto.packing import PackedRows
from dataproto.transfer import move, on_host
from dataproto.vlm.positions import IMAGE
from workers.model.segment_attention import Gradients, flash_operator

Window = tuple[int, int]
"""How many keys before and after its own a query sees, -1 for all: flash attention's ``window_size``."""

Bounds = tuple[Tensor, Tensor, int, int]
"""The boundaries of segments among queries and among keys, and the lengths of the longest ones."""

ForwardKernel = Callable[[Tensor, Tensor, Tensor, Bounds, float, Window], tuple[Tensor, Tensor]]
"""From q, k, v, bounds, scale and window to the output ``(T, H, D)`` and the log-sum-exps ``(H, T)``."""

BackwardKernel = Callable[..., Gradients]
"""From the gradient, q, k, v, the output, log-sum-exps, bounds, scale and window to the gradients of q, k and v."""


class ImageBlocks(NamedTuple):
    """The blocks of packed rows."""

    ahead: Tensor  # (K,) how many keys after its own the query of each key sees
    queries: Tensor  # (M,) index into T
    keys: Tensor  # (M,) index into K of the key after that of each of these queries
    cu_seqlens: Tensor  # (N + 1,) int32, bounds of the blocks among both
    max_length: int
    windowed: bool = False  # the blocks count only in layers with a sliding window


def image_blocks(rows: PackedRows, windowed: bool = False) -> ImageBlocks | None:
    """The blocks of images in packed rows, ``None`` without images. They are computed on the host, and lie where the rows do.

    >>> from dataproto.packing import pack_rows
    >>> ones, types = torch.ones(1, 5, dtype=torch.int64), torch.tensor([[0, 1, 1, 1, 0]])
    >>> blocks = image_blocks(pack_rows(ones, ones, ones.cumsum(1) - 1, ones[:, :1], types))
    >>> blocks.ahead.tolist(), blocks.queries.tolist(), blocks.keys.tolist(), blocks.cu_seqlens.tolist()
    ([0, 2, 1, 0, 0], [1, 2], [2, 3], [0, 2])
    """
    types, cu_seqlens, key_cu_seqlens = map(on_host, (rows.token_types, rows.cu_seqlens, rows.key_cu_seqlens))
    types = types[0] if rows.key_index is None else types[0, on_host(rows.key_index)]
    image, places = types == IMAGE, torch.arange(len(types))
    first = torch.zeros_like(image)  # of a row
    first[key_cu_seqlens[:-1].long()] = True
    joins = image[1:] & image[:-1] & ~first[1:]  # the block of the key before continues
    ends = pad(~joins, (0, 1), value=True)
    last = torch.where(ends, places, len(types)).flip(0).cummin(0).values.flip(0)
    ahead = torch.where(image, last - places, 0)
    shift = (key_cu_seqlens[1:] - cu_seqlens[1:]).long().repeat_interleave(cu_seqlens.diff().long())
    own = torch.arange(len(shift)) + shift  # the key of each query
    queries = (ahead[own] > 0).nonzero().squeeze(1)
    if not len(queries):
        return None
    keys = own[queries] + 1
    begins = pad(keys.diff() != 1, (1, 0), value=True)  # the last token of a block sees no later key, so there is a gap
    bounds = pad(begins.nonzero().squeeze(1), (0, 1), value=len(keys)).int()
    longest = int(bounds.diff().max())
    ahead, queries, keys, bounds = (move(each, rows.cu_seqlens.device) for each in (ahead, queries, keys, bounds))
    return ImageBlocks(ahead, queries, keys, bounds, longest, windowed)


class BlockSegments(NamedTuple):
    """Causal segments with blocks."""

    bounds: Bounds
    scale: float
    window: int | None
    blocks: ImageBlocks


def joined_forward(kernel: ForwardKernel, q: Tensor, k: Tensor, v: Tensor, at: BlockSegments) -> tuple[Tensor, Tensor]:
    """The output ``(T, H, D)`` and log-sum-exps ``(H, T)`` float32 of causal attention with blocks, by a kernel without them."""
    out, lse = kernel(q, k, v, at.bounds, at.scale, _before(at.window))
    _, queries, keys, bounds, longest, _ = at.blocks
    later, later_lse = kernel(q[queries], k[keys], v[keys], (bounds, bounds, longest, longest), at.scale, (0, -1))
    both = torch.logaddexp(lse[:, queries], later_lse)
    parts = (out[queries], lse[:, queries]), (later, later_lse)
    one, two = (part.to(both.dtype) * (own - both).exp().t()[..., None] for part, own in parts)
    return out.index_copy(0, queries, (one + two).to(out.dtype)), lse.index_copy(1, queries, both)


def joined_backward(
    kernel: BackwardKernel, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, at: BlockSegments
) -> Gradients:
    """The gradients of q, k and v, from the output and log-sum-exps of `joined_forward`."""
    grads = kernel(grad, q, k, v, out, lse, at.bounds, at.scale, _before(at.window))
    _, queries, keys, bounds, longest, _ = at.blocks
    parts = grad[queries], q[queries], k[keys], v[keys], out[queries], lse[:, queries].contiguous()
    later = kernel(*parts, (bounds, bounds, longest, longest), at.scale, (0, -1))
    places = queries, keys, keys  # each occurs once, so the order of sums is fixed
    one, two, three = (whole.index_add(0, at, part) for whole, at, part in zip(grads, places, later, strict=True))
    return one, two, three


def _before(window: int | None) -> Window:
    return (-1 if window is None else window - 1, 0)


# Torch's flash attention


def flash_forward(
    q: Tensor, k: Tensor, v: Tensor, bounds: Bounds, scale: float, window: Window
) -> tuple[Tensor, Tensor]:
    """A `ForwardKernel` on CUDA in half precision."""
    causal, (before, after) = window == (-1, 0), window
    sizes: dict[str, Any] = {"scale": scale, "window_size_left": before, "window_size_right": after}
    attend = torch.ops.aten._flash_attention_forward
    found = attend(q, k, v, *bounds, 0.0, causal, return_debug_mask=False, **sizes)
    return found[0], found[1]


def flash_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    bounds: Bounds,
    scale: float,
    window: Window,
) -> Gradients:
    """A `BackwardKernel` on CUDA in half precision."""
    causal, (before, after) = window == (-1, 0), window
    sizes: dict[str, Any] = {"scale": scale, "window_size_left": before, "window_size_right": after}
    seed = torch.zeros(2, dtype=torch.uint64, device=q.device)  # of dropout, which there is none
    unused = torch.empty(0, device=q.device)
    back = torch.ops.aten._flash_attention_backward
    found = back(grad.contiguous(), q, k, v, out, lse, *bounds, 0.0, causal, seed, unused, **sizes)
    return found[0], found[1], found[2]


BLOCK_SEGMENTS = (
    "Tensor cu_q, Tensor cu_k, Tensor ahead, Tensor queries, Tensor keys, Tensor bounds, SymInt longest, "
    "SymInt max_q, SymInt max_k, float scale, SymInt? window"
)
"""`BlockSegments`, flat, as operators take it: tensors first."""


def block_segments(*flat: Any) -> BlockSegments:
    """From the arguments of an operator that `BLOCK_SEGMENTS` names."""
    cu_q, cu_k, *blocks, max_q, max_k, scale, window = flat
    return BlockSegments((cu_q, cu_k, max_q, max_k), scale, window, ImageBlocks(*blocks))


def _forward(q: Tensor, k: Tensor, v: Tensor, *at: Any) -> tuple[Tensor, Tensor]:
    return joined_forward(flash_forward, q, k, v, block_segments(*at))


def _backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *at: Any) -> Gradients:
    return joined_backward(flash_backward, grad, q, k, v, out, lse, block_segments(*at))


block_attention = flash_operator("block_attention", BLOCK_SEGMENTS, 6, _forward, _backward)
"""`joined_forward` with torch's flash attention, as one operator with its gradient."""

"""Scaled-dot-product attention within segments, and the same as one operator with its gradient for compiled layers."""

from collections.abc import Callable, MutableMapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.weak import WeakTensorKeyDictionary

from dataproto.transfer import move, on_host

Gradients = tuple[Tensor, Tensor, Tensor]
"""Of queries, keys and values."""
Group = tuple[int, int, Tensor, Tensor]
"""Segments of the same lengths: the length in queries, the length in keys, and the indices of all their queries and keys."""


class Segments(NamedTuple):
    """Which keys each query sees."""

    cu_q: Tensor  # (S + 1,) boundaries of the segments among queries
    cu_k: Tensor  # and among keys
    max_q: int | None  # the length of the longest segment in queries, if it is known
    max_k: int | None  # and in keys
    causal: bool  # each query sees the keys up to its own; the last key of a segment belongs to its last query
    window: int | None = None  # the number of keys up to its own that each query of a causal segment sees; None is all
    ahead: Tensor | None = None  # (K,) how many keys after its own the query of each key sees, in causal segments


def segment_sdpa(q: Tensor, k: Tensor, v: Tensor, at: Segments, scaling: float | None) -> Tensor:
    """Attention within segments, by one call of scaled-dot-product attention for all segments of the same lengths.

    Args:
        q: ``(T, H, D)``; k ``(K, H_kv, D)`` and v ``(K, H_kv, E)``, H a multiple of H_kv.
        scaling: of the scores; ``None`` is ``D ** -0.5``.

    Returns:
        ``(T, H, E)``; zero where no segment lies.
    """
    count = len(at.cu_q) - 1
    if at.max_q and at.max_k and (len(q), len(k)) == (count * at.max_q, count * at.max_k):
        return _attend_equal(q, k, v, at.max_q, at.max_k, at, scaling)
    groups = equal_lengths(at.cu_q, at.cu_k)
    if len(groups) == 1 and len(q) == groups[0][0] * count:
        return _attend_equal(q, k, v, *groups[0][:2], at, scaling)
    if not groups:
        return _output_like(q, v).zero_()
    # One gather for all lengths: in the backward pass each gather fills a gradient of full size.
    q_index, k_index = torch.cat([group[2] for group in groups]), torch.cat([group[3] for group in groups])
    q_parts = q.index_select(0, q_index).split([len(group[2]) for group in groups])
    k_parts, v_parts = (x.index_select(0, k_index).split([len(group[3]) for group in groups]) for x in (k, v))
    outputs = []
    for qkv, (length_q, length_k, _, places) in zip(zip(q_parts, k_parts, v_parts), groups, strict=True):
        own = at._replace(ahead=None if at.ahead is None else at.ahead[places])
        outputs.append(_attend_equal(*qkv, length_q, length_k, own, scaling))
    return _output_like(q, v).index_copy(0, q_index, torch.cat(outputs))


def _output_like(q: Tensor, v: Tensor) -> Tensor:
    """Room for the output ``(T, H, E)``."""
    return q.new_empty(*q.shape[:-1], v.shape[-1])


def equal_lengths(cu_q: Tensor, cu_k: Tensor) -> list[Group]:
    """The segments that have queries, grouped by their lengths on the host, once for all layers."""
    if cu_q.is_inference() or cu_k.is_inference():  # these do not tell whether they have changed
        return _grouped(on_host(cu_q), on_host(cu_k), cu_q.device)
    known = _groups.setdefault(cu_q, WeakTensorKeyDictionary())
    version, groups = known.get(cu_k, (None, []))
    if version != (cu_q._version, cu_k._version):
        groups = _grouped(on_host(cu_q), on_host(cu_k), cu_q.device)
        known[cu_k] = (cu_q._version, cu_k._version), groups
    return groups


_groups: MutableMapping[Tensor, MutableMapping[Tensor, tuple[tuple[int, int], list[Group]]]] = WeakTensorKeyDictionary()


def _grouped(cu_q: Tensor, cu_k: Tensor, device: torch.device) -> list[Group]:
    lengths = torch.stack([cu_q.diff(), cu_k.diff()], dim=1).long()
    groups = []
    for length_q, length_k in lengths.unique(dim=0).tolist():
        if length_q:
            chosen = ((lengths[:, 0] == length_q) & (lengths[:, 1] == length_k)).nonzero().squeeze(1)
            q_index, k_index = (
                (cu[chosen].long()[:, None] + torch.arange(length)).flatten()
                for cu, length in ((cu_q, length_q), (cu_k, length_k))
            )
            groups.append((length_q, length_k, move(q_index, device), move(k_index, device)))
    return groups


def _attend_equal(
    q: Tensor, k: Tensor, v: Tensor, length_q: int, length_k: int, at: Segments, scaling: float | None
) -> Tensor:
    """Attention of consecutive segments that all have the same lengths."""
    queries, keys, values = (
        x.unflatten(0, (-1, length)).transpose(1, 2) for x, length in ((q, length_q), (k, length_k), (v, length_k))
    )  # (S, H, length, D)
    square = length_q == length_k and at.ahead is None and (at.window is None or at.window >= length_k)
    mask = None if square or not at.causal else _visible(length_q, length_k, at.window, at.ahead, q.device)
    grouped = q.shape[1] != k.shape[1]
    out = scaled_dot_product_attention(
        queries, keys, values, mask, is_causal=at.causal and mask is None, scale=scaling, enable_gqa=grouped
    )
    return out.transpose(1, 2).flatten(0, 1)


def _visible(length_q: int, length_k: int, window: int | None, ahead: Tensor | None, device: torch.device) -> Tensor:
    """Which keys the queries of causal segments see: ``(length_q, length_k)`` bool, or ``(S, 1, length_q, length_k)`` with
    ``ahead (S * length_k,)``. The last query is aligned with the last key.
    """
    keys = torch.arange(length_k, device=device)
    own = keys[length_k - length_q :, None]  # the key of each query
    last = (
        own if ahead is None else own + ahead.view(-1, 1, length_k)[..., length_k - length_q :].transpose(1, 2)[:, None]
    )
    seen = keys <= last
    return seen if window is None else seen & (keys > own - window)


SEGMENTS = "Tensor cu_q, Tensor cu_k, float? scaling, bool causal, SymInt? window=None, Tensor? ahead=None"
"""What the operator takes of `Segments`: no lengths, which a compiled layer would depend on."""


@torch.library.custom_op(
    "dataproto::segment_attention",
    mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor v, {SEGMENTS}) -> Tensor",
)
def segment_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, scaling: float | None, *rest: Any
) -> Tensor:
    """`segment_sdpa` as one operator, so that compiled layers do not depend on the lengths of the segments."""
    return segment_sdpa(q, k, v, Segments(cu_q, cu_k, None, None, *rest), scaling).contiguous()


@segment_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *others: Any, **_: Any) -> Tensor:
    return _output_like(q, v)


@torch.library.custom_op("dataproto::segment_attention_backward", mutates_args=())
def _segment_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    ahead: Tensor | None,
    scaling: float | None,
    causal: bool,
    window: int | None,
) -> Gradients:
    """The gradient of softmax attention, written out because autograd does not see inside an operator.

    The H query heads are H_kv groups (einsum index h) of G heads (g).
    """
    scale = q.shape[-1] ** -0.5 if scaling is None else scaling
    grad_q, grad_k, grad_v = q.new_zeros(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape)
    for length_q, length_k, q_index, k_index in equal_lengths(cu_q, cu_k):
        heads = (-1, length_q, k.shape[1], q.shape[1] // k.shape[1])
        queries, grad_out = (x[q_index].view(*heads, x.shape[2]) for x in (q, grad))
        keys, values = (x[k_index].unflatten(0, (-1, length_k)) for x in (k, v))
        scores = torch.einsum("sqhgd,skhd->shgqk", queries, keys).float() * scale
        if causal:
            own = None if ahead is None else ahead[k_index]
            seen = _visible(length_q, length_k, window, own, q.device)
            scores = scores.masked_fill(~(seen if own is None else seen[:, None]), float("-inf"))
        probs = scores.softmax(-1)
        grad_probs = torch.einsum("sqhgd,skhd->shgqk", grad_out, values).float()
        grad_scores = (probs * (grad_probs - (probs * grad_probs).sum(-1, keepdim=True)) * scale).to(q.dtype)
        grad_q[q_index] = torch.einsum("shgqk,skhd->sqhgd", grad_scores, keys).flatten(2, 3).flatten(0, 1)
        grad_k[k_index] = torch.einsum("shgqk,sqhgd->skhd", grad_scores, queries).flatten(0, 1)
        grad_v[k_index] = torch.einsum("shgqk,sqhgd->skhd", probs.to(q.dtype), grad_out).flatten(0, 1)
    return grad_q, grad_k, grad_v


def empty_output(q: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    """Output ``(T, H, D)`` and log-sum-exps ``(H, T)`` float32 without values, of an operator of flash attention."""
    return q.new_empty(q.shape), q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)


def empty_gradients(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> Gradients:
    """Gradients without values, of queries, keys and values: what compilation knows of an operator of attention."""
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def flash_operator(name: str, at: str, tensors: int, forward: Callable[..., Any], backward: Callable[..., Any]) -> Any:
    """An operator on CUDA from q, k and v to the output ``(T, H, D)`` and the log-sum-exp of the scores ``(H, T)``.

    Args:
        at: the types and names of its further arguments, of which the first ``tensors`` are tensors.
        forward: of all arguments.
        backward: from the gradient of the output, q, k, v, what ``forward`` returned, and the further arguments.
    """
    inputs = "Tensor q, Tensor k, Tensor v"
    options: dict[str, Any] = {"mutates_args": (), "device_types": "cuda"}
    operator = torch.library.custom_op(
        f"dataproto::{name}", forward, schema=f"({inputs}, {at}) -> (Tensor, Tensor)", **options
    )
    schema = f"(Tensor grad, {inputs}, Tensor out, Tensor log_sums, {at}) -> (Tensor, Tensor, Tensor)"
    gradient = torch.library.custom_op(f"dataproto::{name}_backward", backward, schema=schema, **options)
    operator.register_fake(empty_output)
    gradient.register_fake(empty_gradients)

    def keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        q, k, v, *others = inputs
        ctx.save_for_backward(q, k, v, *output, *others[:tensors])
        ctx.settings = others[tensors:]

    def gradients(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        return (*gradient(grad, *ctx.saved_tensors, *ctx.settings), *[None] * (tensors + len(ctx.settings)))

    operator.register_autograd(gradients, setup_context=keep)
    return operator


_segment_attention_backward.register_fake(empty_gradients)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, scaling, causal, window, ahead = inputs
    ctx.settings = scaling, causal, window
    ctx.save_for_backward(*tensors, ahead)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return (*_segment_attention_backward(grad, *ctx.saved_tensors, *ctx.settings), *[None] * 6)


segment_attention.register_autograd(_backward, setup_context=_setup_context)

"""The gated delta rule along packed rows as an operator that ``torch.compile`` calls without looking inside.

Its kernels choose sizes on the host and read lengths of pieces, which a compiled graph cannot. Without an operator the graph of
each layer would break there, and a checkpointed layer would not be compiled at all.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey

from workers.model.recurrent.packed_rule import packed_delta_rule
from workers.model.recurrent.pieces import Pieces


def delta_rule_along_rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    rate: Tensor,
    cu_seqlens: Tensor,
    key_cu_seqlens: Tensor | None,
    key_index: Tensor | None,
) -> Tensor:
    """`packed_delta_rule` along the rows with these boundaries; see `Pieces.of`. Compiled code calls the operator."""
    if torch.compiler.is_compiling():
        # The kernels want contiguous inputs: compiled code writes them so where it computes them, without a copy of its own.
        query, key, value = (x.contiguous() for x in (query, key, value))
        found: Tensor = _rule(query, key, value, decay, rate, cu_seqlens, key_cu_seqlens, key_index)
        return found
    return packed_delta_rule(query, key, value, decay, rate, Pieces.of(cu_seqlens, key_cu_seqlens, key_index))


@torch.library.custom_op("dataproto::delta_rule", mutates_args=())
def _rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    rate: Tensor,
    cu_seqlens: Tensor,
    key_cu_seqlens: Tensor | None,
    key_index: Tensor | None,
) -> Tensor:
    pieces = Pieces.of(cu_seqlens, key_cu_seqlens, key_index)
    return packed_delta_rule(query, key, value, decay, rate, pieces).contiguous()


@_rule.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *_: Tensor | None) -> Tensor:
    return torch.empty_like(value, memory_format=torch.contiguous_format)


@torch.library.custom_op("dataproto::delta_rule_backward", mutates_args=())
def _rule_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    rate: Tensor,
    cu_seqlens: Tensor,
    key_cu_seqlens: Tensor | None,
    key_index: Tensor | None,
) -> list[Tensor]:
    """Gradients of the first five inputs. The forward pass runs again: the kernels keep what they need in their own graph."""
    inputs = query, key, value, decay, rate = [x.detach().requires_grad_() for x in (query, key, value, decay, rate)]
    with _recording():
        out = packed_delta_rule(query, key, value, decay, rate, Pieces.of(cu_seqlens, key_cu_seqlens, key_index))
        found = torch.autograd.grad(out, inputs, gradient)
    return [each.contiguous() for each in found]


@_rule_backward.register_fake
def _(gradient: Tensor, *inputs: Tensor) -> list[Tensor]:
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs[:5]]


def _keep_inputs(ctx: Any, inputs: tuple[Tensor | None, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gradients(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    return (*_rule_backward(gradient, *ctx.saved_tensors), None, None, None)


_rule.register_autograd(_gradients, setup_context=_keep_inputs)


@contextmanager
def _recording() -> Iterator[None]:
    """Records operations for a backward pass inside an operator, where torch has switched that off."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in (
        DispatchKey.AutogradFunctionality,
        DispatchKey.AutogradOther,
        DispatchKey.AutogradCPU,
        DispatchKey.AutogradCUDA,
        DispatchKey.ADInplaceOrView,
    ):
        excluded = excluded.remove(key)
    with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded), torch.enable_grad():
        yield

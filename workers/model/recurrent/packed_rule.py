"""Recurrences over the pieces of a packed sequence: the gated delta rule and a causal convolution.

Letters: T packed tokens, C channels, W the convolution's width, H heads, D key size, E value size.
"""

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from logging import getLogger

import torch
from torch import Tensor
from torch.nn.functional import conv1d, embedding, pad
from torch.nn.utils.rnn import pad_sequence

from workers.model.recurrent.delta_rule import gated_delta_rule
from workers.model.recurrent.pieces import Level, Pieces

log = getLogger(__name__)

Rule = Callable[[tuple[Tensor, ...], list[int], Tensor | None, bool], tuple[Tensor, Tensor | None]]
"""``(inputs of n tokens, lengths of pieces, their first states, whether final states are wanted) -> (outputs, final states)``."""


def packed_convolution(x: Tensor, weight: Tensor, pieces: Pieces) -> Tensor:
    """A causal convolution of each channel ``(T, C)`` along its row; before a row's first token there are zeros.

    Args:
        x: ``(T, C)``.
        weight: ``(C, W)``; the last one is the token's own.
    """
    width, weight = weight.shape[1], weight.to(x.dtype)
    out = conv1d(pad(x.t(), (width - 1, 0))[None], weight[:, None], groups=len(weight))[0].t()
    chosen, read = pieces.taps(width)
    if not len(chosen):
        return out
    window = embedding(read.clamp_min(0), x) * (read >= 0)[..., None]  # (m, W, C)
    return out.index_copy(0, chosen, (window * weight.t()).sum(1).to(out.dtype))


def packed_delta_rule(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, rate: Tensor, pieces: Pieces) -> Tensor:
    """`gated_delta_rule` along the rows of a packed sequence; a prompt that rows share is computed once.

    Args:
        query, key: ``(T, H, D)``; value: ``(T, H, E)``; decay and rate: ``(T, H)``.

    Returns:
        ``(T, H, E)`` in the dtype of ``value``.
    """
    rule: Rule = _by_fla if query.device.type == "cuda" and has_fla() else _by_length
    inputs = query, key, value, decay, rate
    states: Tensor | None = None  # of all pieces of earlier levels
    outputs = []
    levels = pieces.levels
    for number, level in enumerate(levels):
        mine = inputs if len(levels) == 1 else tuple(x.index_select(0, level.tokens) for x in inputs)
        first = None if states is None or level.starts is None else embedding(level.starts, states.flatten(1))
        if first is not None and states is not None:
            first = first.unflatten(1, states.shape[1:])
        more = number + 1 < len(levels)
        out, final = rule(mine, level.lengths, first, more)
        outputs.append(out)
        if final is not None:
            states = final if states is None else torch.cat([states, final])
    if len(levels) == 1:
        return outputs[0]
    return torch.empty_like(value).index_copy(0, _tokens(levels), torch.cat(outputs))


def _tokens(levels: list[Level]) -> Tensor:
    return torch.cat([level.tokens for level in levels])


def _by_length(
    inputs: tuple[Tensor, ...], lengths: list[int], first: Tensor | None, wants_final: bool
) -> tuple[Tensor, Tensor | None]:
    """Pieces of similar lengths together, in plain torch; see `Rule`."""
    groups: dict[int, list[int]] = {}
    for piece, length in enumerate(lengths):
        groups.setdefault(max(length - 1, 7).bit_length(), []).append(piece)
    pieces = [x.split(lengths) for x in inputs]
    value = inputs[2]
    shape = (value.shape[1], inputs[1].shape[-1], value.shape[-1])
    outputs: list[Tensor] = [value] * len(lengths)
    finals: list[Tensor] = [value] * len(lengths)
    for members in groups.values():
        q, k, v, g, b = (pad_sequence([parts[piece] for piece in members], batch_first=True) for parts in pieces)
        if first is None:
            state = torch.zeros(len(members), *shape, dtype=torch.float32, device=value.device)
        else:
            state = first[torch.tensor(members, device=value.device)]
        out, final = gated_delta_rule(q, k, v, g, b, state)
        for row, piece in enumerate(members):
            outputs[piece], finals[piece] = out[row, : lengths[piece]], final[row]
    return torch.cat(outputs), torch.stack(finals) if wants_final else None


def _by_fla(
    inputs: tuple[Tensor, ...], lengths: list[int], first: Tensor | None, wants_final: bool
) -> tuple[Tensor, Tensor | None]:
    """All pieces together, by the variable-length kernels of ``flash-linear-attention``; see `Rule`."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    query, key, value, decay, rate = (x.unsqueeze(0) for x in inputs)
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    out, final = chunk_gated_delta_rule(
        query,
        key,
        value,
        g=decay,
        beta=rate,
        initial_state=first,
        output_final_state=wants_final,
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=bounds.to(value.device, non_blocking=True),
        cu_seqlens_cpu=bounds,
    )
    return out[0], final


@cache
def has_fla() -> bool:
    """Whether ``flash-linear-attention`` is installed. Without it, a warning says how to get it."""
    found = find_spec("fla") is not None
    if not found:
        log.warning(
            "recurrent layers run in plain torch, many times slower than by the kernels of flash-linear-attention: "
            'pip install "dataproto-vlm[fla]"'
        )
    return found

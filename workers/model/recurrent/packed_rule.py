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

from dataproto.transfer import move
from workers.model.recurrent.delta_rule import gated_delta_rule
from workers.model.recurrent.pieces import Level, Pieces

log = getLogger(__name__)

Rule = Callable[[tuple[Tensor, ...], Level, Tensor | None, bool], tuple[Tensor, Tensor | None]]
"""``(inputs of n tokens, their pieces, first states of these, whether final states are wanted) -> (outputs, final states)``."""


def packed_convolution(x: Tensor, weight: Tensor, chosen: Tensor, read: Tensor) -> Tensor:
    """A causal convolution of each channel ``(T, C)`` along its row; before a row's first token there are zeros.

    Args:
        x: ``(T, C)``.
        weight: ``(C, W)``; the last one is the token's own.
        chosen, read: see `Pieces.taps`.
    """
    weight = weight.to(x.dtype)
    out = _shifted_sum(x, weight) if torch.compiler.is_compiling() else _convolution(x, weight)
    if not len(chosen):
        return out
    window = embedding(read.clamp_min(0), x) * (read >= 0)[..., None]  # (m, W, C)
    return out.index_copy(0, chosen, (window * weight.t()).sum(1).to(out.dtype))


def _convolution(x: Tensor, weight: Tensor) -> Tensor:
    """The convolution as if all tokens were one row."""
    return conv1d(pad(x.t(), (weight.shape[1] - 1, 0))[None], weight[:, None], groups=len(weight))[0].t()


def _shifted_sum(x: Tensor, weight: Tensor) -> Tensor:
    """`_convolution` as a sum of shifted copies: ``torch.compile`` makes one kernel of it, several times as fast as torch's."""
    total, width = len(x), weight.shape[1]
    wide = pad(x, (0, 0, width - 1, 0))
    parts = [wide.narrow(0, tap, total).float() * weight[:, tap].float() for tap in range(width)]
    return torch.stack(parts).sum(0).to(x.dtype)


def packed_delta_rule(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, rate: Tensor, pieces: Pieces) -> Tensor:
    """`gated_delta_rule` along the rows of a packed sequence; a prompt that rows share is computed once.

    Args:
        query, key: ``(T, K, D)``, each for H / K heads of the values; value: ``(T, H, E)``; decay and rate: ``(T, H)``.

    Returns:
        ``(T, H, E)`` in the dtype of ``value``.
    """
    rule = _rule_for(query.device.type, value.dtype)
    if rule is _by_length and (repeats := value.shape[1] // key.shape[1]) > 1:
        query, key = (x.repeat_interleave(repeats, dim=1) for x in (query, key))
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
        out, final = rule(mine, level, first, more)
        outputs.append(out)
        if final is not None:
            states = final if states is None else torch.cat([states, final])
    if len(levels) == 1:
        return outputs[0]
    return torch.empty_like(value).index_copy(0, _tokens(levels), torch.cat(outputs))


def _rule_for(device_type: str, dtype: torch.dtype) -> Rule:
    """The kernels for half precision on CUDA; they compute products of float32 in TF32, which keeps three digits."""
    return _by_fla if device_type == "cuda" and dtype != torch.float32 and has_fla() else _by_length


def _tokens(levels: list[Level]) -> Tensor:
    return torch.cat([level.tokens for level in levels])


def _by_length(
    inputs: tuple[Tensor, ...], level: Level, first: Tensor | None, wants_final: bool
) -> tuple[Tensor, Tensor | None]:
    """Pieces of similar lengths together, in plain torch; see `Rule`."""
    lengths = level.lengths
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
            state = first[move(torch.tensor(members), value.device)]
        out, final = gated_delta_rule(q, k, v, g, b, state)
        for row, piece in enumerate(members):
            outputs[piece], finals[piece] = out[row, : lengths[piece]], final[row]
    return torch.cat(outputs), torch.stack(finals) if wants_final else None


def _by_fla(
    inputs: tuple[Tensor, ...], level: Level, first: Tensor | None, wants_final: bool
) -> tuple[Tensor, Tensor | None]:
    """All pieces together, by the variable-length kernels of ``flash-linear-attention``; see `Rule`."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    query, key, value, decay, rate = (x.unsqueeze(0) for x in inputs)
    out, final = chunk_gated_delta_rule(
        query,
        key,
        value,
        g=decay,
        beta=rate,
        initial_state=first,
        output_final_state=wants_final,
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=level.bounds_on_device,
        cu_seqlens_cpu=level.bounds,
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

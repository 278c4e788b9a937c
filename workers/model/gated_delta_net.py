"""The mixer of Qwen3.5's recurrent layers, Gated DeltaNet (arXiv:2412.06464), over packed rows and a part of the heads.

Projections and the gated norm are computed token by token, by the model's own modules. Convolution and recurrence run along the
rows of the packed sequence, where each head is on its own: so ranks share them by heads, as they share attention. Under Ulysses
an all-to-all turns "my tokens, all heads" into "all tokens, my heads" and back; no state travels between ranks.

The rule is computed in plain torch, in chunks, over pieces of equal length, or by the kernels of ``flash-linear-attention``. It
is an operator that ``torch.compile`` calls without looking inside: its kernels choose sizes on the host and read lengths of
pieces, which a compiled graph cannot. Without an operator the graph of each layer would break there, and a checkpointed layer
would not be compiled at all.

Letters: N rows, L tokens, H heads, D key size, E value size, C tokens of a chunk; T packed tokens. Of the convolution: C
channels, W its width.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from logging import getLogger
from types import MethodType
from typing import Any

import torch
from packaging.version import Version
from torch import Tensor, nn
from torch._C import DispatchKey
from torch.nn.functional import conv1d, embedding, pad, silu, softplus
from torch.nn.utils.rnn import pad_sequence
from transformers import Cache

from dataproto.errors import MissingPackage, UnsupportedAttention
from dataproto.grouping import grouped_by
from dataproto.transfer import move
from dataproto.vlm import VLMFamily
from workers.model.patches import replace_forward, set_on_module
from workers.model.pieces import Level, Pieces
from workers.ranks.autograd_collectives import Peers, exchange

CHUNK = 64
"""Tokens whose updates are computed by matrix products at a time."""
EPS = 1e-6


def gated_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, rate: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Writes values under keys to a state and reads them by queries, token after token.

    With ``S`` the state ``(D, E)`` of a head, ``a = exp(decay)``, and keys and queries of unit length, a token does
    (arXiv:2412.06464, equation 10)::

        S = a * S;  S = S + rate * key (value - key^T S);  out = query^T S / sqrt(D)

    Args:
        query, key: ``(N, L, H, D)``; they are normalized here.
        value: ``(N, L, H, E)``.
        decay: ``(N, L, H)``, at most 0; rate: ``(N, L, H)``. A token with both 0 leaves the state as it is.
        state: ``(N, H, D, E)`` float32 at the start.

    Returns:
        Outputs ``(N, L, H, E)`` in the dtype of ``value``, and the final state float32.
    """
    dtype, length = value.dtype, value.shape[1]
    chunk = min(CHUNK, max(length, 1))
    query, key = (_unit_length(x) for x in (query, key))
    query = query * query.shape[-1] ** -0.5
    q, k, v = (_chunks(x.float(), chunk) for x in (query, key, value))  # (N, H, chunks, C, .)
    g, b = (_chunks(x.float().unsqueeze(-1), chunk) for x in (decay, rate))  # (N, H, chunks, C, 1)

    total = g.cumsum(-2)  # log of the decay from the start of the chunk
    between = _decays_between(g)
    system = (k * b) @ k.transpose(-1, -2) * between
    # Each token's correction depends on those before it in the chunk: a triangular system (section 3.3 of the paper).
    both = torch.linalg.solve_triangular(
        system, torch.cat([v * b, k * b * total.exp()], dim=-1), upper=False, unitriangular=True
    )
    written, erased = both.split([v.shape[-1], k.shape[-1]], dim=-1)
    inside = q @ k.transpose(-1, -2) * between
    reads, left = q * total.exp(), between[..., -1:, :]
    keys, whole = k.transpose(-1, -2) * left, total[..., -1:, :].exp()
    outputs = []
    for place in range(q.shape[2]):
        new = written[:, :, place] - erased[:, :, place] @ state
        outputs.append(reads[:, :, place] @ state + inside[:, :, place] @ new)
        state = state * whole[:, :, place] + keys[:, :, place] @ new
    return torch.stack(outputs, dim=2).flatten(2, 3)[:, :, :length].transpose(1, 2).to(dtype), state


def _decays_between(g: Tensor) -> Tensor:
    """The decay from token j to token i of a chunk, ``(.., C, C)``, 0 for j > i; ``g`` are logs of each token's, ``(.., C, 1)``.

    Their logs are sums over the tokens after j up to i, as in Mamba-2's segmented sum (arXiv:2405.21060, listing 1).
    Differences of sums from the start of the chunk would cost digits, most of them in gradients where the decay is strong.
    """
    after = torch.ones(g.shape[-2], g.shape[-2], dtype=torch.bool, device=g.device).tril(-1)  # i > j
    sums = torch.where(after, g, 0.0).cumsum(-2)
    return sums.masked_fill(after.transpose(-1, -2), -torch.inf).exp()


def _unit_length(x: Tensor) -> Tensor:
    x = x.float()
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + EPS)


def _chunks(x: Tensor, chunk: int) -> Tensor:
    """``(N, L, H, .)`` to ``(N, H, chunks, C, .)``, with zeros after the last token."""
    x = pad(x.transpose(1, 2), (0, 0, 0, -x.shape[1] % chunk))
    return x.unflatten(2, (-1, chunk))


log = getLogger(__name__)

Ruled = tuple[Tensor, Tensor | None]
"""The outputs, and the final states if they are wanted."""
Rule = Callable[[tuple[Tensor, ...], Level, Tensor | None, bool], Ruled]
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
        out, final = rule(mine, level, first, number + 1 < len(levels))
        outputs.append(out)
        if final is not None:
            states = final if states is None else torch.cat([states, final])
    if len(levels) == 1:
        return outputs[0]
    return torch.empty_like(value).index_copy(0, torch.cat([level.tokens for level in levels]), torch.cat(outputs))


def _rule_for(device_type: str, dtype: torch.dtype) -> Rule:
    """The kernels for half precision on CUDA; they compute products of float32 in TF32, which keeps three digits."""
    return _by_fla if device_type == "cuda" and dtype != torch.float32 and has_fla() else _by_length


def _by_length(inputs: tuple[Tensor, ...], level: Level, first: Tensor | None, wants_final: bool) -> Ruled:
    """Pieces of similar lengths together, in plain torch; see `Rule`."""
    lengths = level.lengths
    groups = grouped_by(range(len(lengths)), lambda piece: max(lengths[piece] - 1, 7).bit_length())
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


def _by_fla(inputs: tuple[Tensor, ...], level: Level, first: Tensor | None, wants_final: bool) -> Ruled:
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


def check_kernels() -> None:
    """Checks that flash-linear-attention has gradients here: on Hopper with Triton 3.4 to 3.7.0 it refuses its backward pass.

    Raises:
        MissingPackage: ``tilelang``, with which it computes them there, is not installed.
    """
    if find_spec("fla") is None or find_spec("tilelang") is not None or not torch.cuda.is_available():
        return
    triton = Version(version("triton"))
    if torch.cuda.get_device_capability()[0] == 9 and Version("3.4") <= triton < Version("3.7.1"):
        raise MissingPackage(
            f"flash-linear-attention computes no gradients on this GPU with Triton {triton}: pip install tilelang, or a torch "
            "from 2.12 on, which brings Triton 3.7.1"
        )


def delta_rule_along_rows(*inputs: Tensor | None) -> Tensor:
    """`packed_delta_rule` of its tensors along the rows with the boundaries of `Pieces.of`. Compiled code calls the operator."""
    if torch.compiler.is_compiling():
        # The kernels want contiguous inputs: compiled code writes them so where it computes them, without a copy of its own.
        return _rule(*(x.contiguous() for x in inputs[:5] if x is not None), *inputs[5:])
    return _along_rows(*inputs)


def _along_rows(*inputs: Any) -> Tensor:
    query, key, value, decay, rate, *bounds = inputs
    return packed_delta_rule(query, key, value, decay, rate, Pieces.of(*bounds))


ALONG_ROWS = (
    "Tensor query, Tensor key, Tensor value, Tensor decay, Tensor rate, Tensor cu_seqlens, Tensor? key_cu_seqlens, "
    "Tensor? key_index"
)
"""What the operator and its gradient take of `packed_delta_rule` and `Pieces.of`."""


@torch.library.custom_op("dataproto::delta_rule", mutates_args=(), schema=f"({ALONG_ROWS}) -> Tensor")
def _rule(*inputs: Any) -> Tensor:
    return _along_rows(*inputs).contiguous()


@_rule.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *_: Tensor | None) -> Tensor:
    return torch.empty_like(value, memory_format=torch.contiguous_format)


@torch.library.custom_op(
    "dataproto::delta_rule_backward", mutates_args=(), schema=f"(Tensor gradient, {ALONG_ROWS}) -> Tensor[]"
)
def _rule_backward(gradient: Tensor, *inputs: Any) -> list[Tensor]:
    """Gradients of the first five inputs. The forward pass runs again: the kernels keep what they need in their own graph."""
    tracked = [x.detach().requires_grad_() for x in inputs[:5]]
    with _recording():
        found = torch.autograd.grad(_along_rows(*tracked, *inputs[5:]), tracked, gradient)
    return [each.contiguous() for each in found]


@_rule_backward.register_fake
def _(gradient: Tensor, *inputs: Tensor) -> list[Tensor]:
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs[:5]]


def _gradients(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    return (*_rule_backward(gradient, *ctx.saved_tensors), None, None, None)


_rule.register_autograd(_gradients, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))


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


@dataclass(frozen=True)
class HeadShare:
    """This rank's part of a mixer's heads: part number ``rank`` of ``size``."""

    rank: int = 0
    size: int = 1

    def inside(self, other: "HeadShare") -> "HeadShare":
        """This part of another part."""
        return HeadShare(other.rank * self.size + self.rank, other.size * self.size)

    def of(self, count: int) -> range:
        """Its places among ``count``."""
        share = count // self.size
        return range(self.rank * share, (self.rank + 1) * share)


Bounds = tuple[Tensor, Tensor | None, Tensor | None]
"""``cu_seq_lens_q``, ``cu_seq_lens_k`` and ``key_index``."""
Taps = tuple[Tensor, Tensor]
"""What `Pieces.taps` returns."""


def packed_gated_delta_net(
    mixer: Any,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    key_index: Tensor | None = None,
    peers: Peers | None = None,
    taps: Taps | None = None,
    **others: Any,
) -> Tensor:
    """The forward of a ``Qwen3_5GatedDeltaNet`` over packed rows: mixed states ``(1, S, H)`` of ``hidden_states (1, S, H)``.

    Args:
        mixer: its ``head_share`` says which heads its projections compute.
        cu_seq_lens_q, cu_seq_lens_k, key_index: as in `workers.model.attention.packed_attention`.
        peers: ranks that have the other tokens of the sequence.
        taps: `Pieces.taps` of these boundaries; by default they are computed here, which ``torch.compile`` cannot follow.

    Raises:
        UnsupportedAttention: there is a mask or a cache, or the boundaries are missing.
    """
    cached = any(isinstance(each, Cache) for each in others.values())  # its name depends on the version of transformers
    if cached or attention_mask is not None or cu_seq_lens_q is None:
        raise UnsupportedAttention(
            "packed recurrent layers need cu_seq_lens_q and take no mask or cache; for padded batches load a separate model"
        )
    parts = [projection(hidden_states)[0] for projection in (mixer.in_proj_qkv, mixer.in_proj_b, mixer.in_proj_a)]
    gate = mixer.in_proj_z(hidden_states)[0]
    share: HeadShare = mixer.head_share
    if peers is not None:
        parts = _all_tokens(mixer, parts, peers)
        share = HeadShare(peers.rank, peers.size).inside(share)
    out = _mix(mixer, parts, share, (cu_seq_lens_q, cu_seq_lens_k, key_index), taps)  # (T, h, E)
    if peers is not None:
        out = exchange(out.unflatten(0, (peers.size, -1)), peers).transpose(0, 1).flatten(1, 2)  # (S, heads, E)
    normed = gated_norm(out, gate.view(out.shape), mixer.norm.weight, mixer.layer_norm_epsilon)
    return mixer.out_proj(normed.view(1, len(gate), -1))


def _all_tokens(mixer: Any, parts: list[Tensor], peers: Peers) -> list[Tensor]:
    """From this rank's tokens ``(S, .)`` of all channels to all tokens ``(T, .)`` of this rank's part, by one message."""
    qkv, rate, step = parts
    keys = mixer.key_dim // mixer.head_share.size
    split = [*qkv.split([keys, keys, qkv.shape[1] - 2 * keys], dim=1), rate, step]
    by_rank = [x.unflatten(1, (peers.size, -1)) for x in split]  # (S, ranks, .)
    widths = [x.shape[-1] for x in by_rank]
    sent = torch.cat(by_rank, dim=-1).transpose(0, 1).contiguous()
    received = exchange(sent, peers).flatten(0, 1)
    *qkv_parts, rate, step = received.split(widths, dim=1)
    return [torch.cat(qkv_parts, dim=1), rate, step]


def _mix(mixer: Any, parts: list[Tensor], share: HeadShare, bounds: Bounds, taps: Taps | None) -> Tensor:
    """Values ``(T, h, E)`` that the heads of ``share`` read, from their projections ``(T, .)``."""
    qkv, rate, step = parts
    weight = channels(mixer, mixer.conv1d.weight.squeeze(1), share)
    if taps is None:
        taps = Pieces.of(*bounds).taps(weight.shape[1])
    mixed = silu(packed_convolution(qkv, weight, *taps))
    keys, values = share.of(mixer.num_k_heads), share.of(mixer.num_v_heads)
    width = len(keys) * mixer.head_k_dim
    query, key, value = mixed.split([width, width, len(values) * mixer.head_v_dim], dim=1)
    query, key = (x.unflatten(1, (len(keys), -1)) for x in (query, key))
    value = value.unflatten(1, (len(values), -1))
    here = slice(values.start, values.stop)
    decay = -mixer.A_log[here].float().exp() * softplus(step.float() + mixer.dt_bias[here].float())
    return delta_rule_along_rows(query, key, value, decay, rate.float().sigmoid(), *bounds)


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """``x (T, h, E)`` normalized over its last dimension, in float32, times ``weight (E,)`` and silu of ``gate (T, h, E)``."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    return (weight * normed.to(x.dtype) * silu(gate.float())).to(x.dtype)


def channels(mixer: Any, weight: Tensor, share: HeadShare) -> Tensor:
    """The rows of ``weight (C, .)``, one for each channel of queries, keys and values, that belong to a part of the heads."""
    if share.size == 1:
        return weight
    keys, values = share.of(mixer.num_k_heads), share.of(mixer.num_v_heads)
    parts = [
        weight.narrow(0, begin + heads.start * size, len(heads) * size)
        for begin, heads, size in (
            (0, keys, mixer.head_k_dim),
            (mixer.key_dim, keys, mixer.head_k_dim),
            (2 * mixer.key_dim, values, mixer.head_v_dim),
        )
    ]
    return torch.cat(parts)


def use_packed_recurrence(model: nn.Module, family: VLMFamily) -> None:
    """Makes the recurrent layers of ``model``, if its family has some, run over packed rows.

    The forward is a method of each layer, not an object of its own: so one compiled code serves all layers.

    Raises:
        MissingPackage: see `check_kernels`.
    """
    mixers = family.recurrent_modules(model).values()
    if mixers:
        check_kernels()
    for mixer in mixers:
        set_on_module(mixer, "head_share", HeadShare())
        replace_forward(mixer, MethodType(packed_gated_delta_net, mixer))

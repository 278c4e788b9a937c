"""The gated delta rule (Gated DeltaNet, arXiv:2412.06464) over rows of equal length, in plain torch, in chunks.

Letters: N rows, L tokens, H heads, D key size, E value size, C tokens of a chunk.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

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
    out = torch.stack(outputs, dim=2).flatten(2, 3)[:, :, :length]
    return out.transpose(1, 2).to(dtype), state


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
    """``(N, L, H, .)`` to ``(N, H, chunks, C, .)``, with zeros behind the last token."""
    x = pad(x.transpose(1, 2), (0, 0, 0, -x.shape[1] % chunk))
    return x.unflatten(2, (-1, chunk))

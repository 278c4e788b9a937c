"""What the head of a model that predicts the token after the next one computes over packed rows.

The head reads pairs: a token, and the state of the token before it. The first token of a prompt is in no pair. Pairs are packed
as the tokens are: those of a shared prompt once, before the pairs of each of its responses, the first of which has the state of
the prompt's last token.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dataproto.packing import PackedRows, boundaries
from dataproto.transfer import move, on_host
from dataproto.vlm import VLMFamily
from workers.model.pieces import previous_tokens


@dataclass(frozen=True)
class Pairs:
    """The pairs of packed rows. Letters: T tokens, S pairs, K keys, N response tokens."""

    tokens: Tensor  # (S,) index into T of the token of each pair
    before: Tensor  # (S,) index into T of the token before it in its row
    cu_seqlens: Tensor  # (segments + 1,) int32
    max_length: int
    key_index: Tensor  # (K,) index into S
    key_cu_seqlens: Tensor  # (segments + 1,) int32
    key_max_length: int
    predictors: Tensor  # (N,) index into S of the pair that predicts each response token; 0 where there is none
    predicted: Tensor  # (N,) bool; false where the response token is the second token of its row

    @classmethod
    def of(cls, rows: PackedRows) -> "Pairs":
        """Computed on the host, from what is read there of the ``rows``, on their device.

        >>> from dataproto.packing import pack_rows
        >>> ids, mask = torch.tensor([[5, 6, 7, 8], [5, 6, 9, 0]]), torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]])
        >>> shared = torch.tensor([False, True])
        >>> rows = pack_rows(ids, mask, mask.cumsum(1) - 1, torch.tensor([[1, 1], [1, 0]]), None, shared)
        >>> rows.input_ids.tolist(), Pairs.of(rows).tokens.tolist(), Pairs.of(rows).before.tolist()
        ([[5, 6, 7, 8, 9]], [1, 2, 3, 4], [0, 1, 2, 1])
        >>> Pairs.of(rows).key_index.tolist(), Pairs.of(rows).key_cu_seqlens.tolist(), Pairs.of(rows).predictors.tolist()
        ([0, 1, 2, 0, 3], [0, 3, 5], [0, 1, 0])
        """
        device = rows.input_ids.device
        bounds, key_bounds = on_host(rows.cu_seqlens).long(), on_host(rows.key_cu_seqlens).long()
        keys = torch.arange(rows.input_ids.shape[-1]) if rows.key_index is None else on_host(rows.key_index)
        before = previous_tokens(bounds, key_bounds, keys)
        paired = before >= 0
        places = paired.cumsum(0) - 1  # of each token among the pairs
        lengths = _sums(paired, bounds)
        used = lengths > 0  # segments of one token have no pair
        key_lengths = _sums(paired[keys], key_bounds)
        owner = torch.repeat_interleave(torch.arange(len(used)), key_bounds.diff())
        chosen = paired[keys] & used[owner]
        predictors = on_host(rows.predictors)
        cu_seqlens, longest = boundaries(lengths[used])
        key_cu_seqlens, key_longest = boundaries(key_lengths[used])
        found = {
            "tokens": paired.nonzero().squeeze(1),
            "before": before[paired],
            "cu_seqlens": cu_seqlens,
            "key_index": places[keys[chosen]],
            "key_cu_seqlens": key_cu_seqlens,
            "predictors": places[predictors].clamp_min(0),
            "predicted": paired[predictors],
        }
        moved: dict[str, Any] = {name: move(value, device) for name, value in found.items()}
        return cls(**moved, max_length=longest, key_max_length=key_longest)


def _sums(chosen: Tensor, bounds: Tensor) -> Tensor:
    """How many of ``chosen (n,)`` bool are true between each two of the ``bounds``."""
    return torch.nn.functional.pad(chosen.cumsum(0), (1, 0))[bounds].diff()


def predicted_states(
    model: Any, family: VLMFamily, embeddings: Tensor, hidden: Tensor, rows: PackedRows
) -> tuple[Tensor, Tensor]:
    """Outputs ``(N, H)`` of the head ``model.mtp`` that predict the rows' response tokens, and which ``(N,)`` it predicts.

    Gradients reach the head only: ``embeddings (1, T, H)`` and the final states ``hidden (1, T, H)`` are taken as given.
    """
    pairs = Pairs.of(rows)
    outputs: Tensor = model.mtp(
        model.get_submodule(family.language_model).rotary_emb,
        embeddings.detach()[:, pairs.tokens],
        hidden.detach()[:, pairs.before],
        rows.position_ids[..., pairs.before],
        cu_seq_lens_q=pairs.cu_seqlens,
        cu_seq_lens_k=pairs.key_cu_seqlens,
        max_length_q=pairs.max_length,
        max_length_k=pairs.key_max_length,
        key_index=pairs.key_index,
    )
    return outputs[0].index_select(0, pairs.predictors), pairs.predicted

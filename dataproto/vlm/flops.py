"""Floating-point operations of one forward pass, from sizes alone; a multiplication and an addition count as two.

Linear layers: ``2 * tokens * in * out``. Attention: ``4 * heads * head_dim`` for each pair (query, key) that attends,
which is ``n (n + 1) / 2`` in a causal segment of n tokens and ``n * n`` in a vision frame or window. Norms,
activations, rotary embeddings, softmax and the embedding look-up are left out. A training step takes three forwards
(four with recomputation).
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Flops:
    """Operations of a forward pass by part; ``lm_head`` for the tokens whose logits are computed."""

    vision_linear: int = 0
    vision_attention: int = 0
    language_linear: int = 0
    language_attention: int = 0
    lm_head: int = 0

    @property
    def vision(self) -> int:
        """The vision tower with its mergers."""
        return self.vision_linear + self.vision_attention

    @property
    def language(self) -> int:
        """Decoder layers and the output projection."""
        return self.language_linear + self.language_attention + self.lm_head

    @property
    def total(self) -> int:
        """Everything."""
        return self.vision + self.language


def attention_width(text: Any) -> int:
    """``heads * head_dim`` of the decoder."""
    return int(text.num_attention_heads) * head_dim(text)


def head_dim(text: Any) -> int:
    """Size of one attention head of the decoder."""
    return int(getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)


def dense_layer_weights(text: Any, layer: int) -> int:
    """Weights that one token meets in the linear layers of a decoder layer with a gated MLP."""
    return attention_weights(text) + 3 * int(text.hidden_size * text.intermediate_size)


def attention_weights(text: Any) -> int:
    """Weights of the query, key, value and output projections of one decoder layer."""
    return int(text.hidden_size) * (2 * attention_width(text) + 2 * int(text.num_key_value_heads) * head_dim(text))


def language_flops(text: Any, layer_weights: list[int], lengths: Tensor) -> Tensor:
    """The decoder layers on causal segments of ``lengths (B,)`` tokens: operations ``(B, 2)`` int64 of linear layers and
    attention, by segment.
    """
    pairs = lengths * (lengths + 1) // 2
    return torch.stack(
        [2 * sum(layer_weights) * lengths, 4 * attention_width(text) * len(layer_weights) * pairs], dim=1
    )


def logit_flops(text: Any) -> int:
    """The output projection of one token."""
    return 2 * int(text.hidden_size * text.vocab_size)


def patch_weights(vision: Any, width: int) -> int:
    """Weights of the patch embedding."""
    return int(vision.in_channels * vision.temporal_patch_size * vision.patch_size**2) * width


def merger_weights(vision: Any, width: int, out: int) -> int:
    """Weights of one merger, of which a merged token (``spatial_merge_size ** 2`` patches) meets each once."""
    merged = width * int(vision.spatial_merge_size) ** 2
    return merged * merged + merged * out


def frame_pairs(grids: Tensor) -> Tensor:
    """Pairs of patches that attend in a block of full attention within each frame of ``grids (N, 3)``: ``(N,)``."""
    return grids[:, 0] * (grids[:, 1] * grids[:, 2]) ** 2


def window_pairs(grids: Tensor, window: int) -> Tensor:
    """Pairs ``(N,)`` in a block of attention within windows of ``window`` x ``window`` patches, smaller at the lower and
    right edges.

    >>> window_pairs(torch.tensor([[1, 6, 4]]), window=4)  # a window of 16 patches and one of 8
    tensor([320])
    """
    squares = (grids[:, 1:] // window) * window**2 + (grids[:, 1:] % window) ** 2
    return grids[:, 0] * squares.prod(-1)


def vision_flops(
    grids: Tensor, patch: int, block: int, merger: int, merge_size: int, width: int, pairs: list[Tensor]
) -> Tensor:
    """A tower of ``len(pairs)`` blocks: weights met by a patch at the embedding, in a block, and by a merged token in
    mergers; pairs ``(N,)`` that attend in each block. Operations ``(N, 2)`` int64 of linear layers and attention, by grid.
    """
    patches = grids.prod(-1)
    linear = patches * (patch + len(pairs) * block) + patches // merge_size**2 * merger
    return torch.stack([2 * linear, 4 * width * torch.stack(pairs).sum(0)], dim=1)


def grids_of(*grids: Tensor | None) -> Tensor:
    """All grids ``(N, 3)`` int64 of a batch in one tensor."""
    present = [grid.long().cpu() for grid in grids if grid is not None]
    return torch.cat(present) if present else torch.zeros(0, 3, dtype=torch.int64)

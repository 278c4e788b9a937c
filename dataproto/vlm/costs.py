"""Floating-point operations of one forward pass, computed only from sizes. One multiply-add counts as two operations.

A linear layer takes ``2 * tokens * in * out`` operations. Attention takes ``4 * heads * head_dim`` for each pair of a query and
a key that it attends to: ``n * (n + 1) / 2`` pairs in a causal segment of n tokens, ``n * n`` in a vision frame or window.
Norms, activations, rotary embeddings, softmax and the embedding lookup are not counted. A training step costs three forward
passes (four with recomputation).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from dataproto.columns import RowMedia, media_identity


@dataclass(frozen=True)
class Flops:
    """Operations of a forward pass by part. ``lm_head`` covers the tokens whose logits are computed."""

    vision_linear: int = 0
    vision_attention: int = 0
    language_linear: int = 0
    language_attention: int = 0
    lm_head: int = 0

    @property
    def vision(self) -> int:
        """Vision tower and mergers."""
        return self.vision_linear + self.vision_attention

    @property
    def language(self) -> int:
        """Decoder layers and output projection."""
        return self.language_linear + self.language_attention + self.lm_head

    @property
    def total(self) -> int:
        """All parts."""
        return self.vision + self.language


# Language model: ``text`` is the text config.


def head_dim(text: Any) -> int:
    """Size of the queries of one attention head of the decoder; the widest where layers differ."""
    return int(
        getattr(text, "qk_head_dim", None)
        or of_layers(text, "head_dim")
        or text.hidden_size // text.num_attention_heads
    )


def of_layers(text: Any, name: str) -> Any:
    """A value of the config, the largest where layers differ; ``None`` if it has none."""
    try:
        return getattr(text, name, None)
    except RuntimeError:  # Transformers refuses to name one value for all layers.
        return max(getattr(text.per_layer_config[layer], name) for layer in range(text.num_hidden_layers))


def mlp_width(text: Any) -> int:
    """Width between the products of a layer's MLP; of a mixture, those of the experts that a token is sent to and of the
    experts that all tokens share. If the first layers are dense, the mean of all layers, rounded up.

    >>> from types import SimpleNamespace
    >>> sizes = {"hidden_size": 64, "intermediate_size": 96, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    >>> mlp_width(SimpleNamespace(**sizes)), mlp_width(SimpleNamespace(**sizes, n_shared_experts=1))
    (128, 160)
    >>> mlp_width(SimpleNamespace(**sizes, first_k_dense_replace=1, num_hidden_layers=4))
    120
    """
    experts, width = getattr(text, "num_experts_per_tok", None), getattr(text, "moe_intermediate_size", None)
    active = getattr(text, "top_k_experts", None)  # experts of a token, in addition to a dense MLP
    if active and width:
        return int(text.intermediate_size) + int(active) * (int(width) + int(text.hidden_size) // 2)
    if not experts or not width:
        return int(text.intermediate_size)
    shared = (getattr(text, "n_shared_experts", None) or 0) * int(width)
    shared += getattr(text, "shared_expert_intermediate_size", None) or 0
    sparse = int(experts) * (int(width) + int(text.hidden_size) // 2) + int(shared)
    if not (dense := int(getattr(text, "first_k_dense_replace", None) or 0)):
        return sparse
    layers = int(text.num_hidden_layers)
    return -(-(dense * int(text.intermediate_size) + (layers - dense) * sparse) // layers)


def attention_width(text: Any) -> int:
    """``heads * head_dim`` of the decoder."""
    return int(text.num_attention_heads) * head_dim(text)


def attention_window(text: Any) -> int | None:
    """Number of keys up to its own that a query sees in layers with a sliding window; ``None`` if no layer has one.

    >>> from types import SimpleNamespace
    >>> kinds = ["sliding_attention", "full_attention"]
    >>> attention_window(SimpleNamespace(sliding_window=512, layer_types=kinds))
    512
    >>> attention_window(SimpleNamespace(sliding_window=512, layer_types=kinds[1:]))
    """
    window, layers = getattr(text, "sliding_window", None), getattr(text, "layer_types", None)
    return int(window) if window and (layers is None or "sliding_attention" in layers) else None


def causal_pairs(lengths: Tensor, window: int | None = None) -> Tensor:
    """Number ``(B,)`` of attending pairs in causal segments of ``lengths (B,)`` tokens whose queries see ``window`` keys.

    >>> causal_pairs(torch.tensor([3, 5])).tolist(), causal_pairs(torch.tensor([1, 5]), window=2).tolist()
    ([6, 15], [1, 9])
    """
    near = lengths if window is None else lengths.clamp_max(window)
    return near * (near + 1) // 2 + (lengths - near) * near


def attention_weights(text: Any) -> int:
    """Number of weights in the query, key, value and output projections of one decoder layer."""
    return int(text.hidden_size) * (
        2 * attention_width(text) + 2 * int(of_layers(text, "num_key_value_heads")) * head_dim(text)
    )


def dense_layer_weights(text: Any) -> int:
    """Number of weights that one token is multiplied with in a decoder layer with a gated MLP."""
    return attention_weights(text) + 3 * int(text.hidden_size * text.intermediate_size)


def logit_flops(text: Any) -> int:
    """Operations of the output projection for one token."""
    return 2 * int(text.hidden_size * text.vocab_size)


# Vision tower: ``vision`` is the vision config.


def patch_weights(vision: Any, width: int) -> int:
    """Number of weights in the patch embedding."""
    return int(vision.in_channels * vision.temporal_patch_size * vision.patch_size**2) * width


def frame_pairs(grids: Tensor) -> Tensor:
    """Number ``(N,)`` of attending pairs of patches in a block with full attention inside each frame of ``grids (N, 3)``."""
    return grids[:, 0] * (grids[:, 1] * grids[:, 2]) ** 2


def window_pairs(grids: Tensor, window: int) -> Tensor:
    """Number ``(N,)`` of attending pairs in a block with attention inside windows of ``window`` x ``window`` patches.

    Windows at the lower and right edges are smaller.

    >>> window_pairs(torch.tensor([[1, 6, 4]]), window=4)  # one window of 16 patches, one of 8
    tensor([320])
    """
    squares = (grids[:, 1:] // window) * window**2 + (grids[:, 1:] % window) ** 2
    return grids[:, 0] * squares.prod(-1)


def tower_flops(
    grids: Tensor, *, patch: int, block: int, merger: int, merge_size: int, width: int, pairs: Sequence[Tensor]
) -> Tensor:
    """Operations ``(N, 2)`` int64, linear and attention, of a tower with ``len(pairs)`` blocks for ``grids (N, 3)``.

    Args:
        patch: weights of the patch embedding.
        block: weights of one block.
        merger: weights that a merged token is multiplied with.
        merge_size: patches along each side of a merged token.
        width: ``heads * head_dim``.
        pairs: for each block, the number ``(N,)`` of attending pairs.
    """
    patches = grids.prod(-1)
    linear = patches * (patch + len(pairs) * block) + patches // merge_size**2 * merger
    return torch.stack([2 * linear, 4 * width * torch.stack(list(pairs)).sum(0)], dim=1)


def patch_tower_flops(
    vision: Any, grids: Tensor, width: int, mlp: int, out: int, mergers: int = 1, pairs: Sequence[Tensor] | None = None
) -> Tensor:
    """`tower_flops` of a Qwen-VL tower by its config, ``mlp`` weights in a block beyond attention, and ``mergers`` to ``out``.

    ``pairs`` are full attention within a frame in every block by default.
    """
    merged = width * int(vision.spatial_merge_size) ** 2
    return tower_flops(
        grids,
        patch=patch_weights(vision, width),
        block=4 * width**2 + mlp,
        merger=mergers * merged * (merged + out),
        merge_size=int(vision.spatial_merge_size),
        width=width,
        pairs=[frame_pairs(grids)] * int(vision.depth) if pairs is None else pairs,
    )


def siglip_flops(vision: Any, grids: Tensor, merger: int, merge_size: int) -> Tensor:
    """`tower_flops` of a SigLIP tower by its config: full attention within an image, and an MLP of two layers in a block."""
    width = int(vision.hidden_size)
    return tower_flops(
        grids,
        patch=width * int(getattr(vision, "num_channels", 3)) * int(vision.patch_size) ** 2,
        block=4 * width**2 + 2 * width * int(vision.intermediate_size),
        merger=merger,
        merge_size=merge_size,
        width=width,
        pairs=[frame_pairs(grids)] * int(vision.num_hidden_layers),
    )


def join_grids(*grids: Tensor | None) -> Tensor:
    """All grids in one tensor ``(N, 3)`` int64 on the CPU."""
    present = [grid.long().cpu() for grid in grids if grid is not None]
    return torch.cat(present) if present else torch.zeros(0, 3, dtype=torch.int64)


# Rows


def media_costs(
    media: Sequence[RowMedia], grids_of: Callable[[RowMedia], Tensor], cost_of: Callable[[Tensor], Tensor]
) -> Tensor:
    """The cost ``(B,)`` of the media of each row. Rows that hold the same objects are computed once.

    Args:
        grids_of: the grids ``(N, 3)`` of a row's media.
        cost_of: the cost ``(N,)`` of grids ``(N, 3)``.

    >>> one = {"image_grid_thw": torch.tensor([[1, 2, 4], [1, 2, 2]])}
    >>> none = torch.zeros(0, 3, dtype=torch.int64)
    >>> media_costs([one, {}, one], lambda row: row.get("image_grid_thw", none), lambda grids: grids.prod(-1)).tolist()
    [12, 0, 12]
    """
    numbers: dict[Hashable, int] = {}
    distinct: list[Tensor] = []
    owners = []
    for row in media:
        key = media_identity(row)
        if key not in numbers:
            numbers[key] = len(distinct)
            distinct.append(grids_of(row))
        owners.append(numbers[key])
    sums = torch.zeros(len(distinct), dtype=torch.int64)
    if distinct:
        counts = torch.tensor([len(grids) for grids in distinct])
        sums.index_add_(0, torch.repeat_interleave(counts), cost_of(torch.cat(distinct)))
    return sums[torch.tensor(owners, dtype=torch.int64)]


class ForwardCosts(ABC):
    """The part of `VLMFamily` that counts operations. A family defines `vision_flops`, and `layer_weights` unless its decoder is
    dense.
    """

    @abstractmethod
    def vision_flops(self, config: Any, grids: Tensor) -> Tensor:
        """Operations ``(N, 2)`` int64 of linear layers and of attention of the towers for ``grids (N, 3)``."""

    def layer_weights(self, text: Any, layer: int) -> int:
        """Number of weights that one token is multiplied with in the linear layers of decoder layer number ``layer``; ``text`` is
        the text config. Default: attention with grouped heads and a gated MLP.
        """
        return dense_layer_weights(text)

    @abstractmethod
    def grids(self, media: RowMedia, config: Any) -> Tensor:
        """Grids ``(N, 3)`` int64 that the towers read, of images, then of videos, then of sounds."""

    def flops(
        self, config: Any, lengths: Tensor | Sequence[int], grids: Tensor | None = None, logit_tokens: int | None = None
    ) -> Flops:
        """Operations of a forward pass over rows of ``lengths (B,)`` attended tokens and over media of ``grids (N, 3)``.

        ``logit_tokens`` is the number of tokens whose logits are computed, by default all.
        """
        rows = torch.as_tensor(lengths).long()
        logits = int(rows.sum()) if logit_tokens is None else logit_tokens
        vision = self.vision_flops(config, join_grids(grids)).sum(0).tolist()
        language = self._language_flops(config.get_text_config(), rows).sum(0).tolist()
        return Flops(vision[0], vision[1], language[0], language[1], logits * logit_flops(config.get_text_config()))

    def row_flops(
        self,
        config: Any,
        lengths: Tensor | Sequence[int],
        media: Sequence[RowMedia] | None = None,
        logit_tokens: Tensor | Sequence[int] | None = None,
    ) -> Tensor:
        """Operations ``(B,)`` int64 of a forward pass for each row. Their sum is ``flops(...).total``.

        ``media`` are the rows' ``multi_modal_inputs``; ``logit_tokens (B,)`` is as in `flops`, for each row.
        """
        text, rows = config.get_text_config(), torch.as_tensor(lengths).long()
        logits = rows if logit_tokens is None else torch.as_tensor(logit_tokens).long()
        language = self._language_flops(text, rows).sum(1) + logits * logit_flops(text)
        if media is None:
            return language
        vision = media_costs(
            media, lambda row: self.grids(row, config), lambda grids: self.vision_flops(config, grids).sum(1)
        )
        return language + vision

    def row_costs(
        self,
        config: Any,
        lengths: Tensor,
        media: Sequence[RowMedia] | None = None,
        shared: Tensor | None = None,
        logit_tokens: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """`row_flops` split in two ``(B,)`` int64: what a row costs after the row before it, and what it costs more if it comes
        first in its micro-batch.

        Args:
            lengths: ``(B,)`` attended tokens.
            media: the rows' ``multi_modal_inputs``. A row shares media with the row before it if it holds the same objects.
            shared: ``(B,)`` prompt tokens that a row shares with the row before it, by default 0.
            logit_tokens: ``(B,)`` tokens whose logits are computed, by default all.
        """
        prompts = torch.zeros_like(lengths) if shared is None else shared
        whole = self.row_flops(config, lengths, media, logit_tokens)
        lead = self.row_flops(config, prompts, None, torch.zeros_like(prompts))
        if media is not None:
            vision = whole - self.row_flops(config, lengths, None, logit_tokens)
            shown = [None, *map(media_identity, media)]
            repeated = torch.tensor([row == before for before, row in pairwise(shown)], dtype=torch.bool)
            lead = lead + torch.where(repeated, vision, 0)
        return whole - lead, lead

    def mixing_flops(self, text: Any, lengths: Tensor) -> Tensor:
        """Operations ``(B,)`` int64 that mix tokens in all decoder layers, in addition to `layer_weights`, for causal segments of
        ``lengths (B,)`` tokens. Default: attention in every layer, over a window where the config has one.
        """
        layers, window = int(text.num_hidden_layers), attention_window(text)
        kinds = getattr(text, "layer_types", None)
        near = 0 if window is None else layers if kinds is None else list(kinds).count("sliding_attention")
        pairs = (layers - near) * causal_pairs(lengths) + near * causal_pairs(lengths, window)
        return 4 * attention_width(text) * pairs

    def _language_flops(self, text: Any, lengths: Tensor) -> Tensor:
        """Operations ``(B, 2)`` int64 of the decoder layers: of weights, and what mixes tokens."""
        weights = sum(self.layer_weights(text, layer) for layer in range(text.num_hidden_layers))
        return torch.stack([2 * weights * lengths, self.mixing_flops(text, lengths)], dim=1)

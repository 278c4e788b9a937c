"""Rows that are decoded together, and what each layer caches for them: keys and values of every token, or a recurrent state.

Letters: W rows, T tokens of the longest row, H hidden size, or heads in a layer's cache.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, LinearAttentionLayer

from dataproto.transfer import move
from rollout.hf.requests import LayerCache, OpenRequest, Prefix


def is_recurrent(layer: Any) -> bool:
    """Whether a layer keeps a state instead of keys and values."""
    return type(layer) is LinearAttentionLayer


def select_rows(layer: Any, index: Tensor) -> None:
    """Keeps only the rows of ``index``, in its order."""
    if is_recurrent(layer):
        layer.conv_states[0], layer.recurrent_states[0] = layer.conv_states[0][index], layer.recurrent_states[0][index]
    else:
        layer.batch_select_indices(index)


def arrange_tokens(layer: Any, columns: Tensor) -> None:
    """Keeps, of each row, only the keys and values of its tokens ``columns (W, T')``, in this order; a state stays."""
    if is_recurrent(layer):
        return
    for name in ("keys", "values"):
        states = getattr(layer, name)  # (W, H, T, D)
        setattr(layer, name, states.take_along_dim(columns[:, None, :, None], dim=2))


def add_rows(layer: Any, other: Any, length: int) -> None:
    """Adds the rows of another batch's layer. Keys and values are padded at the left to ``length`` tokens."""
    if is_recurrent(layer):
        for mine, others in ((layer.conv_states, other.conv_states), (layer.recurrent_states, other.recurrent_states)):
            mine[0] = torch.cat([mine[0], others[0]])
        return
    for name in ("keys", "values"):
        setattr(layer, name, torch.cat([lengthened(getattr(each, name), length) for each in (layer, other)]))


def row_cache(layer: Any, row: int, columns: Tensor) -> LayerCache:
    """A copy of what the layer holds for a row, whose tokens are ``columns``."""
    if is_recurrent(layer):
        return layer.conv_states[0][row].clone(), layer.recurrent_states[0][row].clone()
    return layer.keys[row][:, columns], layer.values[row][:, columns]


def fill_layer(cache: DynamicCache, number: int, rows: Sequence[LayerCache], length: int) -> None:
    """Puts what several rows have cached into layer ``number`` of a new cache, padded at the left to ``length`` tokens."""
    layer: Any = cache.layers[number] if number < len(cache.layers) else None
    if is_recurrent(layer):
        inputs, states = (torch.stack([row[part] for row in rows]) for part in (0, 1))
        layer.update_conv_state(inputs, conv_kernel_size=inputs.shape[-1])
        layer.update_recurrent_state(states)
    else:
        keys, values = (torch.stack([lengthened(row[part], length) for row in rows]) for part in (0, 1))
        cache.update(keys, values, number)


def lengthened(states: Tensor, length: int) -> Tensor:
    """States ``(..., T, D)`` with padding before them, up to this number of tokens."""
    return pad(states, (0, 0, length - states.shape[-2], 0))


@dataclass(eq=False)
class Batch:
    """Rows are aligned at their last token. Tokens of other rows, and padding, are masked."""

    rows: list[OpenRequest]  # W
    cache: DynamicCache
    attention_mask: Tensor  # (W, T) int64
    next_position: Tensor  # (4, W, 1) or (W, 1)
    hidden: Tensor  # (W, H) states that predict the next tokens

    def __post_init__(self) -> None:
        self.running = np.ones(len(self.rows), dtype=bool)  # rows that have not finished
        self.seeds = np.array([row.request.seed for row in self.rows], dtype=np.uint64)

    def select(self, index: Tensor) -> None:
        """Removes all rows but those of ``index``."""
        chosen = index.cpu().numpy()
        self.rows = [self.rows[row] for row in chosen]
        self.running, self.seeds = self.running[chosen], self.seeds[chosen]
        for layer in self.layers:
            select_rows(layer, index)
        self.attention_mask, self.hidden = self.attention_mask[index], self.hidden[index]
        self.next_position = self.next_position[..., index, :]

    def running_rows(self) -> Tensor:
        """Indices of the rows that have not finished."""
        return move(torch.from_numpy(np.flatnonzero(self.running)), self.hidden.device)

    def finish(self, number: int) -> OpenRequest | None:
        """Ends the row of a request, if it runs in this batch."""
        for place in np.flatnonzero(self.running):
            if self.rows[place].number == number:
                self.running[place] = False
                return self.rows[place]
        return None

    @property
    def layers(self) -> list[Any]:
        """The layers of the cache; see `rollout.hf.batch`."""
        return self.cache.layers

    @property
    def can_grow(self) -> bool:
        """Whether other rows can be added, and rows kept: each layer caches every token, or a state."""
        return all(type(layer) in (DynamicLayer, LinearAttentionLayer) for layer in self.layers)

    def join(self, other: "Batch") -> None:
        """Adds the rows of another batch. Finished rows, and columns that no row attends to, are removed."""
        if not self.running.all():
            self.select(self.running_rows())
        self._trim()
        length = max(self.attention_mask.shape[1], other.attention_mask.shape[1])
        for mine, others in zip(self.layers, other.layers, strict=True):
            add_rows(mine, others, length)
        masks = (pad(mask, (length - mask.shape[1], 0)) for mask in (self.attention_mask, other.attention_mask))
        self.attention_mask = torch.cat(tuple(masks))
        self.next_position = torch.cat([self.next_position, other.next_position], dim=-2)
        self.hidden = torch.cat([self.hidden, other.hidden])
        self.rows = [*self.rows, *other.rows]
        self.running = np.concatenate([self.running, other.running])
        self.seeds = np.concatenate([self.seeds, other.seeds])

    def _trim(self) -> None:
        columns = self.attention_mask.any(0).nonzero().squeeze(-1)
        if len(columns) < self.attention_mask.shape[1]:
            self.attention_mask = self.attention_mask[:, columns]
            for layer in self.layers:
                if not is_recurrent(layer):
                    layer.keys, layer.values = layer.keys[:, :, columns], layer.values[:, :, columns]

    def align(self) -> None:
        """Moves the tokens of each row to its end, and removes columns that no row needs."""
        kept = int(self.attention_mask.sum(1).max())
        columns = self.attention_mask.argsort(dim=1, stable=True)[:, -kept:]  # (W, kept), masked ones first
        self.attention_mask = self.attention_mask.gather(1, columns)
        for layer in self.layers:
            arrange_tokens(layer, columns)

    def cache_of(self, row: int) -> list[LayerCache]:
        """A copy of the row's part of the cache, without padding."""
        columns = self.attention_mask[row].nonzero().squeeze(-1)
        return [row_cache(layer, row, columns) for layer in self.layers]


def stack_prefixes(prefixes: list[Prefix], cache: DynamicCache, device: torch.device) -> tuple[DynamicCache, Tensor]:
    """The empty ``cache`` with one row for each prefix, and its attention mask ``(W, T)`` int64."""
    length = max(prefix.cached_tokens for prefix in prefixes)
    for number, layers in enumerate(zip(*(prefix.cache or [] for prefix in prefixes), strict=True)):
        fill_layer(cache, number, layers, length)
    places = torch.arange(length, device=device)
    starts = move(torch.tensor([length - prefix.cached_tokens for prefix in prefixes]), device)
    return cache, (places >= starts[:, None]).long()

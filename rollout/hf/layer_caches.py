"""What a layer caches for the rows of a batch: keys and values of every token, or a recurrent state.

Letters: W rows, T tokens, H heads, D head size, C channels of a convolution.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, LinearAttentionLayer

LayerCache = tuple[Tensor, Tensor]
"""Of one layer and one row: keys and values ``(H, T, D)``, or the last inputs ``(C, width)`` of the convolution and the state
``(H, D, E)``.
"""


def is_recurrent(layer: Any) -> bool:
    """Whether a layer keeps a state instead of keys and values."""
    return type(layer) is LinearAttentionLayer


def can_join(layers: Sequence[Any]) -> bool:
    """Whether rows can be added to these layers, and kept: each of them caches every token, or a state."""
    return all(type(layer) in (DynamicLayer, LinearAttentionLayer) for layer in layers)


def select_rows(layer: Any, index: Tensor) -> None:
    """Keeps the rows of ``index`` alone, in its order."""
    if is_recurrent(layer):
        layer.conv_states[0], layer.recurrent_states[0] = layer.conv_states[0][index], layer.recurrent_states[0][index]
    else:
        layer.batch_select_indices(index)


def select_tokens(layer: Any, columns: Tensor) -> None:
    """Keeps the keys and values of these tokens alone; a state stays."""
    if not is_recurrent(layer):
        layer.keys, layer.values = layer.keys[:, :, columns], layer.values[:, :, columns]


def arrange_tokens(layer: Any, columns: Tensor) -> None:
    """Keeps, of each row, the keys and values of its tokens ``columns (W, T')`` alone, in this order."""
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

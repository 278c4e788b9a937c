"""Deep vision features of packed rows, added at the places of media tokens.

Decoders of Hugging Face find these tokens by a mask: for each level, in forward and backward pass, the host waits until the
device has counted them.
"""

from torch import Tensor, nn

from dataproto.vlm import VLMFamily
from workers.model.patches import replace_method


def use_placed_levels(model: nn.Module, family: VLMFamily) -> None:
    """Makes the decoder of ``model``, if its family has deep features, add their levels by `add_level`."""
    if family.deep_method:
        replace_method(model.get_submodule(family.language_model), family.deep_method, add_level)


def add_level(states: Tensor, places: Tensor | None, level: Tensor) -> Tensor:
    """States ``(1, L, H)`` with a level ``(M, H)`` added at the ``places (M,)``, each of which occurs once; ``None`` is all L.

    >>> import torch
    >>> add_level(torch.zeros(1, 3, 2), torch.tensor([2, 0]), torch.tensor([[1.0, 2.0], [3.0, 4.0]])).tolist()
    [[[3.0, 4.0], [0.0, 0.0], [1.0, 2.0]]]
    """
    level = level.to(states.dtype)[None]
    return states + level if places is None else states.index_add(1, places, level)

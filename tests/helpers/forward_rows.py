"""The forward pass of rows in one call, which `workers.training` takes in parts."""

from typing import Any

import torch

from dataproto import DataProto
from workers.model.packed_model import PackedVLM
from workers.training.forward_pass import forward_inputs, inputs_of


def forward_rows(
    module: PackedVLM,
    rows: DataProto,
    device: torch.device,
    entropy: bool = False,
    tower: bool = False,
    length: int = 0,
) -> Any:
    """Packs the rows, encodes each distinct image once, and returns per-token ``module.outputs`` ``(B, R)`` on ``device``.

    Args:
        tower, length: see `workers.training.forward_pass.inputs_of`.
    """
    return forward_inputs(module, rows, inputs_of(module, rows, device, tower, length), entropy)

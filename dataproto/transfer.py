"""Moves tensors to a device, and between ranks."""

import torch
import torch.distributed as dist
from torch import Tensor

all_gather_equal = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # its name from torch 2.13 on
"""``all_gather_into_tensor`` of equal parts."""


def move(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Returns the tensor on ``device``. From the host to a CUDA device it copies through pinned memory, in stream order, without
    blocking the host.
    """
    if tensor.device.type == "cpu" and torch.device(device).type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)

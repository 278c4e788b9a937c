"""Asynchronous copies to a device."""

import torch
from torch import Tensor


def move(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Returns the tensor on ``device``. From the host to a CUDA device it copies through pinned memory, in stream order, without
    blocking the host.
    """
    if tensor.device.type == "cpu" and torch.device(device).type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)

"""Tensors to a device without waiting for it."""

import torch
from torch import Tensor


def move(tensor: Tensor, device: torch.device | str) -> Tensor:
    """The tensor on ``device``; from the host to a CUDA device through pinned memory and in the order of its stream, so that
    the host goes on.
    """
    if tensor.device.type == "cpu" and torch.device(device).type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)

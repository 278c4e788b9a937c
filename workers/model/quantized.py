"""Base weights of adapters in 4 bits, by torchao.

A weight of 4 bits (NF4 of QLoRA, arXiv:2305.14314) is a parameter of its own class, which `torch.nn.functional.linear` expands
each time that it is used, and again in the backward pass. 64 numbers share a scale of 8 bits, and 256 scales a scale of their
own.
"""

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from dataproto.errors import InvalidConfig, raised_as


def needs_torchao(option: str) -> AbstractContextManager[None]:
    """Imports of torchao in here raise an error that names ``option`` if it is not installed.

    Raises:
        InvalidConfig: torchao is not installed.
    """
    what = f"{option} needs the package torchao: pip install 'dataproto-vlm[torchao]'"
    return raised_as(InvalidConfig, what, ImportError)


BLOCK = 64
SCALER_BLOCK = 256  # at most; a smaller power of two if it has to divide the number of scales


def four_bit(weight: Tensor, name: str) -> nn.Parameter:
    """A frozen parameter with the numbers of ``weight`` ``(out, in)`` rounded to 4 bits; it keeps the shape and the dtype.

    Args:
        name: of the weight, for errors.

    Raises:
        InvalidConfig: torchao is not installed, or the weight cannot be rounded.
    """
    with needs_torchao("load_in_4bit=True"):
        from torchao.quantization import to_nf4
    if weight.numel() % BLOCK:
        raise InvalidConfig(
            f"load_in_4bit=True: {name} has {weight.numel()} numbers, no multiple of {BLOCK}: leave the option out"
        )
    scales = weight.numel() // BLOCK
    rounded = to_nf4(weight.detach().contiguous(), BLOCK, min(scales & -scales, SCALER_BLOCK))
    if not bool(torch.isfinite(dense(rounded)).all()):
        raise InvalidConfig(
            f"load_in_4bit=True: {name} cannot be rounded to 4 bits: it has numbers that are not finite"
        )
    return nn.Parameter(rounded, requires_grad=False)


def dense(weight: Tensor) -> Tensor:
    """The numbers that a weight of 4 bits stands for, in its dtype; any other tensor as it is."""
    expanded: Any = getattr(weight, "get_original_weight", None)
    return weight if expanded is None else expanded()

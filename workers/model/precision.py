"""Products in bfloat16 over weights in float32, on one device; over several, FSDP does the same as it gathers weights.

While a block runs, each float32 parameter is replaced in its modules by a bfloat16 copy, so everything the layers do is in
half precision and each weight is cast once a block. Gradients of the copies are added to those of the parameters in float32
as the backward pass makes them. Outside the block the model is as ever: optimizer, checkpoints and hand-over of weights see
float32 parameters.
"""

import contextlib
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, nn


class HalfWeights:
    """bfloat16 copies of a module's float32 parameters.

    >>> layer = nn.Linear(2, 1)
    >>> with HalfWeights(layer).replaced():
    ...     layer(torch.ones(1, 2, dtype=torch.bfloat16)).sum().backward()
    >>> layer.weight.grad, layer.weight.dtype
    (tensor([[1., 1.]]), torch.float32)
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.copies: dict[nn.Parameter, nn.Parameter] = {}

    @contextlib.contextmanager
    def replaced(self) -> Iterator[None]:
        """Copies take the parameters' places, also those of parameters that came or were frozen since the last time."""
        places = [
            (owner, name, weight)
            for owner in self.module.modules()
            for name, weight in owner._parameters.items()
            if weight is not None and weight.dtype == torch.float32
        ]
        weights = dict.fromkeys(weight for _, _, weight in places)
        self.copies = {weight: self._copy_of(weight) for weight in weights}
        with torch.no_grad():
            torch._foreach_copy_(list(self.copies.values()), list(weights))
        try:
            for owner, name, weight in places:
                owner._parameters[name] = self.copies[weight]
            yield
        finally:
            for owner, name, weight in places:
                owner._parameters[name] = weight

    def _copy_of(self, weight: nn.Parameter) -> nn.Parameter:
        copy = self.copies.get(weight)
        if copy is not None and copy.requires_grad == weight.requires_grad and copy.device == weight.device:
            return copy
        copy = nn.Parameter(torch.empty_like(weight, dtype=torch.bfloat16), requires_grad=weight.requires_grad)
        if weight.requires_grad:
            copy.register_post_accumulate_grad_hook(partial(add_gradient, weight))
        return copy


def add_gradient(weight: nn.Parameter, half: Tensor) -> None:
    """Moves the gradient of a copy to its parameter."""
    gradient, half.grad = half.grad, None
    if gradient is None:
        return
    if weight.grad is None:
        weight.grad = gradient.float()
    else:
        weight.grad.add_(gradient)

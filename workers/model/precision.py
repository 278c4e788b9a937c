"""How a model with float32 parameters computes in bfloat16. Which way it takes depends on who holds the weights:

- FSDP shards them (dp x sp above 1): FSDP casts each layer's weights as it gathers them (`mixed_precision`).
- They are split over tp only: autocast casts a weight at each use; states between layers stay in float32.
- One process holds them (pp splits layers, not weights): `HalfWeights` puts a bfloat16 copy in the place of each parameter.

A model that is never trained stores only the bfloat16 weights, where these are all that it computes with
(`workers.training.loading.store_in_half`).

All three leave float32 parameters, gradients and moments to the optimizer, checkpoints and the weights that are handed to an
engine. FSDP on a mesh of one could do the work of `HalfWeights`, but it would need a process group in a world of one, and it
casts and frees weights for each layer and micro-batch, where `HalfWeights` casts each weight once for all micro-batches of a
call.
"""

import contextlib
from collections.abc import Collection, Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from workers.model.model_config import ModelConfig
from workers.model.patches import call_after_gradient, parameter_places, place_parameter
from workers.ranks.mesh import Ranks


def compute_dtype(name: str, device_type: str) -> torch.dtype:
    """The dtype of matrix products for a `ModelConfig.dtype`; ``"auto"`` is bfloat16 on CUDA and float32 on other devices."""
    if name == "auto":
        return torch.bfloat16 if device_type == "cuda" else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]


class Precision:
    """The dtype that one model computes in, in its layout."""

    def __init__(
        self, model: nn.Module, ranks: Ranks, options: ModelConfig, device_type: str, exact: Collection[nn.Parameter]
    ) -> None:
        """``exact``: parameters that are used in float32 whatever the model computes in."""
        self.dtype = compute_dtype(options.dtype, device_type)
        self.device_type = device_type
        half, sharded = self.dtype == torch.bfloat16, ranks.size("dp", "sp") > 1
        self.autocasts = half and not sharded and ranks.size("tp") > 1
        casts = half and not sharded and not self.autocasts
        self.half_weights = HalfWeights(model, exact) if casts else None

    def compute(self) -> contextlib.AbstractContextManager[None]:
        """Forward and backward passes in here compute in `dtype`."""
        if self.autocasts:
            return torch.autocast(self.device_type, dtype=self.dtype)
        return contextlib.nullcontext() if self.half_weights is None else self.half_weights.replaced()


def mixed_precision(dtype: str, device_type: str) -> MixedPrecisionPolicy:
    """How FSDP casts weights of a model with `ModelConfig.dtype`; gradients are summed in float32.

    Inputs are not cast: rotary angles of vision towers have to stay in float32.
    """
    half = compute_dtype(dtype, device_type) == torch.bfloat16
    return MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if half else None, reduce_dtype=torch.float32, cast_forward_inputs=False
    )


class HalfWeights:
    """bfloat16 copies of a module's float32 parameters, which take their places while a block runs.

    Each parameter is cast once a block. As the backward pass makes gradients of the copies, they are added to those of the
    parameters in float32. Outside of the block the module is unchanged.

    >>> layer = nn.Linear(2, 1)
    >>> with HalfWeights(layer).replaced():
    ...     layer(torch.ones(1, 2, dtype=torch.bfloat16)).sum().backward()
    >>> layer.weight.grad, layer.weight.dtype
    (tensor([[1., 1.]]), torch.float32)
    """

    def __init__(self, module: nn.Module, exact: Collection[nn.Parameter] = ()) -> None:
        """``exact``: parameters that stay in their places."""
        self.module = module
        self.exact = frozenset(map(id, exact))
        self.copies: dict[nn.Parameter, nn.Parameter] = {}

    @contextlib.contextmanager
    def replaced(self) -> Iterator[None]:
        """Copies take the places of all float32 parameters that the module has by now."""
        places = [
            (owner, name, weight)
            for owner, name, weight in parameter_places(self.module)
            if weight.dtype == torch.float32 and id(weight) not in self.exact
        ]
        weights = dict.fromkeys(weight for _, _, weight in places)
        self.copies = {weight: self._copy_of(weight) for weight in weights}
        if weights:
            with torch.no_grad():
                torch._foreach_copy_(list(self.copies.values()), list(weights))
        try:
            for owner, name, weight in places:
                place_parameter(owner, name, self.copies[weight])
            yield
        finally:
            for owner, name, weight in places:
                place_parameter(owner, name, weight)

    def drop(self) -> None:
        """Frees the copies; the next block makes new ones."""
        self.copies.clear()

    def _copy_of(self, weight: nn.Parameter) -> nn.Parameter:
        copy = self.copies.get(weight)
        if copy is not None and copy.requires_grad == weight.requires_grad and copy.device == weight.device:
            return copy
        copy = nn.Parameter(torch.empty_like(weight, dtype=torch.bfloat16), requires_grad=weight.requires_grad)
        if weight.requires_grad:
            call_after_gradient(copy, partial(add_gradient, weight))
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


def in_autocast_dtype(x: Tensor) -> Tensor:
    """``x`` in the dtype of autocast, or unchanged where autocast is off."""
    device = x.device.type
    return x.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else x

"""AdamW whose moments have 8 bits in blocks of 256 numbers with a scale each (arXiv:2110.02861), by torchao."""

from collections.abc import Sequence
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from workers.model.model_config import OptimizerConfig
from workers.model.quantized import needs_torchao

BLOCK = 256  # numbers that share a scale


def adamw_8bit(groups: Sequence[Sequence[nn.Parameter]], config: OptimizerConfig, eps: float) -> torch.optim.Optimizer:
    """torchao's AdamW over groups of parameters, which may be DTensors.

    Parameters with less than 4,096 numbers on a rank, or with a number that is no multiple of `BLOCK`, keep moments in
    float32, and so do those of which ranks hold parts of unequal size.

    Raises:
        InvalidConfig: torchao is not installed.
    """
    parameters = [{"params": list(group)} for group in groups]
    rule: torch.optim.Optimizer = _rule()(
        parameters, lr=config.lr, betas=config.betas, eps=eps, weight_decay=config.weight_decay, block_size=BLOCK
    )
    return rule


def new_moments_8bit(rule: Any, parameter: nn.Parameter) -> dict[str, Tensor]:
    """The state of a parameter before its first step, laid out over ranks as it is."""
    return {
        "step": torch.tensor(0.0),
        "exp_avg": rule._new_buffer(parameter, True),
        "exp_avg_sq": rule._new_buffer(parameter, False),
    }


@cache
def _rule() -> type[Any]:
    """torchao's class, for even shards alone, and without compilation on a CPU, where each shape would take seconds."""
    with needs_torchao('optimizer.kind="adamw8bit"'):
        from torchao.optim import AdamW8bit

    class EvenAdamW8bit(AdamW8bit):
        def _new_buffer(self, p: Tensor, signed: bool) -> Tensor:
            if not evenly_sharded(p):
                return torch.zeros_like(p, requires_grad=False)
            buffer: Tensor = super()._new_buffer(p, signed)
            return buffer

        def step(self, closure: Any = None) -> Any:
            on_cpu = all(p.device.type == "cpu" for group in self.param_groups for p in group["params"])
            with torch.compiler.set_stance("force_eager") if on_cpu else nullcontext():
                return super().step(closure)

    return EvenAdamW8bit


def evenly_sharded(parameter: Tensor) -> bool:
    """Whether all ranks hold parts of one size."""
    if not isinstance(parameter, DTensor):
        return True
    parts = [1] * parameter.ndim
    for size, placement in zip(parameter.device_mesh.shape, parameter.placements, strict=True):
        if isinstance(placement, Shard):
            parts[placement.dim] *= size
    return all(length % count == 0 for length, count in zip(parameter.shape, parts, strict=True))

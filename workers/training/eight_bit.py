"""AdamW whose moments have 8 bits in blocks of 256 numbers with a scale each (arXiv:2110.02861), by torchao, and its checkpoints.

A moment of 8 bits is stored as its codes, laid out over ranks as the parameter, and its scales. A scale belongs to a block of
numbers of one rank's part, so each rank stores its own under the place of its part. A run in the same layout continues from the
same codes; any other layout, and another kind of AdamW, computes the numbers and rounds them anew.
"""

import re
from collections.abc import Collection, Sequence
from contextlib import nullcontext
from functools import cache
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from workers.model.model_config import OptimizerConfig
from workers.model.quantized import needs_torchao
from workers.weights.hollow_model import local_part

BLOCK = 256  # numbers that share a scale


def adamw_8bit(groups: Sequence[Sequence[nn.Parameter]], config: OptimizerConfig, eps: float) -> torch.optim.Optimizer:
    """torchao's AdamW over groups of parameters, which may be DTensors.

    Parameters with less than 4,096 numbers on a rank, or with a number that is no multiple of `BLOCK`, keep moments in
    float32, and so do those of which ranks hold parts of unequal size.

    Raises:
        InvalidConfig: torchao is not installed.
    """
    parameters = [{"params": list(group)} for group in groups]
    return _rule()(
        parameters, lr=config.lr, betas=config.betas, eps=eps, weight_decay=config.weight_decay, block_size=BLOCK
    )


def new_moments_8bit(rule: Any, parameter: nn.Parameter) -> dict[str, Tensor]:
    """The state of a parameter before its first step, laid out over ranks as it is."""
    return {
        "step": torch.tensor(0.0),
        "exp_avg": rule._new_buffer(parameter, True),
        "exp_avg_sq": rule._new_buffer(parameter, False),
    }


@cache
def _rule() -> type[Any]:
    """torchao's class, for even shards only, and without compilation on a CPU, where each shape would take seconds."""
    with needs_torchao('optimizer.kind="adamw8bit"'):
        from torchao.optim import AdamW8bit

    class EvenAdamW8bit(AdamW8bit):
        def _new_buffer(self, p: Tensor, signed: bool) -> Tensor:
            if not evenly_sharded(p):
                return torch.zeros_like(p, requires_grad=False)
            return super()._new_buffer(p, signed)

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


Place = tuple[tuple[int, int], ...]
"""Begin and end of a part of a tensor along each dimension."""


def stored_parts(name: str, value: Tensor) -> dict[str, Tensor]:
    """The tensors that a checkpoint holds of the moment ``name``."""
    local, place = _local(value)
    if not hasattr(local, "codes"):
        return {name: value}
    return {f"{name}.codes": _laid_out(local.codes, value), f"{name}.scale.{_text(place)}": local.scale}


class MomentReader:
    """Reads a moment from a checkpoint in whatever form it holds it."""

    def __init__(self, name: str, value: Tensor, stored: Collection[str]) -> None:
        """``value`` takes the moment; ``stored`` are the names of the checkpoint."""
        self.name, self.value = name, value
        self.local, self.place = _local(value)
        own = hasattr(self.local, "codes")
        scales = [each for each in stored if each.startswith(f"{name}.scale.")]
        self.codes: Tensor | None = None
        self.dense: Tensor | None = None
        self.targets: dict[str, Tensor]
        if own and f"{name}.scale.{_text(self.place)}" in scales:
            self.targets = stored_parts(name, value)
        elif f"{name}.codes" in stored:
            self.codes = torch.zeros(self.local.shape, dtype=torch.uint8, device=self.local.device)
            self.scales = {_place(each): torch.zeros(_size(_place(each)) // BLOCK) for each in scales}
            by_name = {f"{name}.scale.{_text(place)}": scale for place, scale in self.scales.items()}
            self.targets = {f"{name}.codes": _laid_out(self.codes, value)} | by_name
        elif own:
            self.dense = torch.zeros(self.local.shape, device=self.local.device)
            self.targets = {name: _laid_out(self.dense, value)}
        else:
            self.targets = {name: value}

    def finish(self) -> None:
        """Completes the moment once ``targets`` have their values."""
        if self.codes is not None:
            numbers = _meanings(self.name)[self.codes.cpu().int()]
            for place, scale in self.scales.items():
                _scale(numbers, self.place, scale, place)
            self.dense = numbers.to(self.codes.device)
        if self.dense is not None:
            self.local.copy_(self.dense)


def _scale(numbers: Tensor, place: Place, scale: Tensor, of: Place) -> None:
    """Multiplies the ``numbers`` at ``place`` by the scales of the part ``of`` the whole, where both overlap."""
    both = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(place, of, strict=True)]
    if any(end <= begin for begin, end in both):
        return
    each = scale.repeat_interleave(BLOCK).view([end - begin for begin, end in of])
    mine = tuple(slice(a - start, b - start) for (a, b), (start, _) in zip(both, place, strict=True))
    theirs = tuple(slice(a - start, b - start) for (a, b), (start, _) in zip(both, of, strict=True))
    numbers[mine] *= each[theirs]


def _meanings(name: str) -> Tensor:
    """The numbers ``(256,)`` that codes stand for; means of squares have no sign."""
    from torchao.optim.subclass_8bit import get_qmap_signed, get_qmap_unsigned

    return torch.tensor(get_qmap_unsigned() if name.endswith("_sq") else get_qmap_signed())


def _local(value: Tensor) -> tuple[Any, Place]:
    with torch.no_grad():
        local, place = local_part(value)
    return local, tuple((part.start, part.stop) for part in place)


def _laid_out(local: Tensor, like: Tensor) -> Tensor:
    """``local`` as this rank's part of a tensor that is laid out as ``like``."""
    if not isinstance(like, DTensor):
        return local
    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def _text(place: Place) -> str:
    return "_".join(f"{begin}-{end}" for begin, end in place)


def _place(name: str) -> Place:
    """
    >>> _place("layer.weight.exp_avg.scale.0-512_64-128")
    ((0, 512), (64, 128))
    """
    ends = re.findall(r"(\d+)-(\d+)", name.rpartition(".")[2])
    return tuple((int(begin), int(end)) for begin, end in ends)


def _size(place: Place) -> int:
    return prod(end - begin for begin, end in place)

"""The optimizer of a model, its learning-rate schedule, and one guarded step."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

from dataproto.errors import InvalidConfig
from workers.model.model_config import AdamParams, OptimizerConfig
from workers.ranks.autograd_collectives import local_part
from workers.training.optimizers import Muon, adamw_8bit, new_moments_8bit
from workers.training.optimizers.muon import new_momentum

EPS = 1e-8  # of a configured AdamW

Moments = Mapping[Tensor, dict[str, Tensor]]  # the optimizer's state of each parameter that has some


def learning_rate_factor(step: int, config: OptimizerConfig) -> float:
    """The factor of ``lr`` at optimizer step ``step`` (from 0).

    >>> linear = OptimizerConfig(schedule="linear", warmup_steps=2, total_steps=6)
    >>> [learning_rate_factor(step, linear) for step in range(7)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]
    """
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return 1.0
    if config.total_steps is None:
        raise InvalidConfig(f"schedule {config.schedule!r} needs total_steps")
    progress = min((step - config.warmup_steps) / (config.total_steps - config.warmup_steps), 1.0)
    decayed = 1 - progress if config.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return config.min_lr_ratio + (1 - config.min_lr_ratio) * decayed


class Optimizer:
    """Clips by global norm and steps; a non-finite gradient skips the step, on all ranks, and is counted."""

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        config: OptimizerConfig,
        stages: distributed.ProcessGroup | None = None,
        repeated: Sequence[nn.Parameter] = (),
        matrices: Iterable[nn.Parameter] = (),
    ) -> None:
        """
        Args:
            stages: ranks that hold other parameters of the same model; those ``repeated`` here are counted there.
            matrices: those of the layers, which ``kind="muon"`` steps by Muon.

        Raises:
            InvalidConfig: the schedule has no length, or ``kind`` needs a package that is not installed.
        """
        self.parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self.config = config
        learning_rate_factor(config.warmup_steps, config)  # refuses a schedule without its length before the run
        self.groups = group_by_layout(self.parameters)
        by_muon = {id(matrix) for matrix in matrices if matrix.requires_grad} if config.kind == "muon" else set()
        self.muon = _muon([each for each in self.parameters if id(each) in by_muon], config)
        self.adamw = _adamw([each for each in self.parameters if id(each) not in by_muon], config)
        self.rules = [rule for rule in (self.adamw, self.muon) if rule is not None]
        self.stages, self.repeated = stages, frozenset(map(id, repeated))
        self.steps = 0  # of the schedule; skipped ones count
        self.skipped_steps = 0

    def step(self, params: AdamParams | None = None) -> dict[str, float]:
        """Clips, steps and clears the gradients; returns ``grad_norm`` before clipping, ``lr`` and ``skipped_steps``.

        ``params`` replace the configuration and its schedule for this step.
        """
        params = params or self._scheduled()
        norm = clip_by_global_norm(self.groups, params.grad_clip_norm, self.stages, self.repeated)
        lr = params.learning_rate
        betas, eps, decay = (params.beta1, params.beta2), params.eps, params.weight_decay
        for group in (group for rule in self.rules for group in rule.param_groups):
            if isinstance(group["lr"], Tensor):  # a compiled step reads it
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr
            group.update(betas=betas, eps=eps, weight_decay=decay)
        if math.isfinite(norm):
            for rule in self.rules:
                rule.step()
        else:
            self.skipped_steps += 1
        self.steps += 1
        self.clear_gradients()
        return {"grad_norm": norm, "lr": lr, "skipped_steps": float(self.skipped_steps)}

    def _scheduled(self) -> AdamParams:
        config, factor = self.config, learning_rate_factor(self.steps, self.config)
        return AdamParams(config.lr * factor, *config.betas, EPS, config.weight_decay, config.max_grad_norm)

    def clear_gradients(self) -> None:
        """Drops the gradients of all parameters."""
        for rule in self.rules:
            rule.zero_grad(set_to_none=True)

    @property
    def moments(self) -> Moments:
        """The state of each parameter that has ever had a gradient; the others have none."""
        return self.rules[0].state if len(self.rules) == 1 else {**self.rules[0].state, **self.rules[1].state}

    def new_moments(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """The state of a parameter before its first step, laid out over ranks as it is."""
        if self.muon is not None and any(parameter is each for each in self.muon.param_groups[0]["params"]):
            return new_momentum(parameter)
        return new_moments_8bit(self.adamw, parameter) if self.config.kind == "adamw8bit" else new_moments(parameter)

    def restore(self, moments: Moments, steps: int, skipped_steps: int) -> None:
        """Continues from another optimizer's state; parameters that are not in ``moments`` have none. Clears the gradients."""
        self.clear_gradients()
        for rule in self.rules:
            rule.state.clear()
            mine = (parameter for group in rule.param_groups for parameter in group["params"])
            rule.state.update({parameter: moments[parameter] for parameter in mine if parameter in moments})
        self.steps, self.skipped_steps = steps, skipped_steps


def _adamw(parameters: Sequence[nn.Parameter], config: OptimizerConfig) -> torch.optim.Optimizer | None:
    groups = group_by_layout(parameters)  # the fused kernel takes parameters of one layout
    if not groups:
        return None
    if config.kind == "adamw8bit":
        return adamw_8bit(groups, config, EPS)
    return torch.optim.AdamW(
        [{"params": group} for group in groups],
        lr=config.lr,
        betas=config.betas,
        eps=EPS,
        weight_decay=config.weight_decay,
        fused=True,
    )


def _muon(matrices: Sequence[nn.Parameter], config: OptimizerConfig) -> Muon | None:
    return Muon(matrices, config.lr, config.weight_decay) if matrices else None


def new_moments(parameter: nn.Parameter) -> dict[str, Tensor]:
    """Adam's state of a parameter before its first step, laid out over ranks as it is."""
    return {
        "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
        "exp_avg": torch.zeros_like(parameter, requires_grad=False),
        "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False),
    }


def group_by_layout(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Parameters grouped by their layout over ranks: plain ones, and DTensors of each mesh and placement."""
    groups: dict[Any, list[nn.Parameter]] = {}
    for parameter in parameters:
        layout = (parameter.device_mesh, parameter.placements) if isinstance(parameter, DTensor) else None
        groups.setdefault(layout, []).append(parameter)
    return list(groups.values())


def clip_by_global_norm(
    groups: Sequence[Sequence[nn.Parameter]],
    max_norm: float,
    stages: distributed.ProcessGroup | None = None,
    repeated: Collection[int] = (),
) -> float:
    """Scales the gradients so that the 2-norm of all of them together is at most ``max_norm``; returns the norm before.

    Each element counts once, whatever its layout: squares of shards are summed over the mesh dimensions that shard them, and
    not over those that repeat them. All ranks get the same number. If the norm is not finite, nothing is scaled.

    Args:
        groups: see `group_by_layout`; parameters without gradient are skipped.
        max_norm: 0 for no limit.
        stages: ranks that hold other parameters of the same model.
        repeated: ids of parameters that are scaled here, and counted by another stage.
    """
    gradients = [[p.grad for p in group if p.grad is not None] for group in groups]
    counted = [[p.grad for p in group if p.grad is not None and id(p) not in repeated] for group in groups]
    norms = [float(group_norm(group)) for group in counted if group]
    if stages is not None:
        everybody = [norms] * distributed.get_world_size(stages)
        distributed.all_gather_object(everybody, norms, group=stages)
        norms = [norm for stage in everybody for norm in stage]
    if not norms:
        return 0.0
    norm = norms[0] if len(norms) == 1 else math.hypot(*norms)
    scale = clipping(norm, max_norm)
    if scale is not None:
        for group in gradients:
            torch._foreach_mul_([local_part(gradient) for gradient in group], scale)
    return norm


def clipping(norm: float, max_norm: float) -> float | None:
    """The factor that scales gradients of norm ``norm`` down to ``max_norm``, or `None` if they are not scaled.

    A ``max_norm`` of 0 means no limit. Gradients whose norm is not finite are not scaled.
    """
    return max_norm / (norm + 1e-6) if 0 < max_norm < norm < math.inf else None


def group_norm(gradients: Sequence[Tensor]) -> Tensor:
    """The 2-norm () of gradients of one layout, the same on all ranks that share them."""
    norm = get_total_norm([local_part(gradient) for gradient in gradients])
    first = gradients[0]
    if not isinstance(first, DTensor):
        return norm
    mesh = first.device_mesh
    square = norm.to(mesh.device_type).square()
    for dimension, placement in enumerate(first.placements):
        if not placement.is_replicate():
            distributed.all_reduce(square, group=mesh.get_group(dimension))
    return square.sqrt()

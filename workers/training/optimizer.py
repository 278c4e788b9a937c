"""The optimizer of a model, its learning-rate schedule, and one guarded step: AdamW, or Muon for matrices that may be sharded.

Muon (https://kellerjordan.github.io/posts/muon/) keeps the momentum sharded as the matrix is. Each rank gathers the momentum of
one matrix at a time in bfloat16, the numbers in which the Newton-Schulz iteration computes, and orthogonalizes the whole matrix;
so the result does not depend on the layout.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

from dataproto.errors import InvalidConfig
from dataproto.grouping import grouped_by
from dataproto.transfer import move
from workers.model.model_config import AdamParams, OptimizerConfig
from workers.model.named_weights import full_tensor
from workers.ranks.autograd_collectives import local_part
from workers.ranks.mesh import gathered
from workers.training.eight_bit import adamw_8bit, new_moments_8bit
from workers.weights.hollow_model import local_part as part_and_place

EPS = 1e-8  # of a configured AdamW

Moments = Mapping[Tensor, dict[str, Tensor]]  # the optimizer's state of each parameter that has some


def learning_rate_factor(step: int, config: OptimizerConfig) -> float:
    """The factor of ``lr`` at optimizer step ``step`` (from 0).

    >>> linear = OptimizerConfig(schedule="linear", warmup_steps=2, total_steps=6)
    >>> [learning_rate_factor(step, linear) for step in range(7)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]
    >>> learning_rate_factor(3, OptimizerConfig(schedule=lambda step, total: (total - step) ** 0.5, total_steps=7))
    2.0
    """
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return 1.0
    if config.total_steps is None:
        raise InvalidConfig(f"schedule {config.schedule!r} needs total_steps")
    if not isinstance(config.schedule, str):
        decayed = float(config.schedule(step, config.total_steps))
        if not 0 <= decayed < math.inf:
            raise InvalidConfig(
                f"the schedule gave {decayed} for optimizer step {step}: must be a share of lr, at least 0"
            )
        return config.min_lr_ratio + (1 - config.min_lr_ratio) * decayed
    progress = min((step - config.warmup_steps) / (config.total_steps - config.warmup_steps), 1.0)
    decayed = 1 - progress if config.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return config.min_lr_ratio + (1 - config.min_lr_ratio) * decayed


PARAMETERS_A_CALL = 64
"""So many parameters AdamW steps in one call of its kernel. In the first step torch works out the layouts of a call's DTensors,
in a time that grows as the square of their number: 2 s for the 720 of a model of 7B.
"""


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
        chosen = [each for each in self.parameters if id(each) in by_muon]
        self.muon = Muon(chosen, config.lr, config.weight_decay) if chosen else None
        self.adamw = _adamw([each for each in self.parameters if id(each) not in by_muon], config)
        self.rules = [rule for rule in (self.adamw, self.muon) if rule is not None]
        self.stages, self.repeated = stages, frozenset(map(id, repeated))
        self.steps = 0  # of the schedule; skipped ones count
        self._skipped = torch.zeros(())

    @property
    def skipped_steps(self) -> int:
        """How many steps were skipped. Waits for the device."""
        return int(self._skipped)

    def step(self, params: AdamParams | None = None) -> dict[str, Tensor | float]:
        """Clips, steps and clears the gradients; returns ``grad_norm`` before clipping, ``lr`` and ``skipped_steps``.

        With AdamW the host does not wait for the device: norm and count are tensors (), and reading them waits.

        Args:
            params: replace the configuration and its schedule for this step.
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
        skip = ~norm.isfinite()
        for rule in self.rules:
            if isinstance(rule, SkippingAdamW):
                rule.step_unless(skip)
            elif not skip:
                rule.step()
        self._skipped = move(self._skipped, skip.device) + skip
        self.steps += 1
        self.clear_gradients()
        return {"grad_norm": norm, "lr": lr, "skipped_steps": self._skipped}

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
        self.steps, self._skipped = steps, torch.tensor(float(skipped_steps))


class SkippingAdamW(torch.optim.AdamW):
    """Fused AdamW whose steps can be skipped without asking the device whether to."""

    def step_unless(self, skip: Tensor) -> None:
        """A step that changes nothing if ``skip`` () bool is true. `torch.amp.GradScaler` sets the same flag for the kernel."""
        self.found_inf = skip.float()
        self.step()


def _adamw(parameters: Sequence[nn.Parameter], config: OptimizerConfig) -> torch.optim.Optimizer | None:
    groups = group_by_layout(parameters)  # the fused kernel takes parameters of one layout
    if not groups:
        return None
    if config.kind == "adamw8bit":
        return adamw_8bit(groups, config, EPS)
    size = PARAMETERS_A_CALL
    return SkippingAdamW(
        [{"params": group[first : first + size]} for group in groups for first in range(0, len(group), size)],
        lr=config.lr,
        betas=config.betas,
        eps=EPS,
        weight_decay=config.weight_decay,
        fused=True,
    )


def new_moments(parameter: nn.Parameter) -> dict[str, Tensor]:
    """Adam's state of a parameter before its first step, laid out over ranks as it is."""
    return {
        "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
        "exp_avg": torch.zeros_like(parameter, requires_grad=False),
        "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False),
    }


def group_by_layout(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Parameters grouped by their layout over ranks: plain ones, and DTensors of each mesh and placement."""
    layouts = grouped_by(parameters, lambda p: (p.device_mesh, p.placements) if isinstance(p, DTensor) else None)
    return list(layouts.values())


def clip_by_global_norm(
    groups: Sequence[Sequence[nn.Parameter]],
    max_norm: float,
    stages: distributed.ProcessGroup | None = None,
    repeated: Collection[int] = (),
) -> Tensor:
    """Scales the gradients so that the 2-norm of all of them together is at most ``max_norm``; returns the norm () before.

    Each element counts once, whatever its layout: squares of shards are summed over the mesh dimensions that shard them, and
    not over those that repeat them. All ranks get the same number. If the norm is not finite, nothing is scaled. The norm lies
    where the gradients do.

    Args:
        groups: see `group_by_layout`; parameters without gradient are skipped.
        max_norm: 0 for no limit.
        stages: ranks that hold other parameters of the same model.
        repeated: ids of parameters that are scaled here, and counted by another stage.
    """
    counted = [[p.grad for p in group if p.grad is not None and id(p) not in repeated] for group in groups]
    norms = [group_norm(group) for group in counted if group]
    if stages is not None:
        every = [norm for stage in gathered([float(norm) for norm in norms], stages) for norm in stage]
        norms = [torch.tensor(math.hypot(*every), dtype=torch.float64)] if every else []
    if not norms:
        return torch.zeros(())
    norm = norms[0] if len(norms) == 1 else torch.stack([each.double() for each in norms]).norm()
    gradients = [local_part(p.grad) for group in groups for p in group if p.grad is not None]
    if gradients:
        norm = norm.to(gradients[0].device)
    if gradients and max_norm:
        torch._foreach_mul_(gradients, clipping(norm, max_norm))
    return norm


def clipping(norm: Tensor, max_norm: float) -> Tensor:
    """The factor () float32 that scales gradients of ``norm`` () down to ``max_norm``; 1 if the norm is less, or not finite.

    >>> [round(float(clipping(torch.tensor(norm), 2.0)), 3) for norm in (1.0, 4.0, math.inf)]
    [1.0, 0.5, 1.0]
    """
    exact = norm.double()
    return torch.where((exact > max_norm) & exact.isfinite(), max_norm / (exact + 1e-6), 1.0).float()


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


MOMENTUM = 0.95
MOMENTUM_BUFFER = "momentum_buffer"  # torch's name


class Muon(torch.optim.Optimizer):
    """`torch.optim.Muon` with Nesterov momentum, whose matrices may be DTensors.

    Rates are matched to AdamW's (arXiv:2502.16982): an update of a matrix ``(A, B)`` is scaled by ``0.2 sqrt(max(A, B))``,
    which gives it the mean square of an AdamW update.
    """

    def __init__(self, matrices: Iterable[nn.Parameter], lr: float, weight_decay: float) -> None:
        """``matrices``: parameters of two dimensions."""
        super().__init__(matrices, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step; matrices without gradient are skipped. Every rank that holds a part of a matrix calls it."""
        for group in self.param_groups:
            for matrix in group["params"]:
                if matrix.grad is not None:
                    self._step(matrix, matrix.grad, group["lr"], group["weight_decay"])

    def _step(self, matrix: nn.Parameter, grad: Tensor, lr: float, weight_decay: float) -> None:
        state: dict[str, Tensor] = self.state[matrix]
        if not state:
            state |= new_momentum(matrix)
        momentum, gradient = local_part(state[MOMENTUM_BUFFER]), local_part(grad)
        momentum.lerp_(gradient, 1 - MOMENTUM)
        nesterov = torch.empty_like(grad)  # laid out as the matrix
        local_part(nesterov).copy_(gradient.lerp(momentum, MOMENTUM))
        change = orthogonal_change(full_tensor(nesterov, torch.bfloat16).bfloat16(), lr)
        local, place = part_and_place(matrix)
        local.mul_(1 - lr * weight_decay).add_(change[place].to(local.device))


def new_momentum(matrix: nn.Parameter) -> dict[str, Tensor]:
    """Muon's state of a matrix before its first step, laid out over ranks as it is."""
    return {MOMENTUM_BUFFER: torch.zeros_like(matrix, requires_grad=False)}


def orthogonal_change(update: Tensor, lr: float) -> Tensor:
    """What a step adds to a whole matrix: ``-lr 0.2 sqrt(max(A, B)) O`` ``(A, B)`` float32, O orthogonalized ``update``.

    >>> change = orthogonal_change(torch.diag(torch.tensor([3.0, 1.0])), lr=1.0)
    >>> (change / (-0.2 * 2**0.5)).diagonal().round(decimals=0).tolist()  # singular values come near 1
    [1.0, 1.0]
    """
    whole = nn.Parameter(torch.zeros(update.shape, device=update.device))
    whole.grad = update.float()
    rule = torch.optim.Muon(
        [whole], lr=lr, weight_decay=0.0, momentum=0.0, nesterov=False, adjust_lr_fn="match_rms_adamw"
    )
    rule.step()
    return whole.detach()

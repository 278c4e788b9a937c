"""Muon (https://kellerjordan.github.io/posts/muon/), for matrices that may be sharded.

The momentum stays sharded as the matrix is. Each rank gathers the momentum of one matrix at a time in bfloat16, the numbers
in which the Newton-Schulz iteration computes, and orthogonalizes the whole matrix; so the result does not depend on the
layout.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from workers.model.named_weights import full_tensor
from workers.ranks.autograd_collectives import local_part
from workers.weights.hollow_model import local_part as part_and_place

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

"""Whether an AdamW step leaves only numbers that float32 holds. If not, it is refused before it changes anything."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm
from torch.optim.adamw import adamw

from dataproto.errors import InvalidConfig
from workers.model.model_config import LARGEST_FLOAT32, AdamParams
from workers.training.optimizer import Moments, clipping, new_moments

LARGEST_GRADIENT = math.sqrt(LARGEST_FLOAT32)
"""The largest number in gradients whose norm float32 holds, and so in their means."""
ROOM = LARGEST_FLOAT32 / 2  # the other half is for rounding


class StepCheck:
    """Keeps a bound of the numbers in some matrices, and tries a step that may take them beyond float32 on copies first."""

    def __init__(self, matrices: Mapping[str, Tensor]) -> None:
        self.matrices = matrices
        self._bound = math.inf  # not known yet

    def forget(self) -> None:
        """Has the matrices measured again before the next step, after other numbers were loaded into them."""
        self._bound = math.inf

    def __call__(self, params: AdamParams, moments: Moments) -> None:
        """Checks the step that AdamW would make with the gradients of the matrices.

        Args:
            moments: of the matrices before the step.

        Raises:
            InvalidConfig: the step would leave a number that is not finite; nothing has been changed.
        """
        bound = bound_after(self._bound, params)
        if not bound <= ROOM:
            largest = self._measured()
            if not math.isfinite(largest):
                raise InvalidConfig(
                    "the weights are not finite already, so no update was made: load an earlier checkpoint"
                )
            bound = bound_after(largest, params)
        if not bound <= ROOM:
            self._bound = math.inf
            return self._try(params, moments)
        self._bound = bound

    def _measured(self) -> float:
        return float(get_total_norm([matrix.detach() for matrix in self.matrices.values()], math.inf))

    def _try(self, params: AdamParams, moments: Moments) -> None:
        """Makes the step on copies, one matrix after another."""
        gradients = {name: matrix.grad for name, matrix in self.matrices.items() if matrix.grad is not None}
        norm = float(get_total_norm(list(gradients.values()))) if gradients else 0.0
        if not math.isfinite(norm):
            return  # the optimizer skips such a step
        scale = clipping(norm, params.grad_clip_norm)
        for name, gradient in gradients.items():
            matrix = self.matrices[name]
            state = {part: value.clone() for part, value in moments.get(matrix, {}).items()}
            after = _stepped(matrix, gradient if scale is None else gradient * scale, state, params)
            if not bool(torch.stack([each.isfinite().all() for each in after]).all()):
                raise InvalidConfig(
                    f"learning_rate={params.learning_rate:g}, eps={params.eps:g} and weight_decay={params.weight_decay:g} would "
                    f"leave numbers in {name} that float32 does not hold: no update was made, and the gradients are kept for "
                    "another step with smaller settings"
                )


def bound_after(bound: float, params: AdamParams) -> float:
    """A bound of the numbers in matrices after a step, and of all that AdamW computes on the way.

    A matrix has at most ``bound`` before. The means of gradients are at most `LARGEST_GRADIENT`; what divides them is at least
    eps, and the correction of the first mean at least 1 - beta1.
    """
    rate = max(1.0, params.learning_rate / (1 - params.beta1))
    return bound * (1 + params.learning_rate * params.weight_decay) + rate * LARGEST_GRADIENT / min(params.eps, 1.0)


def _stepped(matrix: Tensor, gradient: Tensor, state: dict[str, Tensor], params: AdamParams) -> list[Tensor]:
    """A matrix and its means after a step, which is made on copies."""
    copy = nn.Parameter(matrix.detach().clone())
    state = state or new_moments(copy)
    with torch.no_grad():
        adamw(
            [copy],
            [gradient],
            [state["exp_avg"]],
            [state["exp_avg_sq"]],
            [],
            [state["step"]],
            fused=True,
            amsgrad=False,
            beta1=params.beta1,
            beta2=params.beta2,
            lr=params.learning_rate,
            weight_decay=params.weight_decay,
            eps=params.eps,
            maximize=False,
        )
    return [copy.detach(), state["exp_avg"], state["exp_avg_sq"]]

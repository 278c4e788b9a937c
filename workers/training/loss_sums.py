"""From a loss per token to one number, the same number however the rows were split; and what one call adds up over
micro-batches, pipeline stages and ranks: loss, metrics and scores.

Every mode is a weighted sum over tokens, ``loss = (token_weights(mask, ...) * loss).sum()``. The weights depend on one
number of the whole mini-batch, its `denominator`. With that number passed in, the sums over micro-batches, and over
ranks, add up to the loss of the unsplit mini-batch. `denominator` is a sum over rows, so ranks add theirs up.

Dimension letters: B rows, R response tokens.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor

from dataproto.errors import InvalidColumn, InvalidConfig
from dataproto.serialization.wire import reduce_value
from dataproto.transfer import move
from workers.model.model_config import AggregationMode
from workers.ranks.mesh import Ranks
from workers.training.forward_pass import index_on

MODES: tuple[str, ...] = get_args(AggregationMode)


def denominator(mask: Tensor, mode: str) -> Tensor:
    """The divisor of the whole mini-batch: tokens for ``token-mean``, rows with at least one token otherwise.

    Additive: that of a batch is the sum of those of its parts. Inert rows (mask all 0) add nothing.

    Args:
        mask: (B, R) of any dtype, not zero where the policy sampled the token.
        mode: one of `MODES`.

    Returns:
        () int64 on the device of ``mask``.

    >>> mask = torch.tensor([[1, 1, 1], [1, 0, 0], [0, 0, 0]])
    >>> int(denominator(mask, "token-mean")), int(denominator(mask, "seq-mean-token-mean"))
    (4, 2)
    """
    check_mode(mode)
    sampled = mask != 0
    return sampled.sum() if mode == "token-mean" else sampled.any(-1).sum()


def token_weights(
    mask: Tensor, mode: str, total: Tensor | float | None = None, max_length: int | None = None
) -> Tensor:
    """The weight of each token in the loss.

    With m = mask, N = tokens in the mini-batch, S = rows in the mini-batch that hold a token:

    - ``token-mean``: m / N, each token counts the same (DAPO, arXiv:2503.14476, eq. 8).
    - ``seq-mean-token-mean``: m / (S * the row's own tokens), each row counts the same (GRPO, arXiv:2402.03300, eq. 3).
    - ``seq-mean-token-sum``: m / S, each row counts as its number of tokens.
    - ``seq-mean-token-sum-norm``: m / (S * max_length), no bias by length (Dr. GRPO, arXiv:2503.20783, section 3.2).

    Args:
        mask: (B, R) of any dtype, not zero where the policy sampled the token.
        mode: one of `MODES`.
        total: `denominator` of the whole mini-batch when ``mask`` is a part of it; by default that of ``mask``.
        max_length: the constant of ``seq-mean-token-sum-norm``; by default R, which is right only as long as every
            part has the same width.

    Returns:
        (B, R) float32; all zero if nothing was sampled.

    Raises:
        InvalidConfig: an unknown mode, or a ``max_length`` below 1.

    >>> loss, mask = torch.tensor([[1.0, 2.0, 3.0], [5.0, 0.0, 0.0]]), torch.tensor([[1, 1, 1], [1, 0, 0]])
    >>> [round(float((token_weights(mask, mode) * loss).sum()), 4) for mode in MODES]
    [2.75, 3.5, 5.5, 1.8333]
    >>> token_weights(torch.tensor([[1, 1, 0, 0], [1, 0, 0, 0]]), "seq-mean-token-mean")
    tensor([[0.2500, 0.2500, 0.0000, 0.0000],
            [0.5000, 0.0000, 0.0000, 0.0000]])
    """
    if max_length is not None and max_length < 1:
        raise InvalidConfig(f"max_length must be at least 1, got {max_length}")
    check_mode(mode)
    divisor = torch.as_tensor(denominator(mask, mode) if total is None else total, device=mask.device)
    sampled = (mask != 0).float()
    if mode == "seq-mean-token-mean":
        sampled = sampled / sampled.sum(-1, keepdim=True).clamp(min=1)
    elif mode == "seq-mean-token-sum-norm":
        sampled = sampled / (mask.shape[-1] if max_length is None else max_length)
    return sampled / divisor.clamp(min=1)


def check_mode(mode: str) -> None:
    """`InvalidConfig` unless the mode is one of `MODES`."""
    if mode not in MODES:
        raise InvalidConfig(f"unknown aggregation mode {mode!r}; the modes are {', '.join(MODES)}")


LARGEST = "_max"
"""The end of the names of metrics whose largest value counts, over tokens, ranks and steps; they are not negative."""


@dataclass(frozen=True)
class Updated:
    """The result of an update.

    ``metrics`` are those of all ranks together, averaged over the optimizer steps. ``scores (B, R)`` float32 are a policy's
    log-probs, or a critic's values, of each row before the first step on its mini-batch, 0 where ``response_mask`` is 0.
    """

    metrics: dict[str, float]
    scores: Tensor
    rows: np.ndarray | None = None  # the rows of the caller's batch that they belong to, where ranks have parts of it

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """As a column of a batch, ``scores`` are sent without their padding."""
        return reduce_value((self.metrics, self.scores, self.rows), [self.scores], protocol, _updated)


def _updated(values: tuple[Any, ...]) -> Updated:
    return Updated(*values)


class LossSums:
    """Weighted sums over tokens of this rank's rows.

    >>> sums = LossSums("loss", torch.tensor([[0.5, 0.5]]), torch.device("cpu"))
    >>> values = torch.tensor([[1.0, 3.0]])
    >>> sums.add(slice(0, 1), values, values, {"kl": 2 * values, "kl_max": values})
    tensor(2.)
    >>> {name: float(total) for name, total in sums.totals.items()}
    {'loss': 2.0, 'kl': 4.0, 'kl_max': 3.0}
    """

    def __init__(self, loss_name: str, weights: Tensor, device: torch.device) -> None:
        """``weights (B, R)`` lie on the host."""
        self.loss_name, self.weights, self.device = loss_name, weights, device
        self.totals: dict[str, Tensor] = defaultdict(lambda: torch.zeros((), device=device))
        self.finite = torch.ones(len(weights), dtype=torch.bool, device=device)  # whose loss and scores are finite
        self.scores = torch.zeros(weights.shape, device=device)  # (B, R), of the outputs

    def add(self, index: slice | Tensor, scores: Tensor, loss: Tensor, metrics: Mapping[str, Tensor]) -> Tensor:
        """Adds the rows at ``index``, with values ``(n, R)``; returns their weighted loss (), with gradient.

        Raises:
            InvalidColumn: the loss, or a metric that is no single number, has another shape than the scores; or the loss has no
                gradient, where they have one.
        """
        refuse_other_shapes({self.loss_name: loss}, scores.shape)
        refuse_other_shapes(metrics, scores.shape, torch.Size())
        if scores.requires_grad and not loss.requires_grad:
            raise InvalidColumn(
                "the loss function returned a loss without gradient: compute it from the outputs, neither detached nor under "
                "torch.no_grad(); where there is nothing to learn, return 0 * outputs.scores"
            )
        weights, rows = move(self.weights[index], self.device), index_on(index, self.device)
        total = weighted_sum(loss, weights)
        self.totals[self.loss_name] += total.detach()
        for name, values in metrics.items():
            if name.endswith(LARGEST):
                self.totals[name] = self.totals[name].maximum(largest(values.detach(), weights))
            else:
                self.totals[name] += weighted_sum(values.detach(), weights)
        self.finite[rows] = ((loss.isfinite() & scores.isfinite()) | (weights <= 0)).all(1)
        self.scores[rows] = scores.detach()
        return total

    def take_from_last_stage(self, ranks: Ranks) -> None:
        """Gives all ranks of a pipeline what its last stage has added up."""
        if ranks.size("pp") == 1:
            return
        totals = {name: value.cpu() for name, value in self.totals.items()}
        self.totals, finite, scores = ranks.broadcast_from_last((totals, self.finite.cpu(), self.scores.cpu()), "pp")
        self.finite, self.scores = finite.to(self.device), scores.to(self.device)

    def sums(self, ranks: Ranks) -> dict[str, float]:
        """The sums over the rows of all ranks; of metrics named by `LARGEST`, the largest."""
        return joined_sums([sums for _, sums in self.gathered(ranks)])

    def means(self, ranks: Ranks) -> dict[str, float]:
        """The loss of all ranks, and metrics divided by the weights of all ranks."""
        return joined_means(self.gathered(ranks), self.loss_name)

    def gathered(self, ranks: Ranks) -> list[tuple[float, dict[str, float]]]:
        """Of each data-parallel rank: its weight and its sums."""
        sums = {name: float(value) for name, value in self.totals.items()}
        return ranks.all_gather((float(self.weights.sum()), sums), "dp")


def pair_of(returned: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss and the metrics that a loss function returned; `InvalidColumn` if it returned something else."""
    if not isinstance(returned, tuple | list) or len(returned) != 2 or not isinstance(returned[1], Mapping):
        raise InvalidColumn(f"the loss function returned a {type(returned).__name__}, no pair: return loss, {{}}")
    return returned[0], dict(returned[1])


def refuse_other_shapes(results: Mapping[str, object], tokens: torch.Size, *others: torch.Size) -> None:
    """Raises `InvalidColumn` for a result of a loss function that is not ``tokens``, or one of ``others``."""
    for name, values in results.items():
        if not isinstance(values, Tensor) or values.shape not in (tokens, *others):
            found = tuple(values.shape) if isinstance(values, Tensor) else f"a {type(values).__name__}"
            raise InvalidColumn(
                f"the loss function returned {found} as {name!r}; it must be a tensor with one number for each token, "
                f"{tuple(tokens)}, which the update masks and averages"
            )


def joined_sums(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Sums of several ranks as one; of metrics named by `LARGEST`, which are not negative, the largest.

    >>> joined_sums([{"kl": 1.0, "kl_max": 3.0}, {"kl": 2.0, "kl_max": 1.0}])
    {'kl': 3.0, 'kl_max': 3.0}
    """
    joined: dict[str, float] = defaultdict(float)
    for part in parts:
        for name, value in part.items():
            joined[name] = max(joined[name], value) if name.endswith(LARGEST) else joined[name] + value
    return dict(joined)


def joined_means(
    parts: Sequence[tuple[float, Mapping[str, float]]], loss_name: str, denominator: float = 1.0
) -> dict[str, float]:
    """The loss, divided by ``denominator``, and metrics divided by the weights, of parts with their weights and sums.

    >>> joined_means([(2.0, {"loss": 4.0, "kl": 1.0}), (6.0, {"loss": 4.0, "kl": 3.0})], "loss", denominator=8.0)
    {'loss': 1.0, 'kl': 0.5}
    """
    weight = max(sum(weight for weight, _ in parts), 1e-12)
    divisors = {loss_name: denominator}
    means = [
        {name: value if name.endswith(LARGEST) else value / divisors.get(name, weight) for name, value in sums.items()}
        for _, sums in parts
    ]
    return joined_sums(means)


def averages(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Metrics of several optimizer steps as one: means, and of those named by `LARGEST` the largest.

    >>> averages([{"loss": 1.0, "kl_max": 3.0}, {"loss": 2.0, "kl_max": 1.0}])
    {'loss': 1.5, 'kl_max': 3.0}
    """
    names = steps[0] if steps else ()
    return {
        name: max(step[name] for step in steps)
        if name.endswith(LARGEST)
        else sum(step[name] for step in steps) / len(steps)
        for name in names
    }


def weighted_sum(values: Tensor, weights: Tensor) -> Tensor:
    """Sum of values times weights over tokens of weight above 0. Other values are ignored, even NaN."""
    return (torch.where(weights > 0, values, 0.0) * weights).sum()


def largest(values: Tensor, weights: Tensor) -> Tensor:
    """The largest value, at least 0, among tokens of weight above 0."""
    return torch.where(weights > 0, values, 0.0).amax().clamp_min(0.0)

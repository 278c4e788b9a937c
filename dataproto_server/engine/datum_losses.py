"""The losses of the Tinker API, by name. Each function returns the loss of each token; the API sums them over tokens.

Source of the formulas: https://tinker-docs.thinkingmachines.ai/losses. p are the log-probs of the targets under the policy, q
those under the sampler, A the advantages, and r = exp(p - q). Dimension letters: B rows, R tokens. The functions are elementwise:
tensors may have any shape, all the same. Thresholds of r are numbers, or one for each token.
"""

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from dataproto.errors import InvalidConfig
from workers.model.model_config import LARGEST_FLOAT32


def cross_entropy(log_probs: Tensor, weights: Tensor) -> Tensor:
    """-p w. All tensors are ``(B, R)``.

    >>> cross_entropy(torch.tensor([[-1.0, -2.0]]), torch.tensor([[0.0, 0.5]])).sum()
    tensor(1.)
    """
    return -log_probs * weights


def importance_sampling(log_probs: Tensor, sampling_log_probs: Tensor, advantages: Tensor) -> Tensor:
    """-r A. All tensors are ``(B, R)``, also below."""
    return -(log_probs - sampling_log_probs).exp() * advantages


def ppo(
    log_probs: Tensor,
    sampling_log_probs: Tensor,
    advantages: Tensor,
    clip_low_threshold: float | Tensor = 0.8,
    clip_high_threshold: float | Tensor = 1.2,
) -> Tensor:
    """-min(r A, clamp(r, low, high) A): PPO (arXiv:1707.06347) without a dual clip. The thresholds apply to the ratio r."""
    ratio = (log_probs - sampling_log_probs).exp()
    clipped = _clipped(ratio, clip_low_threshold, clip_high_threshold)
    return -torch.minimum(ratio * advantages, clipped * advantages)


def cispo(
    log_probs: Tensor,
    sampling_log_probs: Tensor,
    advantages: Tensor,
    clip_low_threshold: float | Tensor = 0.0,
    clip_high_threshold: float | Tensor = 4.0,
) -> Tensor:
    """-stop_gradient(clamp(r, low, high)) p A: CISPO (arXiv:2506.13585). Every token has a gradient.

    By default only large ratios are clipped.
    """
    ratio = _clipped((log_probs - sampling_log_probs).exp(), clip_low_threshold, clip_high_threshold)
    return -ratio.detach() * log_probs * advantages


def dro(log_probs: Tensor, sampling_log_probs: Tensor, advantages: Tensor, beta: float = 0.05) -> Tensor:
    """-(p A - beta / 2 (p - q)^2): DRO (arXiv:2405.19107)."""
    if beta < 0:
        raise InvalidConfig(f"beta={beta}: must be at least 0")
    return -(log_probs * advantages - 0.5 * beta * (log_probs - sampling_log_probs) ** 2)


_SAMPLED = ("logprobs", "advantages")
DATUM_LOSSES: dict[str, tuple[Callable[..., Tensor], tuple[str, ...]]] = {
    "cross_entropy": (cross_entropy, ("weights",)),
    "importance_sampling": (importance_sampling, _SAMPLED),
    "ppo": (ppo, _SAMPLED),
    "cispo": (cispo, _SAMPLED),
    "dro": (dro, _SAMPLED),
}
"""Each loss, and the loss inputs that it takes after ``log_probs``, in the order of its arguments."""

WITHOUT_FORMULA = ("gspo", "stable_reinforce", "custom")
"""Losses that the Tinker API has and does not define in public."""
THRESHOLDS = ("clip_low_threshold", "clip_high_threshold")
"""Options that may also be columns, with one number for each token."""


def loss_options(name: str, config: Mapping[str, Any]) -> dict[str, float]:
    """The options of the loss ``name``, as numbers.

    Raises:
        InvalidConfig: the loss or an option is unknown, or an option is no finite number of float32.

    >>> loss_options("dro", {"beta": 1})
    {'beta': 1.0}
    """
    if name in WITHOUT_FORMULA:
        raise InvalidConfig(f"loss {name!r} has no public formula: choose one of {', '.join(DATUM_LOSSES)}")
    if name not in DATUM_LOSSES:
        raise InvalidConfig(f"loss {name!r} is unknown: choose one of {', '.join(DATUM_LOSSES)}")
    options = option_names(name)
    for option, value in config.items():
        if option not in options:
            raise InvalidConfig(f"loss {name!r} has no option {option!r}: it has {', '.join(options) or 'none'}")
        if isinstance(value, str) or not math.isfinite(value):
            raise InvalidConfig(f"loss {name!r}: {option}={value!r} is not a finite number")
        if abs(value) > LARGEST_FLOAT32:
            raise InvalidConfig(
                f"loss {name!r}: {option}={value!r} is beyond {LARGEST_FLOAT32:g}, the largest number of float32"
            )
    return {option: float(value) for option, value in config.items()}


def option_names(name: str) -> list[str]:
    """The options that a loss has."""
    formula, inputs = DATUM_LOSSES[name]
    return list(inspect.signature(formula).parameters)[1 + len(inputs) :]


def _clipped(ratio: Tensor, low: float | Tensor, high: float | Tensor) -> Tensor:
    """The ratio between the thresholds. Raises `InvalidConfig` unless 0 <= low <= high for every token."""
    bounds = [torch.as_tensor(bound, dtype=ratio.dtype, device=ratio.device) for bound in (low, high)]
    if not bool(((bounds[0] >= 0) & (bounds[0] <= bounds[1])).all()):
        given = "of the tokens" if isinstance(low, Tensor) or isinstance(high, Tensor) else f"{low} and {high}"
        raise InvalidConfig(f"clip_low_threshold and clip_high_threshold {given}: must be 0 <= low <= high")
    return ratio.clamp(*bounds)

"""Losses of each token. The worker masks and aggregates them. Dimension letters: B rows, R response tokens.

All policy losses return the loss (B, R) and metrics by name. Each metric is (B, R), without gradient, to be averaged over the
mask: ``actor/pg_clipfrac`` (1 where the clip is active) and ``actor/ppo_kl`` (the k1 estimate of KL(old || new)).
"""

import torch
from torch import Tensor

from dataproto.errors import InvalidConfig

LOG_RATIO_LIMIT = 20.0

Clip = tuple[float, float]
"""Low and high, the distances from 1 at which a ratio is clipped."""
LossAndMetrics = tuple[Tensor, dict[str, Tensor]]
"""The loss (B, R), and metrics by name, each (B, R)."""


def clipped_policy_loss(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, clip: Clip = (0.2, 0.2), dual_clip: float | None = 3.0
) -> LossAndMetrics:
    """PPO: the negative clipped objective, with separate low and high clips and the dual clip.

    With the ratio w = exp(log_probs - old_log_probs), A = advantages, clip = (low, high), c = dual_clip,

        L = max(-A w, -A clamp(w, 1 - low, 1 + high))    PPO, arXiv:1707.06347, eq. 7
                                                         with low < high: DAPO, arXiv:2503.14476, eq. 10
        L = min(L, -A c)  where A < 0                    dual clip, arXiv:1912.09729, eq. 5; off with ``None``

    Deviation: log_probs - old_log_probs is clamped to [-20, 20], as in verl. The gradient is zero outside, and where the
    difference is NaN, so values outside the mask are arbitrary.

    Args:
        log_probs: (B, R) float, with gradient.
        old_log_probs: (B, R) float, of the policy before this update.
        advantages: (B, R) float, finite everywhere.
        clip: low and high, the distances from 1 at which the ratio is clipped.
        dual_clip: upper bound of the ratio where the advantage is negative; above 1.

    Returns:
        The loss, (B, R), and the metrics; also ``actor/pg_clipfrac_lower`` (1 where the dual clip is active).

    Raises:
        InvalidConfig: ``clip`` is negative, or ``dual_clip`` is not above 1.

    >>> log_probs = torch.tensor([[0.5, 1.5, 4.0]]).log()
    >>> advantages = torch.tensor([[1.0, 1.0, -1.0]])
    >>> loss, metrics = clipped_policy_loss(log_probs, torch.zeros(1, 3), advantages, clip=(0.2, 0.28))
    >>> loss
    tensor([[-0.5000, -1.2800,  3.0000]])
    >>> metrics["actor/pg_clipfrac"], metrics["actor/pg_clipfrac_lower"]
    (tensor([[0., 1., 0.]]), tensor([[0., 0., 1.]]))
    """
    log_ratio = _clamped_log_ratio(log_probs, old_log_probs)
    loss, clip_active = _clipped(log_ratio.exp(), advantages, clip)
    dual_clip_active = torch.zeros_like(clip_active)
    if dual_clip is not None:
        if dual_clip <= 1:
            raise InvalidConfig(f"dual_clip must be above 1, got {dual_clip}")
        bound = -advantages * dual_clip
        dual_clip_active = (advantages < 0) & (loss > bound)
        loss = torch.where(dual_clip_active, bound, loss)
    return loss, _metrics(clip_active, log_ratio) | {"actor/pg_clipfrac_lower": dual_clip_active.float()}


def sequence_policy_loss(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, response_mask: Tensor, clip: Clip = (3e-4, 4e-4)
) -> LossAndMetrics:
    """GSPO: PPO's clipped objective with one ratio for the whole response (arXiv:2507.18071, eq. 5 to 7).

    With d_t = log_probs - old_log_probs and the stop-gradient operator sg, over the sampled tokens t of a row,

        s   = exp(mean(d_t))                                   the geometric mean of the tokens' ratios
        s_t = sg(s) * exp(log_probs_t - sg(log_probs_t))       GSPO-token, eq. 13 and 14: equal to s in value
        L_t = max(-A_t s_t, -A_t clamp(s_t, 1 - low, 1 + high))

    If the advantages are equal within a row, the mean of L_t over its tokens has GSPO's value and gradient. Aggregate with
    ``seq-mean-token-mean``. The default clip is the paper's; it is narrow because s varies far less than a token's ratio.

    Deviation: log s is clamped to [-20, 20] (verl: at most 10); the gradient is zero outside.

    Args:
        log_probs: (B, R) float, with gradient.
        old_log_probs: (B, R) float, of the policy before this update.
        advantages: (B, R) float, finite everywhere.
        response_mask: (B, R) of any dtype, nonzero where the policy sampled the token.
        clip: low and high, the distances from 1 at which the ratio is clipped.

    Returns:
        The loss, (B, R), and the metrics.

    Raises:
        InvalidConfig: ``clip`` is negative.

    >>> log_probs, advantages = torch.tensor([[0.5, 4.5, 7.0]]).log(), torch.ones(1, 3)
    >>> mask = torch.tensor([[1, 1, 0]])
    >>> sequence_policy_loss(log_probs, torch.zeros(1, 3), advantages, mask, clip=(0.2, 0.28))[0][:, :2]
    tensor([[-1.2800, -1.2800]])
    """
    sampled = response_mask != 0
    new, log_ratio = (torch.where(sampled, each, 0.0) for each in (log_probs, log_probs - old_log_probs))
    mean = log_ratio.detach().sum(-1, keepdim=True) / sampled.sum(-1, keepdim=True).clamp(min=1)
    ratio = torch.clamp(mean + new - new.detach(), -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    loss, clip_active = _clipped(ratio, advantages, clip)
    return loss, _metrics(clip_active, log_ratio)


def clipped_weight_loss(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, response_mask: Tensor, clip: Clip = (1.0, 4.0)
) -> LossAndMetrics:
    """CISPO: REINFORCE with a clipped importance weight (MiniMax-M1, arXiv:2506.13585, eq. 4 and 5).

    With the ratio w = exp(log_probs - old_log_probs), A = advantages, and the stop-gradient operator sg,

        L = -sg(clamp(w, 1 - low, 1 + high)) A log_probs

    so that every token has a gradient, also where PPO's clip is active. The paper sets no lower bound, which is ``low = 1``;
    the default upper bound, a weight of 5, is ScaleRL's (arXiv:2510.13786).

    Deviation: log_probs - old_log_probs is clamped to [-20, 20], as in verl.

    Args, returns, raises: as `sequence_policy_loss`.

    >>> log_probs = torch.tensor([[0.5, 8.0]]).log()
    >>> loss, metrics = clipped_weight_loss(log_probs, torch.zeros(1, 2), torch.ones(1, 2), torch.ones(1, 2))
    >>> loss / log_probs
    tensor([[-0.5000, -5.0000]])
    >>> metrics["actor/pg_clipfrac"]
    tensor([[0., 1.]])
    """
    low, high = _checked(clip)
    sampled = response_mask != 0
    new, log_ratio = (torch.where(sampled, each, 0.0) for each in (log_probs, log_probs - old_log_probs))
    log_ratio = log_ratio.detach().clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    ratio = log_ratio.exp()
    weight = ratio.clamp(1 - low, 1 + high)
    return -weight * advantages * new, _metrics(weight != ratio, log_ratio)


def gated_policy_loss(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, sapo_temperatures: tuple[float, float] = (1.0, 1.05)
) -> LossAndMetrics:
    """SAPO: a smooth gate on the ratio instead of a clip (arXiv:2511.20347, section 3).

    With the ratio w = exp(log_probs - old_log_probs), A = advantages, and the logistic function s,

        L = -A f(w),    f(w) = 4 / t s(t (w - 1)),    t = positive where A > 0, else negative

    At w = 1 the gradient of f equals that of w. It decays with the distance from 1, faster for a higher temperature t. The
    paper averages over the tokens of a response first: aggregate with ``seq-mean-token-mean``.

    Deviation: log_probs - old_log_probs is clamped to [-20, 20], as in verl. ``actor/pg_clipfrac`` is 0 everywhere.

    Args:
        log_probs: (B, R) float, with gradient.
        old_log_probs: (B, R) float, of the policy before this update.
        advantages: (B, R) float, finite everywhere.
        sapo_temperatures: positive and negative; both above 0.

    Returns:
        The loss, (B, R), and the metrics.

    Raises:
        InvalidConfig: a temperature is not above 0.

    >>> log_probs = torch.tensor([[1.0, 2.0, 2.0]]).log()
    >>> gated_policy_loss(log_probs, torch.zeros(1, 3), torch.tensor([[1.0, 1.0, -1.0]]))[0]
    tensor([[-2.0000, -2.9242,  2.8220]])
    """
    if min(sapo_temperatures) <= 0:
        raise InvalidConfig(f"sapo_temperatures={sapo_temperatures} must be above 0")
    log_ratio = _clamped_log_ratio(log_probs, old_log_probs)
    temperature = torch.where(advantages > 0, *sapo_temperatures)
    gate = torch.sigmoid(temperature * (log_ratio.exp() - 1)) * 4 / temperature
    return -advantages * gate, _metrics(torch.zeros_like(log_ratio), log_ratio)


def clip_cov_loss(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, high_covariance: Tensor, clip: Clip = (1.0, 1.0)
) -> LossAndMetrics:
    """Clip-Cov: no gradient for some of the tokens that lower the entropy most (arXiv:2505.22617, section 4).

    This is `clipped_policy_loss` without dual clip, and 0 where ``high_covariance`` is True; see
    `recipes.algorithms.covariances.random_high_covariance`. These tokens still count in the denominators.

    Args:
        log_probs, old_log_probs, advantages: as `clipped_policy_loss`.
        high_covariance: (B, R) bool.
        clip: low and high, the distances from 1 at which the ratio is clipped; the default is that of the paper's code.

    Returns, raises: as `clipped_policy_loss`; ``actor/pg_clipfrac`` is 1 where ``high_covariance`` is True.

    >>> chosen = torch.tensor([[True, False]])
    >>> clip_cov_loss(torch.zeros(1, 2), torch.zeros(1, 2), torch.ones(1, 2), chosen)[0]
    tensor([[-0., -1.]])
    """
    loss, metrics = clipped_policy_loss(log_probs, old_log_probs, advantages, clip, dual_clip=None)
    chosen = high_covariance != 0
    metrics = {"actor/pg_clipfrac": chosen.float(), "actor/ppo_kl": metrics["actor/ppo_kl"]}
    return torch.where(chosen, 0.0 * loss.detach(), loss), metrics


def kl_cov_loss(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, high_covariance: Tensor, kl_cov_coef: float = 1.0
) -> LossAndMetrics:
    """KL-Cov: a penalty on the tokens that lower the entropy most (arXiv:2505.22617, section 4).

    With the ratio w = exp(log_probs - old_log_probs) and A = advantages,

        L = -A w                                               no clip
        L = -A w + kl_cov_coef |log_probs - old_log_probs|     where ``high_covariance`` is True

    See `recipes.algorithms.covariances.highest_covariance`. The absolute value is the estimate of KL(old || new) in the
    paper's code and in verl.

    Deviation: log_probs - old_log_probs is clamped to [-20, 20].

    Args:
        log_probs, old_log_probs, advantages: as `clipped_policy_loss`.
        high_covariance: (B, R) bool.
        kl_cov_coef: weight of the penalty, at least 0.

    Returns:
        The loss, (B, R), and the metrics; ``actor/pg_clipfrac`` is 0 everywhere.

    >>> chosen = torch.tensor([[True, False]])
    >>> kl_cov_loss(torch.full((1, 2), 0.1), torch.zeros(1, 2), torch.ones(1, 2), chosen)[0]
    tensor([[-1.0052, -1.1052]])
    """
    log_ratio = _clamped_log_ratio(log_probs, old_log_probs)
    penalty = torch.where(high_covariance != 0, kl_cov_coef * log_ratio.abs(), 0.0)
    return -advantages * log_ratio.exp() + penalty, _metrics(torch.zeros_like(log_ratio), log_ratio)


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float | None = 0.5) -> LossAndMetrics:
    """The critic's squared error, clipped around the values before the update.

        L = max((V - returns)^2, (clamp(V, V_old - clip, V_old + clip) - returns)^2) / 2

    This is the counterpart of PPO's clip for values, from OpenAI's baselines (see arXiv:2005.12729, section 3). The form and
    the default clip are verl's. Without ``clip`` it is half the squared error.

    Args:
        values: (B, R) float, with gradient.
        old_values: (B, R) float, of the critic before this update.
        returns: (B, R) float, the targets.
        clip: the distance from the old value at which the value is clipped.

    Returns:
        The loss, (B, R), and metrics by name, each (B, R) without gradient, to be averaged over the mask:
        ``critic/vf_loss``, ``critic/vf_clipfrac`` (1 where the clip is active), ``critic/vpred_mean``.

    Raises:
        InvalidConfig: ``clip`` is not above 0.

    >>> loss, metrics = value_loss(torch.tensor([[1.0, 1.0]]), torch.tensor([[0.0, 1.0]]), torch.tensor([[2.0, 2.0]]))
    >>> loss
    tensor([[1.1250, 0.5000]])
    """
    if clip is not None and clip <= 0:
        raise InvalidConfig(f"the clip of values must be above 0, got {clip}")
    loss = unclipped = (values - returns).square() / 2
    active = torch.zeros_like(unclipped)
    if clip is not None:
        clipped = (values.clamp(old_values - clip, old_values + clip) - returns).square() / 2
        loss, active = torch.maximum(unclipped, clipped), (clipped > unclipped).float()
    return loss, {"critic/vf_loss": loss.detach(), "critic/vf_clipfrac": active, "critic/vpred_mean": values.detach()}


def _clamped_log_ratio(log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
    return torch.clamp(log_probs - old_log_probs, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def _clipped(ratio: Tensor, advantages: Tensor, clip: Clip) -> tuple[Tensor, Tensor]:
    """PPO's clipped loss, (B, R), and where the clip is active, (B, R) bool."""
    low, high = _checked(clip)
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - low, 1 + high)
    return torch.maximum(unclipped, clipped), clipped > unclipped


def _metrics(clipped: Tensor, log_ratio: Tensor) -> dict[str, Tensor]:
    """The metrics of a policy loss, each (B, R), of where its clip is active and of the log ratio."""
    return {"actor/pg_clipfrac": clipped.float(), "actor/ppo_kl": -log_ratio.detach()}


def _checked(clip: Clip) -> Clip:
    if min(clip) < 0:
        raise InvalidConfig(f"clip must not be negative, got {clip}")
    return clip

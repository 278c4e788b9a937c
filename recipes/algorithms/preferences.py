"""Losses of preferred answers. Dimension letters: N pairs, B rows.

A ratio is ``log pi(answer | prompt) - log pi_ref(answer | prompt)``, summed over the tokens of the answer. Each function returns
one loss for each pair ``(N,)``, or for each answer ``(B,)``, which a run averages.

>>> chosen, rejected = torch.tensor([2.0]), torch.tensor([-1.0])
>>> sigmoid_loss(chosen, rejected, beta=0.1), hinge_loss(chosen, rejected, beta=0.1)
(tensor([0.5544]), tensor([0.7000]))
"""

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid


def sigmoid_loss(chosen_ratios: Tensor, rejected_ratios: Tensor, beta: float, label_smoothing: float = 0.0) -> Tensor:
    """DPO (arXiv:2305.18290, eq. 7); with ``label_smoothing``, the share of pairs whose labels are wrong, conservative DPO."""
    return smoothed(beta * (chosen_ratios - rejected_ratios), label_smoothing)


def smoothed(margins: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """The cross-entropy of the labels, of which a share of ``label_smoothing`` is the other way round."""
    return -(1 - label_smoothing) * logsigmoid(margins) - label_smoothing * logsigmoid(-margins)


def robust_loss(chosen_ratios: Tensor, rejected_ratios: Tensor, beta: float, label_smoothing: float = 0.0) -> Tensor:
    """Robust DPO (arXiv:2403.00409, eq. 8): without the bias of a share of ``label_smoothing`` wrong labels; below 0.5."""
    margins = beta * (chosen_ratios - rejected_ratios)
    found = (1 - label_smoothing) * logsigmoid(margins) - label_smoothing * logsigmoid(-margins)
    return -found / (1 - 2 * label_smoothing)


def hinge_loss(chosen_ratios: Tensor, rejected_ratios: Tensor, beta: float) -> Tensor:
    """SLiC's hinge on DPO's margin (arXiv:2309.06657)."""
    return torch.relu(1 - beta * (chosen_ratios - rejected_ratios))


def ipo_loss(
    chosen_ratios: Tensor, rejected_ratios: Tensor, chosen_lengths: Tensor, rejected_lengths: Tensor, beta: float
) -> Tensor:
    """IPO (arXiv:2310.12036, eq. 17) with ``beta`` as tau, on ratios per token, as its authors and TRL have it."""
    margins = chosen_ratios / chosen_lengths - rejected_ratios / rejected_lengths
    return (margins - 1 / (2 * beta)) ** 2


def sigmoid_norm_loss(
    chosen_ratios: Tensor,
    rejected_ratios: Tensor,
    chosen_lengths: Tensor,
    rejected_lengths: Tensor,
    beta: float,
    label_smoothing: float = 0.0,
) -> Tensor:
    """DPO normalised by length: on ratios per token (Tulu 3, arXiv:2411.15124, section 5)."""
    return sigmoid_loss(chosen_ratios / chosen_lengths, rejected_ratios / rejected_lengths, beta, label_smoothing)


def kto_loss(
    ratios: Tensor,
    desirable: Tensor,
    kl: float,
    beta: float,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """KTO (arXiv:2402.01306, eq. 7) for answers without a partner.

    Args:
        desirable: (B,) 1 for a desirable answer, 0 for an undesirable one.
        kl: the estimate of KL(pi || pi_ref) that answers are measured from, at least 0: see `mismatch_kl`.

    >>> kto_loss(torch.tensor([1.0, 1.0]), torch.tensor([1, 0]), kl=1.0, beta=0.1, undesirable_weight=2.0)
    tensor([0.5000, 1.0000])
    """
    good = desirable.bool()
    gained = torch.where(good, ratios - kl, kl - ratios)
    return torch.where(good, desirable_weight, undesirable_weight) * (1 - torch.sigmoid(beta * gained))


def mismatch_kl(ratios: Tensor) -> float:
    """KTO's estimate of KL(pi || pi_ref): the mean ratio of answers to other prompts, at least 0.

    >>> mismatch_kl(torch.tensor([1.0, 2.0])), mismatch_kl(torch.tensor([-1.0, -2.0]))
    (1.5, 0.0)
    """
    return max(float(ratios.mean()), 0.0) if len(ratios) else 0.0


def bradley_terry_loss(chosen: Tensor, rejected: Tensor) -> Tensor:
    """The negative log-likelihood of the preferences, under scores ``(N,)`` of both answers.

    >>> bradley_terry_loss(torch.tensor([1.0, 0.0]), torch.tensor([-1.0, 0.0]))
    tensor([0.1269, 0.6931])
    """
    return smoothed(chosen - rejected)

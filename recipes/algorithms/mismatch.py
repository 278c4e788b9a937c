"""Metrics of the mismatch between engine and actor, whose log-probs of the same token should be equal.

Dimension letters: B rows, R response tokens, N sampled tokens.
"""

import torch
from torch import Tensor

from dataproto import DataProto
from recipes.algorithms.correction import LOG_RATIO_LIMIT

PREFIX = "training/rollout_probs_diff_"


def difference_metrics(data: DataProto, actor: Tensor) -> dict[str, float]:
    """Compares the column ``rollout_log_probs`` with the actor's log-probs ``(B, R)``.

    Returns:
        verl's mean, maximum and standard deviation of the absolute differences of probabilities, and `log_differences` of all
        rows, of rows of ``text`` only, and of rows with ``images``; without those that have no token.

    >>> engine, actor = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.5, 0.25]]).log()
    >>> data = DataProto.from_dict({"rollout_log_probs": engine, "response_mask": torch.ones(1, 2)})
    >>> found = difference_metrics(data, actor)
    >>> found["training/rollout_probs_diff_max"], round(found["training/rollout_probs_diff_text_log_max"], 4)
    (0.25, 0.6931)
    """
    mask, engine = data["response_mask"].bool(), data["rollout_log_probs"]
    probabilities = (actor[mask].double().exp() - engine[mask].double().exp()).abs()
    if not len(probabilities):
        return {}
    metrics = {
        f"{PREFIX}mean": float(probabilities.mean()),
        f"{PREFIX}max": float(probabilities.max()),
        f"{PREFIX}std": float(probabilities.std(correction=0)),
    }
    every_row = torch.ones(len(data), dtype=torch.bool)
    has_media = ~every_row
    if "multi_modal_inputs" in data:
        has_media = torch.tensor([bool(media) for media in data["multi_modal_inputs"]], dtype=torch.bool)
    for kind, rows in {"": every_row, "text_": ~has_media, "images_": has_media}.items():
        if (chosen := mask & rows[:, None]).any():
            found = log_differences(actor[chosen], engine[chosen])
            metrics |= {f"{PREFIX}{kind}{name}": value for name, value in found.items()}
    return metrics


def log_differences(actor: Tensor, engine: Tensor) -> dict[str, float]:
    """Statistics of ``|actor - engine|`` over the log-probs ``(N,)`` of tokens, and of the importance ratios exp(actor - engine):
    their mean, 1 if there is no mismatch, and the share of those that differ from 1 by more than 0.01.

    >>> found = log_differences(torch.tensor([0.5, 0.5]).log(), torch.tensor([0.5, 0.25]).log())
    >>> round(found["log_max"], 4), round(found["ratio_mean"], 4), found["ratio_off"]
    (0.6931, 1.5, 0.5)
    """
    log_ratio = (actor - engine).double()
    difference, ratio = log_ratio.abs(), log_ratio.exp()
    return {
        "log_mean": float(difference.mean()),
        "log_p99": float(difference.kthvalue(max(1, round(0.99 * len(difference)))).values),
        "log_max": float(difference.max()),
        "ratio_mean": float(ratio.mean()),
        "ratio_off": float(((ratio - 1).abs() > 0.01).double().mean()),
    }


def correction_metrics(
    old_log_probs: Tensor,
    rollout_log_probs: Tensor,
    mask: Tensor,
    weights: Tensor | None = None,
    kept: Tensor | None = None,
) -> dict[str, float]:
    """Metrics of the two policies and of the correction, under verl's names.

    Always, with d = old_log_probs - rollout_log_probs: ``kl`` (mean of -d) and ``k3_kl`` of the engine's policy to the
    actor's; of the perplexities of rows ``training_ppl``, ``rollout_ppl``, ``ppl_ratio``, ``log_ppl_diff`` and
    ``log_ppl_abs_diff``; ``chi2_token`` and ``chi2_seq`` (mean of the squared ratio, minus 1). With ``weights``:
    ``rollout_is_mean``, ``_max``, ``_min``, ``_std`` and ``_eff_sample_size`` (mean^2 / mean of squares). With ``kept``:
    ``rollout_rs_masked_fraction`` and ``rollout_rs_seq_masked_fraction`` (share of rows that lost a token).
    Deviation: rows without sampled tokens are left out (verl counts them).

    Args:
        old_log_probs: (B, R) float, of the actor before its update.
        rollout_log_probs: (B, R) float, of the engine.
        mask: (B, R) of any dtype, nonzero where the policy sampled the token.
        weights: (B, R), from `recipes.algorithms.correction.importance_weights`.
        kept: (B, R), from `recipes.algorithms.correction.kept_tokens`.

    Returns:
        The metrics, with the prefix ``rollout_corr/``; empty if no token was sampled.
    """
    sampled = mask != 0
    if not sampled.any():
        return {}
    found = _policy_metrics(old_log_probs, rollout_log_probs, sampled)
    if weights is not None:
        found |= _weight_metrics(weights[sampled].double())
    if kept is not None:
        rejected = sampled & (kept == 0)
        found["rollout_rs_masked_fraction"] = rejected[sampled].double().mean()
        found["rollout_rs_seq_masked_fraction"] = rejected.any(-1)[sampled.any(-1)].double().mean()
    return {f"rollout_corr/{name}": float(value) for name, value in found.items()}


def _policy_metrics(old_log_probs: Tensor, rollout_log_probs: Tensor, sampled: Tensor) -> dict[str, Tensor]:
    """Divergences and perplexities of the two policies, over the tokens and rows with a sampled token."""
    rows = sampled.any(-1)
    lengths = sampled.sum(-1)[rows]
    old, rollout = (torch.where(sampled, each.detach(), 0.0).double() for each in (old_log_probs, rollout_log_probs))
    log_ratio = torch.where(sampled, old_log_probs.detach() - rollout_log_probs, 0.0).double()
    tokens = log_ratio[sampled]
    training_log_ppl, rollout_log_ppl = (-each.sum(-1)[rows] / lengths for each in (old, rollout))
    log_ppl_diff = training_log_ppl - rollout_log_ppl
    clamped_tokens, clamped_rows = (
        each.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT) for each in (tokens, log_ratio.sum(-1)[rows])
    )
    return {
        "kl": -tokens.mean(),
        "k3_kl": (tokens.exp() - 1 - tokens).mean(),
        "training_ppl": training_log_ppl.exp().mean(),
        "rollout_ppl": rollout_log_ppl.exp().mean(),
        "ppl_ratio": log_ppl_diff.exp().mean(),
        "log_ppl_diff": log_ppl_diff.mean(),
        "log_ppl_abs_diff": log_ppl_diff.abs().mean(),
        "chi2_token": (2 * clamped_tokens).exp().mean() - 1,
        "chi2_seq": (2 * clamped_rows).exp().mean() - 1,
    }


def _weight_metrics(weights: Tensor) -> dict[str, Tensor]:
    """Statistics of the importance weights ``(N,)`` of the sampled tokens."""
    return {
        "rollout_is_mean": weights.mean(),
        "rollout_is_max": weights.max(),
        "rollout_is_min": weights.min(),
        "rollout_is_std": weights.std(correction=0),
        "rollout_is_eff_sample_size": weights.mean() ** 2 / weights.square().mean().clamp(min=1e-12),
    }

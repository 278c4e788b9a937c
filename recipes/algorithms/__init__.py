"""Policy-gradient algorithms as pure functions on tensors, and the options that select them. See docs/algorithms.md."""

from typing import TYPE_CHECKING

from dataproto.extras import lazy_names

if TYPE_CHECKING:
    from recipes.algorithms.advantages import (
        gae,
        greedy_baseline_advantage,
        group_advantage,
        informative_rows,
        leave_one_out_advantage,
        length_weighted_advantage,
        reinforce_plus_plus,
        reinforce_plus_plus_baseline,
        whiten,
    )
    from recipes.algorithms.correction import importance_weights, kept_tokens
    from recipes.algorithms.covariances import highest_covariance, random_high_covariance
    from recipes.algorithms.kl import k1_kl, k2_kl, k3_kl, reverse_kl_advantage, unbiased_k3_kl
    from recipes.algorithms.losses import (
        clip_cov_loss,
        clipped_policy_loss,
        clipped_weight_loss,
        gated_policy_loss,
        kl_cov_loss,
        sequence_policy_loss,
        value_loss,
    )
    from recipes.algorithms.mismatch import Differences, correction_metrics, difference_metrics, differences
    from recipes.algorithms.options import (
        AlgorithmConfig,
        NamedLoss,
        add_loss_columns,
        advantage_columns,
    )
    from recipes.algorithms.penalties import KLController, overlong_penalty, penalised_rewards
    from recipes.algorithms.registry import ADVANTAGES, LOSSES
    from recipes.algorithms.turn_advantages import (
        bi_level_gae,
        gigpo_advantage,
        turn_gae,
        turn_returns_advantage,
        uncut_tokens,
    )

__all__ = [
    "ADVANTAGES",
    "LOSSES",
    "AlgorithmConfig",
    "Differences",
    "KLController",
    "NamedLoss",
    "add_loss_columns",
    "advantage_columns",
    "bi_level_gae",
    "clip_cov_loss",
    "clipped_policy_loss",
    "clipped_weight_loss",
    "correction_metrics",
    "difference_metrics",
    "differences",
    "gae",
    "gated_policy_loss",
    "gigpo_advantage",
    "greedy_baseline_advantage",
    "group_advantage",
    "highest_covariance",
    "importance_weights",
    "informative_rows",
    "k1_kl",
    "k2_kl",
    "k3_kl",
    "kept_tokens",
    "kl_cov_loss",
    "leave_one_out_advantage",
    "length_weighted_advantage",
    "overlong_penalty",
    "penalised_rewards",
    "random_high_covariance",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "reverse_kl_advantage",
    "sequence_policy_loss",
    "turn_gae",
    "turn_returns_advantage",
    "unbiased_k3_kl",
    "uncut_tokens",
    "value_loss",
    "whiten",
]

__getattr__ = lazy_names(
    __name__,
    ".advantages",
    ".correction",
    ".covariances",
    ".kl",
    ".losses",
    ".mismatch",
    ".options",
    ".penalties",
    ".registry",
    ".turn_advantages",
)

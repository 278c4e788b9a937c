from .advantages import (
    gae as gae,
    greedy_baseline_advantage as greedy_baseline_advantage,
    group_advantage as group_advantage,
    informative_rows as informative_rows,
    leave_one_out_advantage as leave_one_out_advantage,
    length_weighted_advantage as length_weighted_advantage,
    reinforce_plus_plus as reinforce_plus_plus,
    reinforce_plus_plus_baseline as reinforce_plus_plus_baseline,
    whiten as whiten,
)
from .correction import importance_weights as importance_weights, kept_tokens as kept_tokens
from .covariances import highest_covariance as highest_covariance, random_high_covariance as random_high_covariance
from .kl import (
    k1_kl as k1_kl,
    k2_kl as k2_kl,
    k3_kl as k3_kl,
    reverse_kl_advantage as reverse_kl_advantage,
    unbiased_k3_kl as unbiased_k3_kl,
)
from .losses import (
    clip_cov_loss as clip_cov_loss,
    clipped_policy_loss as clipped_policy_loss,
    clipped_weight_loss as clipped_weight_loss,
    gated_policy_loss as gated_policy_loss,
    kl_cov_loss as kl_cov_loss,
    sequence_policy_loss as sequence_policy_loss,
    value_loss as value_loss,
)
from .mismatch import correction_metrics as correction_metrics, difference_metrics as difference_metrics
from .options import (
    AlgorithmConfig as AlgorithmConfig,
    NamedLoss as NamedLoss,
    add_loss_columns as add_loss_columns,
    advantage_columns as advantage_columns,
)
from .penalties import (
    overlong_penalty as overlong_penalty,
    penalised_rewards as penalised_rewards,
)
from .registry import ADVANTAGES as ADVANTAGES, LOSSES as LOSSES
from .turn_advantages import (
    bi_level_gae as bi_level_gae,
    gigpo_advantage as gigpo_advantage,
    turn_gae as turn_gae,
    turn_returns_advantage as turn_returns_advantage,
    uncut_tokens as uncut_tokens,
)

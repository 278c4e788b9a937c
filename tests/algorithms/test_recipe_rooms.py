"""The public names of the packages of recipes that others build on."""

import importlib

import pytest

NAMES = {
    "recipes.algorithms": [
        *(
            "ADVANTAGES",
            "AlgorithmConfig",
            "LOSSES",
            "NamedLoss",
            "add_loss_columns",
            "advantage_columns",
        ),
        *("bi_level_gae", "gigpo_advantage", "turn_gae", "turn_returns_advantage", "uncut_tokens"),
        *("clip_cov_loss", "clipped_policy_loss", "clipped_weight_loss", "correction_metrics"),
        *("difference_metrics", "gae", "gated_policy_loss", "greedy_baseline_advantage"),
        *("group_advantage", "highest_covariance", "importance_weights", "informative_rows", "k1_kl", "k2_kl", "k3_kl"),
        *("kept_tokens", "kl_cov_loss", "leave_one_out_advantage", "length_weighted_advantage"),
        *("overlong_penalty", "penalised_rewards", "random_high_covariance", "reinforce_plus_plus"),
        *(
            "reinforce_plus_plus_baseline",
            "reverse_kl_advantage",
            "sequence_policy_loss",
            "unbiased_k3_kl",
            "value_loss",
            "whiten",
        ),
    ],
    "recipes.rewards": [
        *("AnswerChecker", "RewardFunction", "RewardRow", "SequenceClassifier", "WeightedRewards"),
        *("as_reward_function", "compute_score", "format_score", "normalised", "short_answer_reward"),
        *("from_easyr1", "from_trl", "from_verl", "geo3k_reward", "load_reward", "remote_reward"),
    ],
}


@pytest.mark.parametrize("package", NAMES)
def test_the_package_exports_exactly_this(package: str) -> None:
    module = importlib.import_module(package)
    assert sorted(module.__all__) == sorted(NAMES[package])
    assert all(hasattr(module, name) for name in module.__all__)

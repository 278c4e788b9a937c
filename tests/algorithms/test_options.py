"""Valid combinations of options, and the functions that they select."""

from dataclasses import replace

import pytest
import torch

from dataproto import DataProto
from dataproto.errors import InvalidConfig
from recipes import geo3k_grpo, geo3k_ppo
from recipes.algorithms import advantages, losses
from recipes.algorithms.kl import k1_kl, k2_kl
from recipes.algorithms.options import AlgorithmConfig, advantage_columns
from recipes.algorithms.registry import VERL
from recipes.grpo import GRPOConfig, policy_loss
from workers.model.packed_model import Outputs


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"advantage": "rloo", "n": 1}, "at least 2"),
        ({"advantage": "dr_grpo", "n": 1}, "at least 2"),
        ({"advantage": "reinforce_plus_plus", "n": 1, "dynamic_sampling": 3}, "groups"),
        ({"dynamic_sampling": 1}, "at least 2 generations"),
        ({"dynamic_sampling": -1}, "at least 2 generations"),
        ({"gamma": 0.9}, "grpo has no discount for each token"),
        ({"advantage": "reinforce_plus_plus", "gamma": 1.1}, "from 0 to 1"),
        ({"loss": "gspo", "dual_clip": 2.0}, "gspo does not have this option; it is for ppo"),
        ({"loss": "cispo", "dual_clip": 2.0}, "it is for ppo"),
        ({"loss": "sapo", "clip": (0.1, 0.1)}, "sapo does not have this option; it is for ppo"),
        ({"loss": "gpso"}, r"algorithm.loss='gpso' is unknown: choose one of ppo, .* or FILE.py:FUNCTION"),
        ({"advantage": "grop"}, r"algorithm.advantage='grop' is unknown: choose one of grpo, .* or FILE.py:FUNCTION"),
        ({"advantage": "opo", "n": 1}, "at least 2"),
        ({"loss": "dapo", "n": 1}, "at least 2"),
        ({"overlong_buffer": 2.5}, "whole number of tokens"),
        ({"correction": "mask"}, "correction='mask': choose one of none, token, sequence, geometric"),
        ({"rejection": "mask"}, "rejection='mask': choose one of none, token, sequence, geometric, max"),
        ({"kl": "k4"}, r"kl='k4': choose one of k1, k2, k3, k3\+"),
        ({"correction_limit": 1.0}, "correction_limit"),
        ({"correction_limit": (0.5, 0.9)}, "correction_limit"),
        ({"rejection_bounds": (1.1, 2.0)}, "rejection_bounds"),
        ({"rejection": "token", "skip_old_log_probs": True}, "skip_old_log_probs"),
        ({"loss": "gspo", "clip": (-0.1, 0.1)}, "negative"),
        ({"kl_coef": 0.1, "kl": "k1"}, "no gradient"),
        ({"overlong_buffer": -1}, "overlong_buffer"),
    ],
)
def test_invalid_combinations_raise_an_error_with_the_reason(wrong, reason):
    with pytest.raises(InvalidConfig, match=reason):
        AlgorithmConfig(**wrong)


SEQUENCES = {"aggregation": "seq-mean-token-mean"}
CONSTANT = {"aggregation": "seq-mean-token-sum-norm"}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {}),
        ({"loss": "gspo"}, SEQUENCES | {"clip": (3e-4, 4e-4)}),
        (
            {"loss": "gspo", "aggregation": "token-mean"},
            {"clip": (3e-4, 4e-4)},
        ),  # the value of the default, given explicitly
        ({"loss": "gspo", "clip": (0.2, 0.2)}, SEQUENCES),
        ({"loss": "dr_grpo"}, CONSTANT | {"advantage": "dr_grpo"}),
        ({"advantage": "dr_grpo"}, CONSTANT | {"advantage": "dr_grpo"}),
        ({"loss": "dr_grpo", "advantage": "rloo"}, CONSTANT | {"advantage": "rloo", "kl_in": "reward", "kl": "k1"}),
        ({"loss": "grpo"}, SEQUENCES | {"kl_coef": 0.04}),
        ({"loss": "grpo", "kl_coef": 0.0}, SEQUENCES),
        ({"advantage": "grpo"}, {}),
        ({"loss": "dapo"}, {"clip": (0.2, 0.28), "dynamic_sampling": 10, "overlong_buffer": 0.2}),
        ({"loss": "dapo", "dynamic_sampling": 0}, {"clip": (0.2, 0.28), "overlong_buffer": 0.2}),
        ({"loss": "cispo"}, {"clip": (1.0, 4.0)}),
        ({"loss": "sapo"}, SEQUENCES),
        ({"advantage": "rloo"}, {"advantage": "rloo", "kl_coef": 0.05, "kl_in": "reward", "kl": "k1"}),
        ({"advantage": "rloo", "kl_in": "loss"}, {"advantage": "rloo", "kl_coef": 0.05}),
        (
            {"advantage": "dr_grpo", "loss": "gspo"},
            SEQUENCES | {"advantage": "dr_grpo", "clip": (3e-4, 4e-4)},
        ),
    ],
)
def test_a_name_sets_what_its_paper_sets_and_an_option_overrides_it(given, expected):
    config = AlgorithmConfig(**given)
    assert {name: getattr(config, name) for name in VERL} == VERL | expected
    assert replace(config) == config


def test_naming_an_algorithm_removes_the_kl_term_of_the_tiny_model():
    assert geo3k_grpo.parse([]).algorithm.kl_coef == 0.1
    assert geo3k_grpo.parse(["--algorithm.kl-coef", "0.2"]).algorithm.kl_coef == 0.2
    named = geo3k_grpo.parse(["--algorithm.loss=gspo"]).algorithm
    assert (named.n, named.aggregation, named.kl_coef) == (16, "seq-mean-token-mean", 0)
    named = geo3k_grpo.parse(["--algorithm.advantage", "dr_grpo", "--algorithm.kl-coef", "0.3"]).algorithm
    assert (named.aggregation, named.kl_coef) == ("seq-mean-token-sum-norm", 0.3)
    named = geo3k_ppo.parse(["--algorithm.loss", "gspo"]).algorithm
    assert (named.advantage, named.aggregation, named.clip) == ("gae", "seq-mean-token-mean", (3e-4, 4e-4))


def test_a_buffer_below_one_is_a_share_of_the_maximum_length():
    assert AlgorithmConfig(loss="dapo").overlong_tokens(20480) == 4096
    assert AlgorithmConfig(overlong_buffer=512).overlong_tokens(2048) == 512
    assert AlgorithmConfig(overlong_buffer=0.01).overlong_tokens(10) == 1
    assert AlgorithmConfig().overlong_tokens(10) == 0


def test_grpo_has_no_critic():
    with pytest.raises(InvalidConfig, match="dataproto ppo"):
        GRPOConfig(advantage="gae")
    with pytest.raises(InvalidConfig, match="critic"):
        advantage_columns(AlgorithmConfig(advantage="gae"), rollouts())


def rollouts():
    rewards = torch.tensor([[0.0, 1.0], [0.25, 0.0], [0.5, 0.5], [0.0, 0.0]])
    data = DataProto.from_dict({"token_level_rewards": rewards, "response_mask": torch.tensor([[1, 1]] * 4)})
    data["uid"] = ["a", "a", "b", "b"]
    data["reward_baselines"] = torch.arange(4) / 4
    return data


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("grpo", lambda rewards, uid, mask: advantages.group_advantage(rewards, uid, mask)),
        ("dr_grpo", lambda rewards, uid, mask: advantages.group_advantage(rewards, uid, mask, normalise_std=False)),
        ("rloo", advantages.leave_one_out_advantage),
        ("reinforce_plus_plus", lambda rewards, uid, mask: advantages.reinforce_plus_plus(rewards, mask, 0.5)),
        ("reinforce_plus_plus_baseline", advantages.reinforce_plus_plus_baseline),
        ("opo", advantages.length_weighted_advantage),
        (
            "remax",
            lambda rewards, uid, mask: advantages.greedy_baseline_advantage(rewards, torch.arange(4) / 4, mask),
        ),
    ],
)
def test_every_name_of_an_advantage_selects_its_function(name, expected):
    data = rollouts()
    config = AlgorithmConfig(advantage=name, gamma=0.5 if name == "reinforce_plus_plus" else 1.0)
    got = advantage_columns(config, data)["advantages"]
    assert torch.equal(got, expected(data["token_level_rewards"], data["uid"], data["response_mask"]))
    assert got.any()


def loss_of(config, log_probs, old, advantage):
    data = DataProto.from_dict(
        {
            "old_log_probs": old,
            "advantages": advantage,
            "response_mask": torch.ones_like(old),
            "ref_log_prob": old - 1,
            "high_covariance": advantage > 0.5,
        }
    )
    return policy_loss(config)(Outputs(log_probs, torch.zeros_like(old)), data)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (AlgorithmConfig(), lambda *a: losses.clipped_policy_loss(*a[:3], (0.2, 0.2), 3.0)),
        (
            AlgorithmConfig(clip=(0.2, 0.28), dual_clip=None),
            lambda *a: losses.clipped_policy_loss(*a[:3], (0.2, 0.28), None),
        ),
        (AlgorithmConfig(loss="gspo"), lambda *a: losses.sequence_policy_loss(*a, (3e-4, 4e-4))),
        (AlgorithmConfig(loss="gspo", clip=(0.1, 0.2)), lambda *a: losses.sequence_policy_loss(*a, (0.1, 0.2))),
        (AlgorithmConfig(loss="cispo"), lambda *a: losses.clipped_weight_loss(*a, (1.0, 4.0))),
        (AlgorithmConfig(loss="cispo", clip=(0.1, 0.2)), lambda *a: losses.clipped_weight_loss(*a, (0.1, 0.2))),
        (AlgorithmConfig(loss="dapo"), lambda *a: losses.clipped_policy_loss(*a[:3], (0.2, 0.28), 3.0)),
        (AlgorithmConfig(loss="dr_grpo"), lambda *a: losses.clipped_policy_loss(*a[:3], (0.2, 0.2), 3.0)),
        (AlgorithmConfig(loss="sapo"), lambda *a: losses.gated_policy_loss(*a[:3])),
        (AlgorithmConfig(loss="clip_cov"), lambda *a: losses.clip_cov_loss(*a[:3], a[2] > 0.5, (1.0, 1.0))),
        (AlgorithmConfig(loss="kl_cov"), lambda *a: losses.kl_cov_loss(*a[:3], a[2] > 0.5)),
    ],
)
def test_every_name_of_a_loss_selects_its_function(config, expected):
    draw = torch.Generator().manual_seed(0)
    log_probs, old, advantage = (torch.randn(3, 4, generator=draw) for _ in range(3))
    got, metrics = loss_of(config, log_probs, old, advantage)
    assert torch.equal(got, expected(log_probs, old, advantage, torch.ones(3, 4))[0])
    assert {"actor/pg_loss", "actor/pg_clipfrac", "actor/ppo_kl", "actor/entropy"} <= metrics.keys()


def test_the_kl_term_is_in_the_loss_or_in_the_reward():
    log_probs, old, advantage = (torch.full((1, 2), value) for value in (-1.0, -1.5, 1.0))
    plain, _ = loss_of(AlgorithmConfig(), log_probs, old, advantage)
    in_loss, metrics = loss_of(AlgorithmConfig(kl_coef=0.1, kl="k2"), log_probs, old, advantage)
    torch.testing.assert_close(in_loss - plain, 0.1 * k2_kl(log_probs, old - 1))
    assert "actor/kl_loss" in metrics
    in_reward = AlgorithmConfig(kl_coef=0.1, kl_in="reward")
    assert torch.equal(loss_of(in_reward, log_probs, old, advantage)[0], plain)
    assert in_reward.kl == "k1"
    assert (AlgorithmConfig(kl_coef=0.1).kl, k1_kl(torch.ones(1), torch.zeros(1)).item()) == ("k3", 1.0)

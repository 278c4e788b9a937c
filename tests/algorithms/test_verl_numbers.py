"""Parity with verl 0.9.1 on a ragged batch with holes. The numbers are from ``scripts/verl_numbers.py``; verl is not needed.

All numbers agree within float32's rounding: 1e-5 of their size, or 1e-6. Where a difference is meant, the test says which.
"""

import json
import math
from pathlib import Path

import pytest
import torch

from helpers.aggregated import aggregate
from recipes.algorithms import advantages, correction, covariances, kl, losses, mismatch, penalties
from workers.training.loss_sums import MODES

NUMBERS = json.loads(Path(__file__).with_name("verl_numbers.json").read_text())
GIVEN = {name: torch.tensor(values) for name, values in NUMBERS["inputs"].items()}
UID, MASK = NUMBERS["uid"], GIVEN["response_mask"]
GAMMA, LAM = NUMBERS["advantages"]["gamma"], NUMBERS["advantages"]["lam"]


def assert_equal(got, expected, mask=None):
    expected = torch.as_tensor(expected, dtype=torch.float32)
    if mask is not None:
        got, expected = got[mask != 0], expected[mask != 0]
    torch.testing.assert_close(got.float(), expected, rtol=1e-5, atol=1e-6)


def test_the_batch_is_ragged_with_holes():
    lengths = MASK.sum(1)
    assert len(set(lengths.tolist())) > 3
    holes = [row for row in MASK.tolist() if "01" in "".join(map(str, row)).lstrip("0")]
    assert len(holes) >= 3
    assert sorted(UID.count(name) for name in set(UID)) == [2, 2, 3]


def whitened_gae(rewards, values, mask):
    return advantages.whiten(advantages.gae(rewards, values, mask, GAMMA, LAM)[0], mask)


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("grpo", lambda score, dense: advantages.group_advantage(score, UID, MASK)),
        ("dr_grpo", lambda score, dense: advantages.group_advantage(score, UID, MASK, normalise_std=False)),
        ("rloo", lambda score, dense: advantages.leave_one_out_advantage(score, UID, MASK)),
        ("opo", lambda score, dense: advantages.length_weighted_advantage(score, UID, MASK)),
        (
            "reinforce_plus_plus_baseline",
            lambda score, dense: advantages.reinforce_plus_plus_baseline(score, UID, MASK),
        ),
        ("reinforce_plus_plus", lambda score, dense: advantages.reinforce_plus_plus(dense, MASK, GAMMA)),
        (
            "remax",
            lambda score, dense: advantages.greedy_baseline_advantage(dense, GIVEN["reward_baselines"], MASK),
        ),
        ("gae", lambda score, dense: whitened_gae(dense, GIVEN["values"], MASK)),
        ("gae_returns", lambda score, dense: advantages.gae(dense, GIVEN["values"], MASK, GAMMA, LAM)[1]),
    ],
)
def test_advantages(name, function):
    got = function(GIVEN["token_level_rewards"], GIVEN["dense_rewards"])
    assert_equal(got, NUMBERS["advantages"][name], MASK)
    assert (got[MASK == 0] == 0).all()


def clip_of(options):
    return options["clip_ratio_low"], options["clip_ratio_high"]


def clip_cov(new, old, advantage, options):
    chosen = covariances.random_high_covariance(
        new, advantage, MASK, options["clip_cov_ratio"], (options["clip_cov_lb"], options["clip_cov_ub"]), seed=0
    )
    return losses.clip_cov_loss(new, old, advantage, chosen, clip_of(options))


def kl_cov(new, old, advantage, options):
    chosen = covariances.highest_covariance(new, advantage, MASK, options["kl_cov_ratio"])
    return losses.kl_cov_loss(new, old, advantage, chosen, options["ppo_kl_coef"])


LOSSES = {
    "vanilla": lambda new, old, advantage, options: losses.clipped_policy_loss(
        new, old, advantage, clip_of(options), options["clip_ratio_c"]
    ),
    "gspo": lambda new, old, advantage, options: losses.sequence_policy_loss(
        new, old, advantage, MASK, clip_of(options)
    ),
    "cispo": lambda new, old, advantage, options: losses.clipped_weight_loss(
        new, old, advantage, MASK, clip_of(options)
    ),
    "sapo": lambda new, old, advantage, options: losses.gated_policy_loss(
        new, old, advantage, (options["tau_pos"], options["tau_neg"])
    ),
    "clip_cov": clip_cov,
    "kl_cov": kl_cov,
}
DIFFERENT = {("kl_cov", "actor/ppo_kl")}  # verl: the mean of its absolute value


@pytest.mark.parametrize("name", LOSSES)
def test_losses_their_gradients_and_metrics(name):
    stored = NUMBERS["losses"][name]
    new = GIVEN[stored["log_probs"]].clone().requires_grad_()
    loss, metrics = LOSSES[name](new, GIVEN["old_log_probs"], GIVEN["advantages"], stored["options"])
    total = aggregate(loss, MASK, stored["mode"])
    total.backward()
    assert_equal(total.detach(), stored["loss"])
    assert_equal(new.grad, stored["gradient"])
    assert (new.grad[MASK == 0] == 0).all()
    for metric, value in stored["metrics"].items():
        if (name, metric) not in DIFFERENT and (metric in metrics or value != 0):  # verl adds zeros
            assert_equal(aggregate(metrics[metric], MASK, "token-mean"), value)
    assert set(LOSSES) == set(NUMBERS["losses"])


@pytest.mark.parametrize(
    ("name", "estimator"), [("k1", kl.k1_kl), ("k2", kl.k2_kl), ("k3", kl.k3_kl), ("k3+", kl.unbiased_k3_kl)]
)
def test_kl_estimators(name, estimator):
    new = GIVEN["log_probs"].clone().requires_grad_()
    value = estimator(new, GIVEN["ref_log_prob"])
    value.sum().backward()
    assert_equal(value.detach(), NUMBERS["kl"][name]["value"])
    assert_equal(new.grad, NUMBERS["kl"][name]["gradient"])


def test_the_kl_penalty():
    estimate = kl.k1_kl(GIVEN["old_log_probs"], GIVEN["ref_log_prob"])
    got, _ = penalties.penalised_rewards(GIVEN["token_level_rewards"], estimate, MASK, 0.1)
    assert_equal(got, NUMBERS["penalised_rewards"], MASK)


def test_aggregation_and_the_value_loss():
    found = {mode: aggregate(GIVEN["loss"], MASK, mode) for mode in MODES}
    found["token-sum"] = found["token-mean"] * MASK.sum()  # as docs/moving.md says of the one that is not here
    assert found.keys() == NUMBERS["aggregation"].keys()
    for mode, expected in NUMBERS["aggregation"].items():
        assert_equal(found[mode], expected)
    stored = NUMBERS["value_loss"]
    loss, metrics = losses.value_loss(GIVEN["new_values"], GIVEN["values"], GIVEN["returns"], stored["clip"])
    assert_equal(aggregate(loss, MASK, "token-mean"), stored["loss"])
    assert_equal(aggregate(metrics["critic/vf_clipfrac"], MASK, "token-mean"), stored["clipfrac"])


def test_differences_that_the_page_names():
    one, theirs = torch.ones(1, 1), NUMBERS["differences"]
    assert theirs["advantage_of_one_row"] == pytest.approx(0.5, abs=1e-5)  # its score
    assert advantages.group_advantage(0.5 * one, ["a"], one).item() == 0
    assert math.log(theirs["gspo_of_log_ratio_15"]) == pytest.approx(10)
    ours = losses.sequence_policy_loss(0 * one, -15 * one, -one, one)[0]
    assert math.log(ours.item()) == pytest.approx(15)


LEVELS = {"token_k1": "token", "seq_sum_k1": "sequence", "seq_mean_k1": "geometric", "seq_max_k2": "max"}


def rejection_of(options):
    """Our level and bounds. verl's bounds of k1 apply to the inverse ratio, and those of k2 to half its squared log."""
    level, threshold = LEVELS[options["rollout_rs"]], options["rollout_rs_threshold"]
    if level == "max":
        high = float(torch.tensor(2.0 * threshold).sqrt().exp())
        return level, (1 / high, high)
    low, high = map(float, threshold.split("_"))
    return level, (1 / high, 1 / low)


def limit_of(threshold):
    return tuple(map(float, threshold.split("_"))) if isinstance(threshold, str) else threshold


@pytest.mark.parametrize(
    "stored", NUMBERS["corrections"], ids=lambda stored: "-".join(map(str, stored["options"].values()))
)
def test_corrections(stored):
    options, old, engine = stored["options"], GIVEN["old_log_probs"], GIVEN["rollout_log_probs"]
    weights = kept = None
    if "rollout_is" in options:
        limit = limit_of(options["rollout_is_threshold"])
        weights = correction.importance_weights(old, engine, MASK, options["rollout_is"], limit)
        assert_equal(weights, stored["weights"], MASK)
        assert len(weights[MASK == 1].unique()) > 2
    if "rollout_rs" in options:
        kept = correction.kept_tokens(old, engine, MASK, *rejection_of(options))
        assert 0 < kept.sum() < MASK.sum()
    assert (MASK if kept is None else kept).tolist() == stored["mask"]
    metrics = mismatch.correction_metrics(old, engine, MASK, weights, kept)
    if options.get("rollout_is") == "sequence":  # verl: largest and smallest before truncation
        metrics = {name: value for name, value in metrics.items() if not name.endswith(("is_max", "is_min"))}
    assert len(metrics) >= 9
    for name, value in metrics.items():
        assert value == pytest.approx(stored["metrics"][name], rel=1e-5, abs=1e-6), name

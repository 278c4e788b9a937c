"""Importance weights and rejection compared with plain loops, and their effect on a loss and its denominators."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dataproto import DataProto
from dataproto.errors import InvalidConfig
from helpers.aggregated import aggregate
from recipes.algorithms.correction import importance_weights, kept_tokens
from recipes.algorithms.mismatch import correction_metrics
from recipes.algorithms.options import AlgorithmConfig
from recipes.grpo import policy_loss
from recipes.run.phases import rows_to_learn
from workers.model.packed_model import Outputs

OLD = torch.tensor([[0.4, 0.9, 0.5], [0.1, 0.6, 0.5]]).log()
ROLLOUT = torch.tensor([[0.1, 0.6, 0.5], [0.4, 0.9, math.nan]]).log()
MASK = torch.tensor([[1, 1, 1], [1, 1, 0]])
LEVELS = ["token", "sequence", "geometric"]


def test_weights_by_hand():
    token = importance_weights(OLD, ROLLOUT, MASK, "token", 2.0)
    torch.testing.assert_close(token, torch.tensor([[2.0, 1.5, 1.0], [0.25, 2 / 3, 1.0]]))
    token = importance_weights(OLD, ROLLOUT, MASK, "token", (0.5, 2.0))
    torch.testing.assert_close(token, torch.tensor([[0.0, 1.5, 1.0], [0.0, 2 / 3, 1.0]]))
    sequence = importance_weights(OLD, ROLLOUT, MASK, "sequence", 5.0)
    torch.testing.assert_close(sequence, torch.tensor([[5.0] * 3, [1 / 6, 1 / 6, 1.0]]))
    geometric = importance_weights(OLD, ROLLOUT, MASK, "geometric", 5.0)
    torch.testing.assert_close(geometric, torch.tensor([[6 ** (1 / 3)] * 3, [6**-0.5, 6**-0.5, 1.0]]))
    assert importance_weights(OLD, ROLLOUT, MASK, "none", 2.0).tolist() == [[1.0] * 3, [1.0] * 3]


@pytest.mark.parametrize(
    ("level", "bounds", "expected"),
    [
        ("none", (0.5, 2.0), [[1, 1, 1], [1, 1, 0]]),
        ("token", (0.5, 2.0), [[0, 1, 1], [0, 1, 0]]),
        ("token", (0.2, 2.0), [[0, 1, 1], [1, 1, 0]]),
        ("sequence", (0.1, 5.0), [[0, 0, 0], [1, 1, 0]]),
        ("sequence", (0.2, 6.1), [[1, 1, 1], [0, 0, 0]]),
        ("geometric", (0.4, 1.7), [[0, 0, 0], [1, 1, 0]]),
        ("geometric", (0.5, 2.0), [[1, 1, 1], [0, 0, 0]]),
        ("max", (0.2, 2.0), [[0, 0, 0], [1, 1, 0]]),
        ("max", (0.0, 5.0), [[1, 1, 1], [1, 1, 0]]),
    ],
)
def test_rejection_by_hand(level, bounds, expected):
    kept = kept_tokens(OLD, ROLLOUT, MASK, level, bounds)
    assert kept.tolist() == expected
    assert kept.dtype == MASK.dtype


batches = st.tuples(st.integers(1, 4), st.integers(1, 5), st.integers(0, 10_000), st.floats(0.1, 2.0))


def make(batch):
    rows, width, seed, spread = batch
    draw = torch.Generator().manual_seed(seed)
    old = -torch.rand(rows, width, generator=draw, dtype=torch.float64) * 3
    engine = old + spread * torch.randn(rows, width, generator=draw, dtype=torch.float64)
    mask = (torch.rand(rows, width, generator=draw) < 0.6).long()  # ragged, with holes and rows without tokens
    return old, torch.where(mask == 1, engine, math.nan), mask


def naive_ratio(old, engine, mask, row, column, level):
    tokens = [float(old[row, t] - engine[row, t]) for t in range(mask.shape[1]) if mask[row, t]]
    if level == "token":
        return math.exp(old[row, column] - engine[row, column])
    return math.exp(sum(tokens) / (len(tokens) if level == "geometric" else 1))


@given(batches, st.sampled_from(LEVELS), st.floats(1.01, 5.0), st.floats(0.05, 0.99), st.booleans())
def test_weights_equal_a_plain_loop(batch, level, high, low, two):
    old, engine, mask = make(batch)
    got = importance_weights(old, engine, mask, level, (low, high) if two else high)
    for row, column in mask.nonzero().tolist():
        ratio = naive_ratio(old, engine, mask, row, column, level)
        inside = low <= ratio <= high
        expected = (ratio if inside else 0.0) if two else min(ratio, high)
        assert got[row, column].item() == pytest.approx(expected, rel=1e-9)
    assert (got[mask == 0] == 1).all()


@given(batches, st.sampled_from([*LEVELS, "max"]), st.floats(1.01, 5.0), st.floats(0.05, 0.99))
def test_rejection_equals_a_plain_loop(batch, level, high, low):
    old, engine, mask = make(batch)
    expected = torch.zeros_like(mask)
    for row, column in mask.nonzero().tolist():
        if level == "max":
            cells = [t for t in range(mask.shape[1]) if mask[row, t]]
            ratios = [naive_ratio(old, engine, mask, row, t, "token") for t in cells]
        else:
            ratios = [naive_ratio(old, engine, mask, row, column, level)]
        expected[row, column] = all(low <= ratio <= high for ratio in ratios)
    assert torch.equal(kept_tokens(old, engine, mask, level, (low, high)), expected)


@given(st.sampled_from(LEVELS), st.floats(1.01, 10), st.integers(0, 1000))
def test_equal_policies_are_not_corrected_and_no_weight_exceeds_the_limit(kind, limit, seed):
    old, rollout = -torch.rand(2, 3, 5, generator=torch.Generator().manual_seed(seed)) * 9
    mask = torch.ones(3, 5)
    assert torch.equal(importance_weights(old, old, mask, kind, limit), mask)
    assert torch.equal(kept_tokens(old, old, mask, kind, (0.9, 1.1)), mask)
    weights = importance_weights(old, rollout, mask, kind, limit)
    assert ((weights >= 0) & (weights <= limit)).all()


def test_weights_make_the_sampling_of_another_policy_unbiased():
    """The weighted mean over samples of the engine is the mean under the actor, if no weight is truncated."""
    actor, engine = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.5, 0.2, 0.3])
    values = torch.tensor([1.0, 5.0, -2.0])
    log_probs = actor.log()[:, None], engine.log()[:, None]
    weights = importance_weights(*log_probs, torch.ones(3, 1), "sequence", limit=10.0).squeeze(1)
    torch.testing.assert_close((engine * weights * values).sum(), (actor * values).sum())


def test_a_nan_ratio_is_rejected_but_stays_nan_as_a_weight():
    old = torch.tensor([[-1.0, math.nan]])
    assert kept_tokens(old, torch.full((1, 2), -1.0), torch.ones(1, 2), "token", (0.5, 2.0)).tolist() == [[1, 0]]
    assert importance_weights(old, torch.full((1, 2), -1.0), torch.ones(1, 2), "token", 2.0)[0, 1].isnan()


@pytest.mark.parametrize("limit", [1.0, 0.5, (0.5, 0.9), (1.1, 2.0), (-0.1, 2.0)])
def test_invalid_limits_raise_an_error(limit):
    with pytest.raises(InvalidConfig, match="correction_limit"):
        importance_weights(OLD, ROLLOUT, MASK, "token", limit)
    if isinstance(limit, tuple):
        with pytest.raises(InvalidConfig, match="rejection_bounds"):
            kept_tokens(OLD, ROLLOUT, MASK, "token", limit)


def test_metrics_by_hand():
    mask = torch.tensor([[1, 1, 1], [1, 1, 0], [0, 0, 0]])
    old, rollout = (torch.cat([each, torch.full((1, 3), math.nan)]) for each in (OLD, ROLLOUT))
    weights = importance_weights(old, rollout, mask, "token", 2.0)
    kept = kept_tokens(old, rollout, mask, "token", (0.5, 2.0))
    got = correction_metrics(old, rollout, mask, weights, kept)
    w = [2.0, 1.5, 1.0, 0.25, 2 / 3]
    mean = sum(w) / 5
    d = [math.log(4), math.log(1.5), 0.0, -math.log(4), -math.log(1.5)]
    expected = {
        "rollout_is_mean": mean,
        "rollout_is_max": 2.0,
        "rollout_is_min": 0.25,
        "rollout_is_std": math.sqrt(sum(x * x for x in w) / 5 - mean**2),
        "rollout_is_eff_sample_size": mean**2 / (sum(x * x for x in w) / 5),
        "rollout_rs_masked_fraction": 2 / 5,
        "rollout_rs_seq_masked_fraction": 1.0,
        "kl": -sum(d) / 5,
        "k3_kl": sum(math.exp(x) - 1 - x for x in d) / 5,
        "chi2_token": sum(math.exp(2 * x) for x in d) / 5 - 1,
        "chi2_seq": (36 + 1 / 36) / 2 - 1,
        "log_ppl_diff": (-math.log(6) / 3 + math.log(6) / 2) / 2,
        "log_ppl_abs_diff": (math.log(6) / 3 + math.log(6) / 2) / 2,
        "ppl_ratio": (6 ** (-1 / 3) + 6**0.5) / 2,
    }
    for name, value in expected.items():
        assert got[f"rollout_corr/{name}"] == pytest.approx(value, rel=1e-5, abs=1e-7), name
    assert correction_metrics(OLD, ROLLOUT, 0 * MASK) == {}


def batch():
    data = {"advantages": torch.ones(2, 3), "response_mask": MASK, "rollout_log_probs": ROLLOUT, "old_log_probs": OLD}
    return DataProto.from_dict(data, non_tensors={"uid": ["a", "b"]})


def loss_of(config, data):
    log_probs = OLD.clone().requires_grad_()
    loss, metrics = policy_loss(config)(Outputs(log_probs, torch.zeros(2, 3)), data)
    return torch.where(MASK.bool(), loss, 0.0), metrics


def test_the_loss_is_weighted():
    plain, _ = loss_of(AlgorithmConfig(n=2), batch())
    config = AlgorithmConfig(n=2, correction="token", correction_limit=3.0)
    learned, metrics = rows_to_learn(batch(), config, (0, 0))
    corrected, _ = loss_of(config, learned)
    weights = importance_weights(OLD, ROLLOUT, MASK, "token", 3.0)
    torch.testing.assert_close(corrected, plain * weights)
    assert metrics["rollout_corr/rollout_is_mean"] == pytest.approx(weights[MASK == 1].mean().item())


def test_masked_importance_sampling_keeps_the_ratio_inside_and_the_scale_of_the_loss():
    """Rejected tokens do not count in the denominators, so the mean of equal losses does not change."""
    data = batch()
    config = AlgorithmConfig(n=2, correction="token", rejection="token", rejection_bounds=(0.5, 2.0))
    learned, metrics = rows_to_learn(data, config, (0, 0))
    loss, _ = loss_of(config, learned)
    assert learned["response_mask"].tolist() == [[0, 1, 1], [0, 1, 0]]
    ratios = [1.5, 1.0, 2 / 3]
    for mode, expected in (("token-mean", -sum(ratios) / 3), ("seq-mean-token-mean", -((1.5 + 1) / 2 + 2 / 3) / 2)):
        assert aggregate(loss, learned["response_mask"], mode).item() == pytest.approx(expected)
    rejected_only = AlgorithmConfig(n=2, rejection="token")
    learned, _ = rows_to_learn(data, rejected_only, (0, 0))
    assert aggregate(loss_of(rejected_only, learned)[0], learned["response_mask"], "token-mean").item() == -1.0
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(2 / 5)
    assert torch.equal(data["response_mask"], MASK)  # the reported batch does not change
    assert "rollout_is_weights" not in data


def test_minibatches_without_remaining_tokens_are_removed():
    data = batch()
    config = AlgorithmConfig(n=2, rejection="sequence", rejection_bounds=(0.1, 5.0))
    assert rows_to_learn(data, config, (0, 0))[0]["response_mask"].tolist() == [[0, 0, 0], [1, 1, 0]]
    config = AlgorithmConfig(n=2, rejection="sequence", rejection_bounds=(0.1, 5.0), minibatch=1)
    assert rows_to_learn(data, config, (0, 0))[0]["uid"].tolist() == ["b"]
    learned, metrics = rows_to_learn(data, AlgorithmConfig(n=2, rejection="max", rejection_bounds=(0.9, 1.1)), (0, 0))
    assert len(learned) == 0
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == 1.0


def test_skipping_old_log_probs_uses_those_of_the_engine():
    learned, metrics = rows_to_learn(batch(), AlgorithmConfig(n=2, skip_old_log_probs=True), (0, 0))
    assert "rollout_is_weights" not in learned
    assert metrics == {}
    for options in ({"correction": "token"}, {"rejection": "max"}):
        with pytest.raises(InvalidConfig, match="skip_old_log_probs"):
            AlgorithmConfig(n=2, skip_old_log_probs=True, **options)

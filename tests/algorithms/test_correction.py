import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dataproto import DataProto
from dataproto.errors import InvalidConfig
from recipes.algorithms.correction import importance_weights
from recipes.algorithms.options import AlgorithmConfig, policy_loss
from workers.packed import Outputs

OLD = torch.tensor([[0.4, 0.9, 0.5], [0.1, 0.6, 0.5]]).log()
ROLLOUT = torch.tensor([[0.1, 0.6, 0.5], [0.4, 0.9, math.nan]]).log()
MASK = torch.tensor([[1, 1, 1], [1, 1, 0]])


def test_weights_by_hand():
    token = importance_weights(OLD, ROLLOUT, MASK, "token", 2.0)
    torch.testing.assert_close(token, torch.tensor([[2.0, 1.5, 1.0], [0.25, 2 / 3, 1.0]]))
    sequence = importance_weights(OLD, ROLLOUT, MASK, "sequence", 5.0)
    torch.testing.assert_close(sequence, torch.tensor([[5.0] * 3, [1 / 6] * 3]))
    assert importance_weights(OLD, ROLLOUT, MASK, "mask", 5.0).tolist() == [[0.0] * 3, [0.0] * 3]
    assert importance_weights(OLD, ROLLOUT, MASK, "mask", 6.1).tolist() == [[1.0] * 3, [1.0] * 3]
    assert importance_weights(OLD, ROLLOUT, MASK, "none", 2.0).tolist() == [[1.0] * 3, [1.0] * 3]
    with pytest.raises(InvalidConfig, match="correction_limit"):
        importance_weights(OLD, ROLLOUT, MASK, "token", 1.0)


@given(st.sampled_from(["token", "sequence", "mask"]), st.floats(1.01, 10), st.integers(0, 1000))
def test_equal_policies_are_not_corrected_and_no_weight_exceeds_the_limit(kind, limit, seed):
    old, rollout = -torch.rand(2, 3, 5, generator=torch.Generator().manual_seed(seed)) * 9
    mask = torch.ones(3, 5)
    assert torch.equal(importance_weights(old, old, mask, kind, limit), mask)
    weights = importance_weights(old, rollout, mask, kind, limit)
    assert ((weights >= 0) & (weights <= limit)).all()


def test_truncated_weights_make_the_sampling_of_another_policy_unbiased():
    """The mean over samples of the engine, weighted, is the actor's, where no weight is cut."""
    actor, engine = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.5, 0.2, 0.3])
    values = torch.tensor([1.0, 5.0, -2.0])
    log_probs = actor.log()[:, None], engine.log()[:, None]
    weights = importance_weights(*log_probs, torch.ones(3, 1), "sequence", limit=10.0).squeeze(1)
    torch.testing.assert_close((engine * weights * values).sum(), (actor * values).sum())


def loss_of(config, with_old=True):
    data = {"advantages": torch.ones(2, 3), "response_mask": MASK, "rollout_log_probs": ROLLOUT}
    batch = DataProto.from_dict(data | ({"old_log_probs": OLD} if with_old else {}))
    log_probs = OLD.clone().requires_grad_()
    loss, metrics = policy_loss(config, 0.0)(Outputs(log_probs, torch.zeros(2, 3)), batch)
    return torch.where(MASK.bool(), loss, 0.0), metrics


def test_the_loss_is_weighted_with_and_without_a_column_of_old_log_probs():
    plain, _ = loss_of(AlgorithmConfig(n=2))
    for with_old in (True, False):
        corrected, metrics = loss_of(AlgorithmConfig(n=2, correction="token", correction_limit=3.0), with_old)
        weights = importance_weights(OLD, ROLLOUT, MASK, "token", 3.0)
        torch.testing.assert_close(corrected, plain * weights)
        torch.testing.assert_close(metrics["rollout_corr/rollout_is_mean"], weights)


def test_trusting_the_engine_corrects_nothing():
    _, metrics = loss_of(AlgorithmConfig(n=2, skip_old_log_probs=True))
    assert not any("rollout" in name for name in metrics)
    with pytest.raises(InvalidConfig, match="skip_old_log_probs"):
        AlgorithmConfig(n=2, skip_old_log_probs=True, correction="token")

"""One GRPO step on real roles, and its loss by hand."""

import pytest
import torch

from dataproto import DataProto
from dataproto.errors import InvalidConfig
from recipes.grpo import GRPOConfig, parse, policy_loss
from workers.model.packed_model import Outputs


def batch(**columns):
    return DataProto.from_dict({name: torch.tensor(values) for name, values in columns.items()})


def test_the_loss_by_hand():
    outputs = Outputs(torch.tensor([[0.5, 2.0]]).log(), entropy_or_none=torch.tensor([[1.0, 3.0]]))
    data = batch(old_log_probs=[[0.0, 0.0]], advantages=[[1.0, 1.0]], ref_log_prob=[[0.0, 0.0]])
    loss, metrics = policy_loss(GRPOConfig(kl_coef=0.1, kl="k2", entropy_coef=0.01))(outputs, data)
    # policy term: -0.5 and -1.2 (clipped); KL: 0.1 * log ratio ** 2 / 2; entropy: -0.01 * entropy
    log_ratio = torch.tensor([[0.5, 2.0]]).log()
    expected = torch.tensor([[-0.5, -1.2]]) + 0.1 * log_ratio**2 / 2 - torch.tensor([[0.01, 0.03]])
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(metrics["actor/pg_loss"], torch.tensor([[-0.5, -1.2]]))
    assert metrics["actor/pg_clipfrac"].tolist() == [[0.0, 1.0]]


def test_without_old_log_probs_the_ratio_is_one_and_the_gradient_is_that_of_reinforce():
    log_probs = torch.tensor([[-0.7, -0.1]], requires_grad=True)
    data = batch(advantages=[[2.0, -1.0]])
    loss, metrics = policy_loss(GRPOConfig())(Outputs(log_probs, torch.zeros(1, 2)), data)
    loss.sum().backward()
    assert log_probs.grad.tolist() == [[-2.0, 1.0]]
    assert metrics["actor/ppo_kl"].tolist() == [[0.0, 0.0]]


def test_the_number_of_updates():
    assert GRPOConfig().updates(16) == 1
    assert GRPOConfig(minibatch=4).updates(16) == 4
    assert GRPOConfig(minibatch=5, epochs=2).updates(16) == 8


def test_the_default_run_makes_several_updates_with_a_batch():
    """So that its log-probs leave those of the rollout, and clipping has work."""
    config = parse([])
    assert config.algorithm.updates(config.data.batch_size) > 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"n": 1},
        {"temperature": 0.0},
        {"kl_coef": -1.0},
        {"entropy_coef": -0.1},
        {"top_p": 2.0},
        {"clip": (-1.0, 0.2)},
        {"dual_clip": 0.5},
        {"minibatch": 0},
        {"epochs": 0},
    ],
)
def test_impossible_settings_are_refused(wrong):
    with pytest.raises(InvalidConfig):
        GRPOConfig(**wrong)

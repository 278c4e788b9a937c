"""The old log-probs of the first mini-batch are the update's own: fewer rows to score, and the same step."""

from unittest.mock import patch

import pytest
import torch

from dataproto import DataProto
from recipes.algorithms.options import AlgorithmConfig, NamedLoss
from recipes.data.drawn_rows import ProblemRows
from recipes.grpo import GRPOConfig, grpo_step
from recipes.ppo import PPOConfig, ppo_step
from recipes.tiny import make_tiny_model
from rollout.prompts import PromptBuilder
from workers import ActorConfig, OptimizerConfig, launch
from workers.model.packed_model import Outputs
from workers.roles.critic import CriticConfig


def reward(rows):
    return [{"score": 1.0 / (1 + len(row.solution_str))} for row in rows]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return str(make_tiny_model(tmp_path_factory.mktemp("tiny")))


def one_step(checkpoint, config, make=grpo_step, every_row=False):
    """Rollouts, metrics, weights and the numbers of rows that the actor scored; with ``every_row`` all before the update."""
    builder = PromptBuilder.from_pretrained(checkpoint, max_prompt_length=256)
    problems = ProblemRows(level=1, seed=0, split="train", instruction="")
    prompts = builder([problems[row] | {"uid": f"{row}"} for row in range(3)])
    actor = ActorConfig(checkpoint, optimizer=OptimizerConfig(lr=1e-3))
    scored = []
    with launch(actor, None, reward, critic=CriticConfig(checkpoint) if make is ppo_step else None) as roles:
        model, score = roles.actor.worker.model, roles.actor.worker.model.score

        def counted(data, *arguments):
            scored.append(len(data))
            return score(data, *arguments)

        whole = (
            patch.object(AlgorithmConfig, "needs_old_log_probs", True)
            if every_row
            else patch.object(model, "role", "actor")
        )
        with whole, patch.object(model, "score", counted), patch("workers.training.optimizer.EPS", 1e-3):
            data, metrics = make(roles, prompts, config, config.sampling(max_tokens=6, seed=3))
        weights = {name: weight.clone() for name, weight in roles.actor.worker.named_weights()}
    return data, metrics, weights, scored


@pytest.mark.parametrize("make", [grpo_step, ppo_step])
def test_only_later_minibatches_are_scored_before_the_update(checkpoint, make):
    config = (GRPOConfig if make is grpo_step else PPOConfig)(n=4, minibatch=1)
    data, metrics, weights, scored = one_step(checkpoint, config, make)
    whole, expected, theirs, every = one_step(checkpoint, config, make, every_row=True)
    assert (scored, every) == ([8], [12])
    assert "timing_s/old_log_prob" in metrics
    torch.testing.assert_close(data["old_log_probs"], whole["old_log_probs"], atol=1e-5, rtol=0)
    assert torch.equal(data["old_log_probs"][4:], whole["old_log_probs"][4:])
    torch.testing.assert_close(data["actor_log_probs"], whole["actor_log_probs"], atol=1e-5, rtol=0)
    for name, weight in theirs.items():
        torch.testing.assert_close(weights[name], weight, atol=1e-5, rtol=0, msg=name)
    for name in ("actor/pg_loss", "actor/ppo_kl", "actor/grad_norm"):
        assert metrics[name] == pytest.approx(expected[name], rel=1e-3, abs=1e-5), name


@pytest.mark.parametrize(
    ("options", "rows"),
    [
        ({}, []),
        ({"minibatch": 3}, []),  # one update, all prompts
        ({"minibatch": 2}, [4]),
        ({"minibatch": 1, "epochs": 2}, [12]),  # the second epoch meets the first mini-batch with another policy
        ({"correction": "token"}, [12]),
        ({"minibatch": 1, "skip_old_log_probs": True}, []),
    ],
)
def test_which_rows_are_scored(checkpoint, options, rows):
    assert one_step(checkpoint, GRPOConfig(n=4, **options))[3] == rows


def test_the_share_of_rows():
    assert [GRPOConfig(minibatch=minibatch).old_log_prob_share(512) for minibatch in (None, 512, 256, 128)] == [
        *(0.0, 0.0, 0.5, 0.75)
    ]
    assert GRPOConfig(kl_coef=0.1, kl_in="reward").old_log_prob_share(512) == 1.0


def test_a_loss_takes_its_own_log_probs_in_rows_without_old_ones():
    """NaN in a whole row means that there are none; a single NaN stays one, and is reported as a loss that is not finite."""
    nan = float("nan")
    outputs = Outputs(torch.tensor([[-1.0, -2.0], [-3.0, -4.0], [-5.0, -6.0]], requires_grad=True), torch.zeros(3, 2))
    data = DataProto.from_dict(
        {"old_log_probs": torch.tensor([[nan, nan], [-7.0, nan], [-8.0, -9.0]]), "advantages": torch.ones(3, 2)}
    )
    old = NamedLoss.find(GRPOConfig()).arguments(outputs, data)["old_log_probs"]
    assert torch.equal(old.nan_to_num(99.0), torch.tensor([[-1.0, -2.0], [-7.0, 99.0], [-8.0, -9.0]]))
    assert not old.requires_grad

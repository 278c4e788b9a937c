"""The old log-probs of the first optimizer step are its own: its rows need no scoring, and the step is the same."""

import math
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch

from dataproto import DataProto
from recipes.algorithms.options import AlgorithmConfig, NamedLoss
from recipes.demo.rows import ProblemRows
from recipes.demo.tiny_model import make_tiny_model
from recipes.grpo import GRPOConfig, grpo_step
from recipes.ppo import PPOConfig, ppo_step
from rollout.prompts import PromptBuilder
from workers import ActorConfig, OptimizerConfig, launch
from workers.model.packed_model import Outputs
from workers.roles.critic import CriticConfig


def reward(rows):
    return [{"score": 1.0 / (1 + len(row.solution_str))} for row in rows]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return str(make_tiny_model(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def prompts(checkpoint):
    builder = PromptBuilder.from_pretrained(checkpoint, max_prompt_length=256)
    problems = ProblemRows(level=1, seed=0, split="train", instruction="")
    return builder([problems[row] | {"uid": f"{row}"} for row in range(3)])


@pytest.fixture(scope="module")
def roles(checkpoint):
    with launch(ActorConfig(checkpoint), None, reward) as roles:
        yield roles


@contextmanager
def counted(roles):
    """The numbers of rows that the actor scores in calls of their own."""
    scored, model = [], roles.actor.worker.model
    score = model.score

    def counting(data, *arguments, **options):
        scored.append(len(data))
        return score(data, *arguments, **options)

    with patch.object(model, "score", counting):
        yield scored


def step(roles, prompts, config, make=grpo_step):
    return make(roles, prompts[:], config, config.sampling(max_tokens=6, seed=3))


@pytest.mark.parametrize(("minibatch", "rows"), [(None, []), (1, [8])])
def test_the_first_optimizer_step_needs_no_old_log_probs(checkpoint, prompts, minibatch, rows):
    """The step is that of a run which scores every row before it: the same weights within 1e-5."""
    config = GRPOConfig(n=4, kl_coef=0.0, minibatch=minibatch)
    actor, found = ActorConfig(checkpoint, optimizer=OptimizerConfig(lr=1e-3)), []
    for every_row in (False, True):
        with (
            launch(actor, None, reward) as roles,
            patch("workers.training.optimizer.EPS", 1e-3),  # else a gradient of zero moves a weight
            patch.object(AlgorithmConfig, "scores_first_update", not every_row),
            counted(roles) as scored,
        ):
            data, metrics = step(roles, prompts, config)
            weights = {name: weight.clone() for name, weight in roles.actor.worker.named_weights()}
        assert scored == ([12] if every_row else rows)
        assert ("timing_s/old_log_prob" in metrics) == bool(scored)
        found.append((data, metrics, weights))
    (data, metrics, weights), (whole, expected, theirs) = found
    torch.testing.assert_close(data["actor_log_probs"], whole["old_log_probs"], atol=1e-5, rtol=0)
    for name, weight in theirs.items():
        torch.testing.assert_close(weights[name], weight, atol=1e-5, rtol=0, msg=name)
    for name in ("actor/pg_loss", "actor/ppo_kl", "actor/grad_norm"):
        assert metrics[name] == pytest.approx(expected[name], rel=1e-3, abs=1e-5), name


@pytest.mark.parametrize(
    ("options", "rows"),
    [
        ({}, []),
        ({"minibatch": 3}, []),  # one update, all prompts
        ({"minibatch": 2}, [4]),  # the third prompt is another mini-batch
        ({"minibatch": 1, "loss": "clip_cov"}, [12]),
        ({"epochs": 2}, [12]),  # the second epoch meets another policy
        ({"correction": "token"}, [12]),
        ({"minibatch": 1, "skip_old_log_probs": True}, []),
    ],
)
def test_which_rows_are_scored(roles, prompts, options, rows):
    with counted(roles) as scored:
        data, _ = step(roles, prompts, GRPOConfig(n=4, **options))
    assert scored == rows
    assert "old_log_probs" not in data or data["old_log_probs"].isfinite().all()


def test_rows_are_scored_before_their_rewards_come(roles, prompts):
    config = GRPOConfig(n=4, minibatch=1)
    with counted(roles) as scored:

        class Rewards(Future):
            def done(self):
                return scored == [8]

            def result(self):
                assert self.done()
                return super().result()

        def submit(method, data):
            coming = Rewards()
            coming.set_result(roles.reward.score(data))
            return coming

        slow = replace(roles, optional={**roles.optional, "reward": SimpleNamespace(submit=submit)}, scores_apart=True)
        data, _ = step(slow, prompts, config)
    assert data["old_log_probs"].isfinite().all()


@pytest.mark.parametrize(("warmup", "rows"), [(0, [8]), (1, [])])
def test_nothing_is_scored_for_an_update_that_does_not_come(checkpoint, prompts, warmup, rows):
    config = PPOConfig(n=4, minibatch=1, critic_warmup=warmup)
    with (
        launch(ActorConfig(checkpoint), None, reward, critic=CriticConfig(checkpoint)) as roles,
        counted(roles) as scored,
    ):
        data, _ = step(roles, prompts, config, ppo_step)
    assert scored == rows
    assert ("old_log_probs" in data) == bool(rows)


def test_actor_and_reference_score_the_rows_of_several_steps(checkpoint, prompts):
    actor = ActorConfig(checkpoint)
    with launch(actor, actor.frozen(), reward) as roles:
        data, metrics = step(roles, prompts, GRPOConfig(n=4, minibatch=1, kl_coef=0.1))
    assert metrics["timing_s/old_log_prob"] > 0
    assert metrics["timing_s/ref"] > 0
    with launch(actor, actor.frozen(), None) as fresh:
        for group, name in ((fresh.actor, "old_log_probs"), (fresh.reference, "ref_log_prob")):
            assert torch.equal(group.log_probs(data)[name], data[name])


def test_a_reference_scores_alone_where_the_update_is_one_step(checkpoint, prompts):
    config = GRPOConfig(n=4, minibatch=3, kl_coef=0.1)
    actor = ActorConfig(checkpoint)
    with launch(actor, actor.frozen(), reward) as roles, counted(roles) as scored:
        data, metrics = step(roles, prompts, config)
        assert scored == []
        assert metrics["timing_s/ref"] > 0
        expected = roles.reference.log_probs(data)["ref_log_prob"]
    assert torch.equal(data["ref_log_prob"], expected)


def test_a_loss_takes_its_own_log_probs_where_there_are_no_old_ones():
    outputs = Outputs(torch.tensor([[-1.0, -2.0]], requires_grad=True), torch.zeros(1, 2))
    data = DataProto.from_dict({"advantages": torch.ones(1, 2)})
    own = NamedLoss.find(GRPOConfig()).arguments(outputs, data)["old_log_probs"]
    assert torch.equal(own, outputs.log_probs)
    assert not own.requires_grad
    data["old_log_probs"] = torch.full((1, 2), math.nan)
    assert torch.equal(NamedLoss.find(GRPOConfig()).arguments(outputs, data)["old_log_probs"], outputs.log_probs)
    data["old_log_probs"] = torch.tensor([[-7.0, math.nan]])  # reported as a loss that is not finite
    found = NamedLoss.find(GRPOConfig()).arguments(outputs, data)["old_log_probs"]
    torch.testing.assert_close(found, data["old_log_probs"], rtol=0, atol=0, equal_nan=True)

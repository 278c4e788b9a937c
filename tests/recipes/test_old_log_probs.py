"""The old log-probs of the first mini-batch are the update's own: fewer rows to score, and the same step."""

from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
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


@pytest.mark.parametrize(
    ("make", "kl_coef"), [(grpo_step, 0.0), (grpo_step, 0.1), pytest.param(ppo_step, 0.1, marks=pytest.mark.long)]
)
def test_only_later_minibatches_are_scored_before_the_update(checkpoint, prompts, make, kl_coef):
    """The step is that of a run which scores every row before it: the same weights within 1e-5.

    With a KL term the reference scores all rows, in one call with the actor.
    """
    config = (GRPOConfig if make is grpo_step else PPOConfig)(n=4, minibatch=1, kl_coef=kl_coef, kl_in="loss")
    actor = ActorConfig(checkpoint, optimizer=OptimizerConfig(lr=1e-3))
    critic = CriticConfig(checkpoint) if make is ppo_step else None
    found = []
    for every_row in (False, True):
        with ExitStack() as stack:
            roles = stack.enter_context(launch(actor, actor.frozen() if kl_coef else None, reward, critic=critic))
            if every_row:
                stack.enter_context(patch.object(AlgorithmConfig, "needs_old_log_probs", True))
            stack.enter_context(patch("workers.training.optimizer.EPS", 1e-3))  # else a gradient of zero moves a weight
            scored = stack.enter_context(counted(roles))
            data, metrics = step(roles, prompts, config, make)
            weights = {name: weight.clone() for name, weight in roles.actor.worker.named_weights()}
        assert scored == [12 if every_row else 8]
        assert "timing_s/old_log_prob" in metrics
        assert ("timing_s/ref" in metrics) == bool(kl_coef)
        found.append((data, metrics, weights))
    (data, metrics, weights), (whole, expected, theirs) = found
    if not kl_coef:
        assert torch.equal(data["old_log_probs"][4:], whole["old_log_probs"][4:])
    for name in ("old_log_probs", "actor_log_probs", *(["ref_log_prob"] if kl_coef else [])):
        torch.testing.assert_close(data[name], whole[name], atol=1e-5, rtol=0)
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


@pytest.mark.slow
@pytest.mark.parametrize("epochs", [1, 2])
def test_rows_of_actor_and_reference_go_out_together(checkpoint, prompts, epochs):
    """One call, whose time is shared out, and the columns of two; with two epochs the actor scores the first mini-batch too."""
    config = GRPOConfig(n=4, minibatch=1, epochs=epochs, kl_coef=0.1)
    actor = ActorConfig(checkpoint)
    with launch(actor, actor.frozen(), reward) as roles:
        alone = [patch.object(worker, "log_probs", None) for worker in (roles.actor.worker, roles.reference.worker)]
        with alone[0], alone[1]:
            data, metrics = step(roles, prompts, config)
    assert metrics["timing_s/old_log_prob"] > 0
    assert metrics["timing_s/ref"] > 0
    with launch(actor, actor.frozen(), None) as fresh:
        for group, name in ((fresh.actor, "old_log_probs"), (fresh.reference, "ref_log_prob")):
            torch.testing.assert_close(group.log_probs(data)[name], data[name], atol=1e-5 if epochs == 1 else 0, rtol=0)


def test_a_reference_that_only_the_loss_reads_waits_for_the_rows_of_the_update():
    assert GRPOConfig(kl_coef=0.1, minibatch=2).reference_in_update_only
    for options in (
        {"kl_coef": 0.0, "minibatch": 2},
        {"kl_coef": 0.1},
        {"kl_coef": 0.1, "minibatch": 2, "kl_in": "reward"},
        {"kl_coef": 0.1, "minibatch": 2, "epochs": 2},
        {"kl_coef": 0.1, "minibatch": 2, "correction": "token"},
    ):
        assert not GRPOConfig(**options).reference_in_update_only, options


def test_a_reference_scores_alone_where_the_update_is_one_step(checkpoint, prompts):
    config = GRPOConfig(n=4, minibatch=3, kl_coef=0.1)
    actor = ActorConfig(checkpoint)
    with launch(actor, actor.frozen(), reward) as roles, counted(roles) as scored:
        data, metrics = step(roles, prompts, config)
        assert scored == []
        assert metrics["timing_s/ref"] > 0
        expected = roles.reference.log_probs(data)["ref_log_prob"]
    assert torch.equal(data["ref_log_prob"], expected)


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

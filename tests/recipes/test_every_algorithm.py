"""A step of every algorithm by its name, on real roles and a tiny model."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from PIL import Image

from recipes.algorithms.covariances import random_high_covariance
from recipes.algorithms.losses import clip_cov_loss
from recipes.algorithms.registry import ADVANTAGES, LOSSES
from recipes.configs.ppo_config import ActorCriticConfig
from recipes.demo.rows import ProblemRows
from recipes.demo.tiny_model import make_tiny_model
from recipes.grpo import GRPOConfig, grpo_step
from recipes.ppo import PPOConfig, ppo_step
from recipes.run.episode_roles import Played, with_episodes
from recipes.run.phases import StepState
from rollout.environments import EpisodeLimits, EpisodePlan, Observation
from rollout.prompts import PromptBuilder
from workers import ActorConfig, OptimizerConfig, launch
from workers.roles.critic import CriticConfig

MINE = '''
def loss(log_probs, advantages, response_mask):
    """REINFORCE of whole responses."""
    return -advantages * log_probs * response_mask, {"actor/mine": log_probs.detach() * 0 + 1}

def advantage(token_level_rewards, response_mask):
    scores = token_level_rewards.sum(1, keepdim=True)
    return (scores - scores.mean()) * response_mask
'''


def reward(rows):
    """Rewards short answers, so that even a random model has something to learn from."""
    return [{"score": 1.0 / (1 + len(row.solution_str)), "acc": float(len(row.solution_str) < 9)} for row in rows]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return str(make_tiny_model(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def roles(checkpoint):
    actor = ActorConfig(checkpoint, optimizer=OptimizerConfig(lr=1e-4))
    with launch(actor, actor.frozen(), reward, critic=CriticConfig(checkpoint)) as roles:
        yield roles


@pytest.fixture(scope="module")
def prompts(checkpoint):
    builder = PromptBuilder.from_pretrained(checkpoint, max_prompt_length=256)
    problems = ProblemRows(level=1, seed=0, split="train", instruction="")
    return [builder([problems[row] | {"uid": f"{row}"} for row in range(first, first + 3)]) for first in (0, 3, 6)]


def step(roles, prompts, config, make=grpo_step):
    left = iter(prompts[1:])
    state = StepState(more=lambda: next(left))
    return make(roles, prompts[0], config, config.sampling(max_tokens=6, seed=3), state)


def assert_learned(metrics):
    assert metrics["actor/grad_norm"] > 0
    assert all(math.isfinite(value) for name, value in metrics.items() if name.startswith(("actor/", "rollout_corr/")))


OVER_TURNS = ("gigpo", "turn_returns")
WITH_CRITIC = tuple(name for name in ADVANTAGES.names if ADVANTAGES.find(name).critic)


@pytest.mark.parametrize(
    "name", [name for name in ADVANTAGES.names if name not in (*OVER_TURNS, *WITH_CRITIC, "reverse_kl")]
)
def test_every_advantage(name, roles, prompts):
    config = GRPOConfig(n=3, advantage=name, minibatch=2)
    data, metrics = step(roles, prompts, config)
    assert_learned(metrics)
    assert data["advantages"].any()
    assert ("actor/reward_kl_penalty" in metrics) == config.kl_in_reward
    assert ("actor/kl_loss" in metrics) == config.kl_in_loss
    if name == "remax":
        each = data["reward_baselines"].view(3, 3)
        assert torch.equal(each, each[:, :1].expand(3, 3))
        assert metrics["reward/greedy_baseline"] == pytest.approx(each.mean().item())


class Talk:
    """Two turns, with a picture each, and a reward for short answers."""

    def reset(self, row, seed):
        self.left = 2
        return Observation(["Say.", self.picture()])

    def step(self, action):
        self.left -= 1
        return Observation([self.picture()], reward=1.0 / (1 + len(action)), done=not self.left)

    def picture(self):
        return Image.new("RGB", (28, 28), (100 * self.left, 0, 0))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "last_pictures"), [("gigpo", None), ("turn_returns", 1), ("turn_gae", 1), ("bi_level_gae", None)]
)
def test_every_advantage_over_turns(name, last_pictures, roles, prompts):
    make = ppo_step if name in WITH_CRITIC else grpo_step
    config = ActorCriticConfig(n=2, advantage=name)
    played = with_episodes(roles, Played(EpisodePlan(Talk, EpisodeLimits(turns=3, last_pictures=last_pictures))))
    sampling = replace(config.sampling(max_tokens=6, seed=3), stop_token_ids=tuple(range(0, 300, 2)))
    data, metrics = make(played, prompts[0], config, sampling)
    assert_learned(metrics)
    mask, episodes = data["response_mask"] != 0, set(data["trajectory"])
    assert len(episodes) == 6
    assert (len(data) > 6) == (last_pictures is not None)
    assert data["advantages"][mask].any()
    assert not data["advantages"][~mask].any()
    assert ("critic/grad_norm" in metrics) == (name in WITH_CRITIC)


@pytest.mark.parametrize("name", LOSSES.names)
def test_every_loss(name, roles, prompts, request):
    if name == "clip_cov":  # few tokens of a small batch are within the paper's bounds
        name, columns = "wide_clip_cov", partial(random_high_covariance, cov_ratio=0.2, cov_bounds=(0.0, 5.0))
        LOSSES.register(name, clip_cov_loss, {"clip": (1.0, 1.0)}, {"high_covariance": columns})
        request.addfinalizer(lambda: LOSSES.remove(name))
    config = GRPOConfig(n=3, loss=name, **{"dynamic_sampling": 2} if name == "dapo" else {})
    data, metrics = step(roles, prompts, config)
    assert_learned(metrics)
    assert ("train/num_gen_batches" in metrics) == ("reward/overlong_penalty" in metrics) == (name == "dapo")
    assert ("actor/kl_loss" in metrics) == (name == "grpo")
    if name == "wide_clip_cov":
        assert 0 < metrics["actor/pg_clipfrac"] <= 0.2
    assert len(data) == 9


@pytest.mark.parametrize("name", [name for name in LOSSES.names if name not in ("grpo", "dr_grpo")])
def test_every_loss_with_a_critic(name, roles, prompts):
    config = PPOConfig(n=2, loss=name, kl_coef=0.0, dynamic_sampling=0)
    data, metrics = step(roles, prompts, config, ppo_step)
    assert_learned(metrics)
    assert metrics["critic/grad_norm"] > 0
    assert len(data) == 6


def test_functions_of_a_file(roles, prompts, tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    config = GRPOConfig(
        n=3, loss=f"{tmp_path}/mine.py:loss", advantage=f"{tmp_path}/mine.py:advantage", kl_coef=0.1, kl="k3+"
    )
    _, metrics = step(roles, prompts, config)
    assert_learned(metrics)
    assert metrics["actor/mine"] == pytest.approx(1.0)
    assert metrics["actor/kl_loss"] >= 0


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_every_correction(level, roles, prompts):
    config = GRPOConfig(n=3, correction=level, rejection=level)
    data, metrics = step(roles, prompts, config)
    assert_learned(metrics)
    assert metrics["rollout_corr/rollout_is_mean"] == pytest.approx(1.0, abs=1e-3)  # engine and actor agree here
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == 0
    assert metrics["training/rollout_probs_diff_log_max"] < 1e-4
    assert "rollout_is_weights" not in data


@pytest.mark.parametrize("make", [grpo_step, ppo_step])
def test_a_step_of_which_everything_is_rejected_changes_no_weight(make, roles, prompts, monkeypatch):
    generate = roles.rollout.generate

    def off_policy(*args):
        data = generate(*args)
        data["rollout_log_probs"] = data["rollout_log_probs"] - 5.0
        return data

    monkeypatch.setattr(roles.rollout, "generate", off_policy, raising=False)
    kind = PPOConfig if make is ppo_step else GRPOConfig
    before = {name: weight.clone() for name, weight in roles.actor.worker.module.named_parameters()}
    data, metrics = step(roles, prompts, kind(n=2, correction="token", rejection="token", minibatch=1), make)
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == 1.0
    assert metrics["rollout_corr/rollout_is_max"] == 2.0
    assert "actor/grad_norm" not in metrics
    assert all(torch.equal(weight, before[name]) for name, weight in roles.actor.worker.module.named_parameters())
    assert data["response_mask"].any()
    _, metrics = step(roles, prompts, kind(n=2, correction="token"), make)
    assert metrics["rollout_corr/rollout_is_mean"] == 2.0
    assert metrics["actor/grad_norm"] > 0

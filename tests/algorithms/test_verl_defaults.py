"""What docs/moving.md and docs/algorithms.md say of verl's defaults; those of verl 0.9.1 are in verl_numbers.json."""

import json
from pathlib import Path

from helpers.moving_page import VERL, option_names
from recipes.algorithms.options import AlgorithmConfig
from recipes.ppo import PPOConfig
from workers.model.model_config import OptimizerConfig

THEIRS = json.loads(Path(__file__).with_name("verl_numbers.json").read_text())["defaults"]


def test_the_options_that_the_page_names_are_verls():
    assert set(option_names(VERL)) <= set(THEIRS)


def test_the_defaults_are_verls_but_for_those_that_the_page_names():
    ours = AlgorithmConfig()
    assert ours.clip == (THEIRS["actor.clip_ratio_low"], THEIRS["actor.clip_ratio_high"])
    assert ours.dual_clip == THEIRS["actor.clip_ratio_c"]
    assert (ours.aggregation, ours.epochs) == (THEIRS["actor.loss_agg_mode"], THEIRS["actor.ppo_epochs"])
    assert (ours.entropy_coef, ours.gamma) == (THEIRS["actor.entropy_coeff"], THEIRS["algorithm.gamma"])
    assert (ours.temperature, ours.top_p) == (THEIRS["rollout.temperature"], THEIRS["rollout.top_p"])
    assert (ours.top_k, THEIRS["rollout.top_k"]) == (0, -1)
    assert (ours.kl_in_loss, ours.kl_in_reward) == (THEIRS["actor.use_kl_loss"], THEIRS["algorithm.use_kl_in_reward"])
    assert (ours.kl, THEIRS["actor.kl_loss_type"], THEIRS["algorithm.kl_penalty"]) == ("k3", "low_var_kl", "kl")
    assert (ours.loss, THEIRS["actor.policy_loss.loss_mode"]) == ("ppo", "vanilla")
    assert (ours.correction, THEIRS["algorithm.rollout_correction.rollout_is"]) == ("none", None)
    assert (ours.rejection, THEIRS["algorithm.rollout_correction.rollout_rs"]) == ("none", None)
    assert ours.correction_limit == THEIRS["algorithm.rollout_correction.rollout_is_threshold"]
    critic = PPOConfig()
    assert (critic.lam, critic.critic_warmup, critic.value_clip) == (
        *(THEIRS["algorithm.lam"], THEIRS["trainer.critic_warmup"], THEIRS["critic.cliprange_value"]),
    )
    optimizer = OptimizerConfig()
    assert (optimizer.schedule, optimizer.max_grad_norm) == (
        *(THEIRS["actor.optim.lr_scheduler_type"], THEIRS["actor.optim.clip_grad"]),
    )
    # What differs, as docs/algorithms.md and docs/moving.md say:
    assert (ours.advantage, THEIRS["algorithm.adv_estimator"]) == ("grpo", "gae")
    assert (ours.n, THEIRS["rollout.n"]) == (5, 1)
    assert (ours.minibatch, THEIRS["actor.ppo_mini_batch_size"]) == (None, 256)
    assert THEIRS["model.enable_gradient_checkpointing"] is THEIRS["trainer.val_before_train"] is True
    assert (THEIRS["trainer.resume_mode"], THEIRS["algorithm.filter_groups.max_num_gen_batches"]) == ("auto", 0)

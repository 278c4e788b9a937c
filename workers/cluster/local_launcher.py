"""Launches all roles in this process."""

from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from typing import Any

import torch

from dataproto.errors import InvalidConfig
from rollout.engine import prepare_engine
from workers.cluster.local_group import LocalGroup
from workers.cluster.role_groups import LaunchPlan, Phase, Roles, early_reward, engine_phase
from workers.roles.actor import ActorWorker
from workers.roles.critic import CriticWorker
from workers.roles.reference import reference_worker
from workers.roles.reward import ModelReward, ModelRewardWorker, RewardFunction, RewardWorker
from workers.roles.rollout_worker import RolloutWorker


def launch_local(plan: LaunchPlan, phase: Phase = nullcontext) -> Roles:
    """Builds the workers of all roles in this process.

    Raises:
        InvalidConfig: the layout has more than one rank.
    """
    if plan.layout.world_size > 1:
        raise InvalidConfig(f"{plan.layout} needs {plan.layout.world_size} processes: use on='ray'")
    optional: dict[str, LocalGroup | None] = {"reference": None, "critic": None, "reward": None}
    prepare_engine(plan.rollout.engine, plan.rollout.model_path)
    with phase("loading the actor"):
        actor = ActorWorker(plan.actor)
    if plan.reference:
        with phase("loading the reference"):
            optional["reference"] = LocalGroup(reference_worker(plan.reference, actor))
    if plan.critic:
        with phase("loading the critic"):
            optional["critic"] = LocalGroup(CriticWorker(plan.critic))
    if plan.reward:
        with phase("starting the reward"):
            optional["reward"] = LocalGroup(_reward_worker(plan.reward, plan.actor.model_path))
    with phase(engine_phase(plan.rollout.engine)):
        rollout = LocalGroup(RolloutWorker(plan.rollout, actor.named_weights, reward=early_reward(plan)))
    return Roles(LocalGroup(actor), rollout, optional)


def local_worker(make: Callable[[torch.device | None], Any], stack: ExitStack) -> LocalGroup:
    """See `workers.cluster.launcher.launch_worker`."""
    return LocalGroup(make(None))


def _reward_worker(reward: RewardFunction | ModelReward, model_path: str) -> RewardWorker:
    if isinstance(reward, ModelReward):
        return ModelRewardWorker(reward, model_path)
    return RewardWorker(reward, model_path)

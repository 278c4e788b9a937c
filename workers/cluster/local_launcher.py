"""Launches all roles in this process."""

from dataproto.errors import InvalidConfig
from workers.cluster.local_group import LocalGroup
from workers.cluster.role_groups import LaunchPlan, Roles
from workers.roles.actor import ActorWorker
from workers.roles.critic import CriticWorker
from workers.roles.model_worker import ReferenceWorker
from workers.roles.reward import ModelReward, ModelRewardWorker, RewardFunction, RewardWorker
from workers.roles.rollout_worker import RolloutWorker


def launch_local(plan: LaunchPlan) -> Roles:
    """Builds the workers of all roles in this process.

    Raises:
        InvalidConfig: the layout has more than one rank.
    """
    if plan.layout.world_size > 1:
        raise InvalidConfig(f"{plan.layout} needs {plan.layout.world_size} processes: use on='ray'")
    actor = ActorWorker(plan.actor)
    optional = {
        "reference": plan.reference and LocalGroup(ReferenceWorker(plan.reference)),
        "critic": plan.critic and LocalGroup(CriticWorker(plan.critic)),
        "reward": plan.reward and LocalGroup(_reward_worker(plan.reward, plan.actor.model_path)),
    }
    return Roles(LocalGroup(actor), LocalGroup(RolloutWorker(plan.rollout, actor.named_weights)), optional)


def _reward_worker(reward: RewardFunction | ModelReward, model_path: str) -> RewardWorker:
    if isinstance(reward, ModelReward):
        return ModelRewardWorker(reward, model_path)
    return RewardWorker(reward, model_path)

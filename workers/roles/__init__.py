"""The roles of a recipe: workers that hold a model, an engine or a reward function."""

from typing import TYPE_CHECKING

from dataproto.extras import lazy_names

if TYPE_CHECKING:
    from workers.roles.actor import ActorConfig, ActorWorker
    from workers.roles.critic import CriticConfig, CriticWorker, Values
    from workers.roles.model_worker import PolicyConfig, ReferenceWorker
    from workers.roles.reward import ModelReward, ModelRewardWorker, RewardFunction, RewardRow, RewardWorker
    from workers.roles.rollout_worker import RolloutConfig, RolloutWorker
    from workers.roles.sharding_manager import ShardingManager

__all__ = [
    "ActorConfig",
    "ActorWorker",
    "CriticConfig",
    "CriticWorker",
    "ModelReward",
    "ModelRewardWorker",
    "PolicyConfig",
    "ReferenceWorker",
    "RewardFunction",
    "RewardRow",
    "RewardWorker",
    "RolloutConfig",
    "RolloutWorker",
    "ShardingManager",
    "Values",
]

__getattr__ = lazy_names(__name__, __file__)

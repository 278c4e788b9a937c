"""Role workers, and the groups that run them."""

from workers.actor import ActorConfig, ActorWorker
from workers.critic import CriticConfig, CriticWorker
from workers.launch import Roles, launch
from workers.layout import Layout
from workers.optimizer import OptimizerConfig
from workers.packed import Outputs, PackedVLM
from workers.policy import PolicyConfig, ReferenceWorker
from workers.reward import RewardFunction, RewardRow, RewardWorker
from workers.rollout import RolloutConfig, RolloutWorker
from workers.sharding import ShardingManager
from workers.step import LossFn

__all__ = [
    "ActorConfig",
    "ActorWorker",
    "CriticConfig",
    "CriticWorker",
    "Layout",
    "LossFn",
    "OptimizerConfig",
    "Outputs",
    "PackedVLM",
    "PolicyConfig",
    "ReferenceWorker",
    "RewardFunction",
    "RewardRow",
    "RewardWorker",
    "Roles",
    "RolloutConfig",
    "RolloutWorker",
    "ShardingManager",
    "launch",
]

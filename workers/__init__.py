"""Role workers, and the groups that run them."""

from typing import TYPE_CHECKING

from dataproto.extras import lazy_names, require_extra

require_extra("train", "workers", "transformers")

if TYPE_CHECKING:
    from workers.cluster.launcher import launch
    from workers.cluster.role_groups import Roles
    from workers.model.packed_model import Outputs, PackedVLM
    from workers.ranks.layout import Layout
    from workers.roles.actor import ActorConfig, ActorWorker
    from workers.roles.critic import CriticConfig, CriticWorker
    from workers.roles.model_worker import PolicyConfig, ReferenceWorker
    from workers.roles.reward import RewardFunction, RewardRow, RewardWorker
    from workers.roles.rollout_worker import RolloutConfig, RolloutWorker
    from workers.roles.sharding_manager import ShardingManager
    from workers.training.forward_pass import LossFn
    from workers.training.optimizer import AdamParams, OptimizerConfig

__all__ = [
    "ActorConfig",
    "ActorWorker",
    "AdamParams",
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

__getattr__ = lazy_names(
    __name__,
    ".cluster.launcher",
    ".cluster.role_groups",
    ".model.packed_model",
    ".ranks.layout",
    ".roles.actor",
    ".roles.critic",
    ".roles.model_worker",
    ".roles.reward",
    ".roles.rollout_worker",
    ".roles.sharding_manager",
    ".training.forward_pass",
    ".training.optimizer",
)

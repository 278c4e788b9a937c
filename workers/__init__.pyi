from .cluster.launcher import launch as launch
from .cluster.role_groups import Roles as Roles
from .model.packed_model import Outputs as Outputs, PackedVLM as PackedVLM
from .ranks.layout import Layout as Layout
from .roles.actor import ActorConfig as ActorConfig, ActorWorker as ActorWorker
from .roles.critic import CriticConfig as CriticConfig, CriticWorker as CriticWorker
from .roles.model_worker import PolicyConfig as PolicyConfig, ReferenceWorker as ReferenceWorker
from .roles.reward import RewardFunction as RewardFunction, RewardRow as RewardRow, RewardWorker as RewardWorker
from .roles.rollout_worker import RolloutConfig as RolloutConfig, RolloutWorker as RolloutWorker
from .roles.sharding_manager import ShardingManager as ShardingManager
from .training.forward_pass import LossFn as LossFn
from .training.optimizer import AdamParams as AdamParams, OptimizerConfig as OptimizerConfig

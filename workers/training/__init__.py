"""Training of a model: passes, updates and checkpoints, in one object that the roles hold."""

from typing import TYPE_CHECKING

from dataproto.extras import lazy_names

if TYPE_CHECKING:
    from workers.model.model_config import AdamParams, OptimizerConfig
    from workers.training.aggregation import aggregate
    from workers.training.checkpoint import latest_checkpoint, writing_checkpoint
    from workers.training.forward_pass import LossFn
    from workers.training.loss_sums import Updated
    from workers.training.training_model import TrainingModel

__all__ = [
    "AdamParams",
    "LossFn",
    "OptimizerConfig",
    "TrainingModel",
    "Updated",
    "aggregate",
    "latest_checkpoint",
    "writing_checkpoint",
]

__getattr__ = lazy_names(__name__, __file__)

"""Checkpoints whose weights are read and written by parts, so that no process ever holds the whole model."""

from workers.weights.checkpoint_copy import copy_weights
from workers.weights.hollow_model import all_tensors, fill, hollow_model, make_room, stand_ins
from workers.weights.sharded_export import ShardedExport
from workers.weights.stored_tensors import CheckpointFiles
from workers.weights.weight_sources import WeightSources

__all__ = [
    "CheckpointFiles",
    "ShardedExport",
    "WeightSources",
    "all_tensors",
    "copy_weights",
    "fill",
    "hollow_model",
    "make_room",
    "stand_ins",
]

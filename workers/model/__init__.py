"""The packed model that training runs: attention, log-probs, precision, adapters and export of weights."""

from workers.model.model_config import ModelConfig, compute_dtype
from workers.model.packed_model import Outputs, PackedVLM

__all__ = ["ModelConfig", "Outputs", "PackedVLM", "compute_dtype"]

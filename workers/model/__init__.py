"""The packed model that training runs: attention, log-probs, precision, adapters and export of weights."""

from typing import TYPE_CHECKING

from dataproto.extras import lazy_names

if TYPE_CHECKING:
    from workers.model.model_config import ModelConfig
    from workers.model.packed_model import Outputs, PackedVLM
    from workers.model.precision import compute_dtype

__all__ = ["ModelConfig", "Outputs", "PackedVLM", "compute_dtype"]

__getattr__ = lazy_names(__name__, __file__)

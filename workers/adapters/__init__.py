"""Training of many adapters of one frozen model, whose rows are computed in one packed pass."""

from typing import TYPE_CHECKING

from dataproto.extras import lazy_names

if TYPE_CHECKING:
    from workers.adapters.adapter_trainer import AdapterTrainer, ScoredPrompt, ScoredRow
    from workers.adapters.full_weights import TrainedWeights
    from workers.adapters.trained_adapter import TrainedAdapter, TrainedMatrices

__all__ = ["AdapterTrainer", "ScoredPrompt", "ScoredRow", "TrainedAdapter", "TrainedMatrices", "TrainedWeights"]

__getattr__ = lazy_names(__name__, ".adapter_trainer", ".full_weights", ".trained_adapter")

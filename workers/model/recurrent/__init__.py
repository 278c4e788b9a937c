"""Recurrent layers over packed rows: the gated delta rule of Qwen3.5, and short causal convolutions."""

from workers.model.recurrent.gated_delta_net import PackedGatedDeltaNet, use_packed_recurrence

__all__ = ["PackedGatedDeltaNet", "use_packed_recurrence"]

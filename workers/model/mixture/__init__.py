"""Mixtures of experts over packed tokens: which experts a token is sent to, and what they compute."""

from workers.model.mixture.grouped_experts import (
    compute_grouped,
    fused_module,
    grouped_experts,
)
from workers.model.mixture.routing import use_packed_experts

__all__ = ["compute_grouped", "fused_module", "grouped_experts", "use_packed_experts"]

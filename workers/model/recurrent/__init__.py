"""Recurrent layers over packed rows: the gated delta rule of Qwen3.5, and short causal convolutions."""

from workers.model.recurrent.gated_delta_net import (
    HeadShare,
    channels,
    check_recurrent_heads,
    packed_gated_delta_net,
    recurrent_mixers,
    use_packed_recurrence,
)

__all__ = [
    "HeadShare",
    "channels",
    "check_recurrent_heads",
    "packed_gated_delta_net",
    "recurrent_mixers",
    "use_packed_recurrence",
]

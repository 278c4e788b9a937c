"""Optimizers beside torch's AdamW: Muon for matrices that may be sharded, and AdamW with moments of 8 bits."""

from typing import TYPE_CHECKING

from dataproto.extras import lazy_names

if TYPE_CHECKING:
    from workers.training.optimizers.eight_bit import adamw_8bit, new_moments_8bit
    from workers.training.optimizers.muon import Muon
    from workers.training.optimizers.stored_moments import MomentReader, stored_parts

__all__ = ["MomentReader", "Muon", "adamw_8bit", "new_moments_8bit", "stored_parts"]

__getattr__ = lazy_names(__name__, __file__)

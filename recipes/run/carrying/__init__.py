"""Samples that go on after their step: which groups a step takes, and what a run keeps of the others.

See `recipes.run.carrying.carried_rollouts`.
"""

from recipes.run.carrying.carried_rollouts import CarryingRollout, carry_samples, staleness
from recipes.run.carrying.look_ahead import LookAhead
from recipes.run.carrying.unlearned_samples import CarriedSamples

__all__ = ["CarriedSamples", "CarryingRollout", "LookAhead", "carry_samples", "staleness"]

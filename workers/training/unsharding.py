"""What FSDP leaves unsharded between micro-batches where the options leave that open: chosen by the memory that calls took."""

from collections import Counter
from collections.abc import Mapping, Sequence

import torch

from workers.model.model_config import UNSHARDED, Unsharded
from workers.parallel.fsdp import GatheredBytes
from workers.training.memory import DeviceMemory

ROOM = 0.06
"""The share of a device that stays free: micro-batches of later steps may be fuller, and torch holds some memory in pieces."""

DECIDING_CALL = {True: 2, False: 4}
"""Of updates, and of passes without gradients. The optimizer's state does not exist before the end of the first update, and a
step scores up to three times before that: as the actor, as the reference, and its first mini-batch as the reference.
"""


def device_share(device: torch.device) -> float:
    """The share of a CUDA device that was in use at the peak of what this process allocated since the peak was reset.

    What torch counts without holding it (the memory of an engine that sleeps) and what others hold of the device is the same now
    and at the peak.
    """
    now = DeviceMemory.of(device)
    return (torch.cuda.max_memory_allocated(device) + now.used - now.reserved) / now.total


def most_that_fits(share: float, total: int, extra: GatheredBytes, learns: bool) -> Unsharded:
    """The most that can stay unsharded in calls that took ``share`` of a device of ``total`` bytes with nothing unsharded.

    Args:
        learns: whether the calls were updates; else passes without gradients, where only weights can be kept.

    >>> extra = GatheredBytes(weights=16, gradients=30)
    >>> [most_that_fits(share, 100, extra, learns=True) for share in (0.45, 0.5, 0.8)]
    ['gradients', 'weights', 'nothing']
    >>> most_that_fits(0.5, 100, extra, learns=False)
    'scoring'
    """
    room = (1 - ROOM - share) * total
    if room < extra.weights:
        return "nothing"
    if not learns:
        return "scoring"
    return "gradients" if room >= extra.weights + extra.gradients else "weights"


class Unsharding:
    """Chooses once for updates and once for passes without gradients, and takes back what slows later steps down.

    >>> choice = Unsharding(torch.device("cpu"), GatheredBytes(16, 30))
    >>> choice.is_due(learns=True), choice.is_due(learns=True), choice.is_due(learns=True)
    (False, True, False)
    >>> [choice.is_due(learns=False) for _ in range(5)]
    [False, False, False, True, False]
    """

    def __init__(self, device: torch.device, extra: GatheredBytes) -> None:
        self.device, self.extra = device, extra
        self.kept: Unsharded = "nothing"
        self._calls: Counter[bool] = Counter()

    def is_due(self, learns: bool) -> bool:
        """Counts a call that ends; whether it is the one after which the choice is made."""
        self._calls[learns] += 1
        return self._calls[learns] == DECIDING_CALL[learns]

    def fitting(self, share: float, learns: bool) -> Unsharded:
        """What fits on this rank after a call that took ``share`` of its device; ranks with uneven shards can differ."""
        total = torch.cuda.get_device_properties(self.device).total_memory
        return most_that_fits(share, total, self.extra, learns)

    def choose(self, fitting: Sequence[Unsharded]) -> Unsharded:
        """The choice after a call, the same on all ranks, since they reduce together: the least of what is `fitting` on each."""
        self.kept = max(self.kept, min(fitting, key=UNSHARDED.index), key=UNSHARDED.index)
        return self.kept

    def after_update(self, metrics: Mapping[str, float]) -> Unsharded:
        """One thing less, if a device ran out of memory in a step with gradients or weights unsharded."""
        if metrics.get("perf/allocator_retries") and self.kept in ("weights", "gradients"):
            self.kept = UNSHARDED[UNSHARDED.index(self.kept) - 1]
        return self.kept

"""Where one model's weights and optimizer state are: on the device while a call uses them, in host memory between calls."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from workers.training.memory.host_copies import HostCopies


class Residence:
    """Brings weights, and the optimizer's state for updates, to the device, and takes them back; with ``idle_on_host`` alone.

    What no step has changed is not copied again: a frozen model, such as a reference, only comes and is dropped.
    """

    def __init__(
        self,
        module: nn.Module,
        moments: Callable[[], Iterable[Tensor]],
        device: torch.device,
        idle_on_host: bool,
        drop: Callable[[], None] = lambda: None,
    ) -> None:
        """
        Args:
            moments: returns the optimizer's state.
            drop: forgets what can be computed from the weights.
        """
        self.active, self.drop = idle_on_host, drop
        if not idle_on_host:
            return
        self.trained = HostCopies(lambda: (each for each in module.parameters() if each.requires_grad), device)
        self.frozen = HostCopies(lambda: (each for each in module.parameters() if not each.requires_grad), device)
        self.moments = HostCopies(moments, device)
        self._depth, self._changed = 0, True
        self._park()

    @contextmanager
    def using(self, moments: bool = False, changes: bool = False) -> Iterator[None]:
        """The weights are on the device in here; blocks may be nested.

        Args:
            moments: the optimizer's state is too, once `wait_for_moments` has been called.
            changes: weights and state may change.
        """
        if not self.active:
            yield
            return
        self._depth += 1
        self._changed |= changes
        try:
            for copies in (self.frozen, self.trained):
                copies.fetch()
                copies.wait()
            if moments:
                self.moments.fetch()
            yield
        finally:
            self._depth -= 1
            if not self._depth:
                self._park()

    def wait_for_moments(self) -> None:
        """Lets what the device does from now on wait until the optimizer's state is there."""
        if self.active:
            self.moments.wait()

    def _park(self) -> None:
        self.drop()
        self.frozen.park(changed=False)
        self.trained.park(self._changed)
        self.moments.park(self._changed)
        self._changed = False

"""Where one model's weights and optimizer state are: on the device while they are used, in host memory at other times."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from dataproto.errors import ending
from workers.training.memory.host_copies import HostCopies


class Residence:
    """Brings weights to the device for a call, and the optimizer's state for an optimizer step, and takes them back; only with
    ``idle_on_host``. So an update's activations and the optimizer's state do not take memory at the same time.

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
        self._depth, self._changed, self._loaded = 0, True, True
        self.moments.park(changed=True)
        self._park()

    @contextmanager
    def using(self, moments: bool = False, changes: bool = False, loads: bool = False) -> Iterator[None]:
        """The weights are on the device in here; blocks may be nested.

        Args:
            moments: the optimizer's state is too, once `wait_for_moments` has been called. It leaves at the end of this block,
                also of a nested one.
            changes: trained weights and state may change.
            loads: frozen weights may change too.
        """
        if not self.active:
            yield
            return
        self._depth += 1
        self._changed |= changes
        self._loaded |= loads
        with ending(lambda: self._leave(moments)):
            for copies in (self.frozen, self.trained):
                copies.fetch()
                copies.wait()
            if moments:
                self.moments.fetch()
            yield

    def _leave(self, moments: bool) -> None:
        self._depth -= 1
        if moments or not self._depth:
            self.moments.park(self._changed)
        if not self._depth:
            self._park()

    def wait_for_moments(self) -> None:
        """Lets what the device does from now on wait until the optimizer's state is there."""
        if self.active:
            self.moments.wait()

    def outlasting(self, weight: Tensor) -> Tensor:
        """``weight``, or a copy if it lies in memory that is emptied when the weights leave the device."""
        leaves = self.active and (self.frozen.holds(weight) or self.trained.holds(weight))
        return weight.clone() if leaves else weight

    def _park(self) -> None:
        self.drop()
        self.frozen.park(self._loaded)
        self.trained.park(self._changed)
        self._changed = self._loaded = False

"""Where one model's weights and optimizer state are: on the device while they are used, in host memory at other times.

Tensors that leave their device for host memory and come back stay the objects that they are. The storage of a tensor is emptied
and filled again, so that whatever refers to the tensor, or is a view of it, sees the same numbers later: FSDP's shards,
parameters in an optimizer, tied weights. On CUDA the copies run on a stream of their own, between pinned memory and the device;
the host waits for none of them, and the allocator reuses memory once it has been copied.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, UntypedStorage, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from dataproto.errors import ending

LARGEST_PIECE = 1 << 28  # bytes; the allocator of pinned memory rounds up to powers of two
SMALLEST_PIECE = 1 << 12


class HostCopies:
    """The copies of some tensors of one device."""

    def __init__(self, tensors: Callable[[], Iterable[Tensor]], device: torch.device) -> None:
        """``tensors``: asked each time, since optimizers make their state when they first need it."""
        self.tensors, self.device = tensors, device
        self._copies: dict[int, tuple[UntypedStorage, list[Tensor]]] = {}
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._ready: torch.cuda.Event | None = None

    def park(self, changed: bool) -> None:
        """Moves the tensors to host memory.

        Args:
            changed: whether they differ from the last copies; if not, nothing is copied.
        """
        self.wait()
        storages = {each._cdata: each for tensor in self.tensors() for each in storages_of(tensor)}
        self._copies = {key: self._copies[key] for key in storages if key in self._copies}
        self._begin()
        for key, storage in storages.items():
            if not storage.nbytes():
                continue
            if changed or key not in self._copies:
                if key not in self._copies:
                    self._copies[key] = storage, self._room(storage.nbytes())
                self._copy(storage, self._copies[key][1], to_host=True)
            storage.resize_(0)

    def fetch(self) -> None:
        """Begins to bring the tensors back; `wait` before they are used."""
        away = [(storage, pieces) for storage, pieces in self._copies.values() if not storage.nbytes()]
        for storage, pieces in away:
            storage.resize_(sum(len(piece) for piece in pieces))
        self._begin()
        for storage, pieces in away:
            self._copy(storage, pieces, to_host=False)
        if self._stream is not None and away:
            self._ready = self._stream.record_event()

    def wait(self) -> None:
        """Lets what the device does from now on wait until the tensors are back."""
        if self._ready is not None:
            torch.cuda.current_stream(self.device).wait_event(self._ready)
            self._ready = None

    def holds(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` lies in memory that `park` empties; known once it has been called."""
        return any(storage._cdata in self._copies for storage in storages_of(tensor))

    def _begin(self) -> None:
        """Lets copies wait for what the device does by now."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self.device))

    def _room(self, size: int) -> list[Tensor]:
        pinned = self._stream is not None
        return [torch.empty(length, dtype=torch.uint8, pin_memory=pinned) for length in piece_lengths(size)]

    def _copy(self, storage: UntypedStorage, pieces: list[Tensor], to_host: bool) -> None:
        whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        parts = whole.split([len(piece) for piece in pieces])
        with torch.cuda.stream(self._stream):  # of `None`: does nothing
            for part, piece in zip(parts, pieces, strict=True):
                if to_host:
                    piece.copy_(part, non_blocking=True)
                else:
                    part.copy_(piece, non_blocking=True)
        if self._stream is not None:
            whole.record_stream(self._stream)


def storages_of(tensor: Tensor) -> Iterator[UntypedStorage]:
    """The storages of a tensor: of a DTensor this rank's part, of quantized numbers codes and scales."""
    if is_traceable_wrapper_subclass(tensor):
        parts = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
        for part in parts:
            if isinstance(part, Tensor):  # a DTensor's mesh is none
                yield from storages_of(part)
    else:
        yield tensor.untyped_storage()


def piece_lengths(size: int) -> list[int]:
    """Powers of two that add up to ``size`` bytes, except for the last one.

    >>> piece_lengths(3 * 2**12 + 5), piece_lengths(2**29)
    ([8192, 4096, 5], [268435456, 268435456])
    """
    lengths = []
    while size >= SMALLEST_PIECE:
        lengths.append(min(1 << (size.bit_length() - 1), LARGEST_PIECE))
        size -= lengths[-1]
    return lengths + [size] * (size > 0)


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
    def using(
        self, moments: bool = False, changes: bool = False, loads: bool = False, frozen: bool = True
    ) -> Iterator[None]:
        """The weights are on the device in here; blocks may be nested.

        Args:
            moments: the optimizer's state is too, once `wait_for_moments` has been called. It leaves at the end of this block,
                also of a nested one.
            changes: trained weights and state may change.
            loads: frozen weights may change too.
            frozen: frozen weights are used too.
        """
        if not self.active:
            yield
            return
        self._depth += 1
        self._changed |= changes
        self._loaded |= loads
        with ending(lambda: self._leave(moments)):
            for copies in (self.frozen, self.trained) if frozen else (self.trained,):
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

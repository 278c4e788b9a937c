"""Images that were processed, kept for the next time that they are shown."""

import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.utils.data import get_worker_info


class ImageCache:
    """The model's inputs for images by a key that tells all that they depend on; those used last, up to ``max_bytes``.

    It keeps copies and hands out copies, so what a batch's owner writes into his tensors changes no other batch. In a worker
    process of a data loader it keeps that worker's share of the bytes.

    >>> import torch
    >>> cache = ImageCache(max_bytes=16)
    >>> for key in (b"a", b"b", b"c"):
    ...     cache.put(key, {"pixel_values": torch.ones(2)})
    >>> cache.get(b"a"), cache.get(b"c")
    (None, {'pixel_values': tensor([1., 1.])})
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.bytes = 0
        self._kept: OrderedDict[bytes, dict[str, Tensor]] = OrderedDict()
        self._lock = threading.Lock()
        self._batch = threading.local()

    @contextmanager
    def one_batch(self) -> Iterator[None]:
        """Until it ends, this thread also finds all that it put, itself and not a copy, whether or not there is room for it."""
        self._batch.inputs = {}
        try:
            yield
        finally:
            self._batch.inputs = None

    def get(self, key: bytes) -> dict[str, Tensor] | None:
        """A copy of what was put under the key, if it is still there."""
        batch = getattr(self._batch, "inputs", None)
        if batch is not None and key in batch:
            return dict(batch[key])
        with self._lock:
            kept = self._kept.get(key)
            if kept is None:
                return None
            self._kept.move_to_end(key)
        copied = _copied(kept)
        if batch is not None:
            batch[key] = copied
        return copied

    def put(self, key: bytes, inputs: Mapping[str, Tensor]) -> None:
        """Keeps a copy, and lets go of what was not used for the longest time. What is larger than all room is not kept."""
        batch = getattr(self._batch, "inputs", None)
        if batch is not None:
            batch[key] = dict(inputs)
        worker = get_worker_info()
        room = self.max_bytes // (1 if worker is None else worker.num_workers)
        size = _size(inputs)
        if size > room:
            return
        copied = _copied(inputs)
        with self._lock:
            self.bytes += size - _size(self._kept.pop(key, {}))
            self._kept[key] = copied
            while self.bytes > room:
                self.bytes -= _size(self._kept.popitem(last=False)[1])

    def __reduce__(self) -> tuple[Any, ...]:
        return ImageCache, (self.max_bytes,)  # another process begins with none


def _copied(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in inputs.items()}


def _size(inputs: Mapping[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in inputs.values())

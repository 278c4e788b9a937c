"""Book-keeping of the media that the calls of one step share in an object store."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from dataproto.serialization.wire import Buffer, SharedBlobs


class CountingStore(Protocol):
    """A blob store that counts what it was given; see `dataproto.BlobStore`."""

    num_bytes: int

    def put(self, buffer: Any) -> Any: ...

    def get(self, ref: Any) -> Buffer: ...


class StepBlobs:
    """The media that the driver has put into the object store in this step; later calls of the step refer to them.

    A program that trains step by step may never end a step. So `open` first releases what is kept if it exceeds the limit.
    """

    def __init__(self, new_store: Callable[[], CountingStore], limit_bytes: Callable[[], int]) -> None:
        """``limit_bytes`` is called once, by the first `open`."""
        self._new_store, self._limit_bytes = new_store, limit_bytes
        self._limit: int | None = None
        self.renew()

    def renew(self) -> None:
        """Begins a new step: releases the media of the previous one."""
        self._store = self._new_store()
        self._shared = SharedBlobs(self._store)

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """What is pickled in the block shares its media with what was pickled earlier in the step; see `shared_blobs`."""
        if self._limit is None:
            self._limit = self._limit_bytes()
        if self._store.num_bytes > self._limit:
            self.renew()
        with self._shared.open():
            yield

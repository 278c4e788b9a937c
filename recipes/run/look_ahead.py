"""A loader whose next batches can be looked at early, and are prepared by a thread while a step uses the present one."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from threading import Event, Thread
from typing import Any

from dataproto import DataProto
from recipes.run.loop import Loader

DELAY_S = 1.0
"""Seconds that a thread waits before it prepares the next batch, unless that is asked for: the step first sends its own batch."""

CLOSING_S = 60.0
"""Seconds that `LookAhead.close` waits for a batch that is being prepared."""


class BackgroundBatch:
    """A batch that a thread prepares, and then sends, unless it is asked for by then."""

    def __init__(self, loader: Loader, send: Callable[[DataProto], object]) -> None:
        self.loader, self.send, self.batch = loader, send, Future[DataProto]()
        self._begins, self._dropped = Event(), False
        self._thread = Thread(target=self._prepare, name="next batch", daemon=True)
        self._thread.start()

    def result(self) -> DataProto:
        """The batch, or what the loader raised, as soon as it is there."""
        self._begins.set()
        return self.batch.result()

    def drop(self) -> None:
        """Ends the thread: without the batch if it has not begun."""
        self._dropped = True
        self._begins.set()
        self._thread.join(CLOSING_S)

    def _prepare(self) -> None:
        self._begins.wait(DELAY_S)
        if self._dropped:
            return
        try:
            self.batch.set_result(next(self.loader))
        except BaseException as error:  # for the caller of `result`
            self.batch.set_exception(error)
        if not self._begins.is_set() and self.batch.exception() is None:
            with suppress(Exception):  # the step that uses the batch sends it then, and raises
                self.send(self.batch.result())


class LookAhead:
    """A loader that can show its next batches early. Its saved position counts only the batches that it has returned."""

    def __init__(self, loader: Loader, background: bool = False) -> None:
        """``background``: a thread prepares the next batch while the caller uses one; `close` ends it."""
        self.loader, self.background = loader, background
        self.send: Callable[[DataProto], object] = lambda batch: None
        """Called by the thread with each batch that it has prepared early; see `Roles.send_ahead`. `close` before these end."""
        self._shown: deque[tuple[DataProto, dict[str, Any], dict[int, str]]] = deque()  # with the position after each
        self._preparing: BackgroundBatch | None = None
        self._position, self.skipped = self._now()
        """``skipped``: rows that could not be used, up to the batch that was returned last, index to reason."""

    def peek(self, number: int = 0) -> DataProto:
        """The batch that ``next`` returns after ``number`` others."""
        while len(self._shown) <= number:
            batch = next(self.loader) if self._preparing is None else self._prepared(self._preparing)
            self._shown.append((batch, *self._now()))
        return self._shown[number][0]

    def _prepared(self, preparing: BackgroundBatch) -> DataProto:
        with suppress(Exception):  # an interrupt leaves the thread at work
            preparing.result()
        self._preparing = None
        return preparing.result()

    def __next__(self) -> DataProto:
        self.peek()
        batch, self._position, self.skipped = self._shown.popleft()
        if self.background and self._preparing is None:
            self._preparing = BackgroundBatch(self.loader, self.send)
        return batch

    def _now(self) -> tuple[dict[str, Any], dict[int, str]]:
        """Position and skipped rows of the loader."""
        return self.loader.state_dict(), dict(self.loader.skipped)

    def state_dict(self) -> dict[str, Any]:
        return self._position

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.close()
        self.loader.load_state_dict(state)
        self._shown.clear()
        self._position, self.skipped = self._now()

    def close(self) -> None:
        """Ends the thread. A batch that it has prepared is lost, so `load_state_dict` comes next, if anything."""
        if self._preparing is not None:
            self._preparing.drop()
            self._preparing = None

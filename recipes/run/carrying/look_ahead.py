"""The next batch before a step asks for it."""

from concurrent.futures import Future
from contextlib import suppress
from threading import Event, Thread
from typing import Any

from dataproto import DataProto
from recipes.run.loop import Loader

DELAY_S = 1.0
"""Seconds before a thread begins with the next batch, unless that is asked for: a step first sends its own to the engines."""


class LookAhead:
    """A loader that can show its next batch early. Its saved position counts only the batches that it has returned."""

    def __init__(self, loader: Loader, background: bool = False) -> None:
        """``background``: a thread prepares the next batch while the caller uses one."""
        self.loader, self.background = loader, background
        self.current: DataProto | None = None
        self._next: DataProto | None = None
        self._coming: Future[DataProto] | None = None  # the next batch, which a thread prepares
        self._wanted = Event()
        self._note_position()

    @property
    def skipped(self) -> dict[int, str]:
        """Rows that could not be used, up to the batch that was returned last: index to reason."""
        return self._skipped

    def peek(self) -> DataProto:
        """The next batch, which the next call of ``next`` returns."""
        if self._next is None:
            coming, self._coming = self._coming, None
            self._wanted.set()
            self._next = next(self.loader) if coming is None else coming.result()
        return self._next

    def __next__(self) -> DataProto:
        self.current, self._next = self.peek(), None
        self._note_position()
        if self.background:
            self._coming, self._wanted = Future(), Event()
            Thread(target=self._prepare, args=[self._coming, self._wanted], name="next batch", daemon=True).start()
        return self.current

    def _prepare(self, coming: "Future[DataProto]", wanted: Event) -> None:
        wanted.wait(DELAY_S)
        try:
            coming.set_result(next(self.loader))
        except BaseException as error:  # for the caller of `peek`
            coming.set_exception(error)

    def _note_position(self) -> None:
        self._position, self._skipped = self.loader.state_dict(), dict(self.loader.skipped)

    def state_dict(self) -> dict[str, Any]:
        return self._position

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._coming is not None:
            self._wanted.set()
            with suppress(Exception):
                self._coming.result()  # else its thread would go on from the new position
        self.loader.load_state_dict(state)
        self.current = self._next = self._coming = None
        self._note_position()

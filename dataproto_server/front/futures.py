"""Results that clients wait for: protobuf for passes and samples, JSON for the rest and for failures."""

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from dataproto_server.backend import Failure, PassResult
from dataproto_server.codec import write_pass_result
from dataproto_server.ledger.journal import Outcome

PROTOBUF = "application/x-protobuf"
ACTIVE, PAUSED = "active", "paused_capacity"


@dataclass
class PendingResult:
    """A result that is awaited, or known and kept for a while.

    Args:
        owner: the key that may fetch it.
        sampler: the sampling session of a sample; ``None`` for requests that train, whose results are on disk too.
    """

    id: str
    owner: str
    sampler: str | None = None
    outcome: Outcome | None = None
    known: asyncio.Event = field(default_factory=asyncio.Event)
    finished: float = 0.0  # by the monotonic clock
    digest: str = ""  # of the body of a sample
    samples: int = 1
    fetched: bool = False
    reason: Callable[[], str] = lambda: "the request waits for its turn"


class Futures:
    """All results that this process knows, by the id of their request."""

    def __init__(self, most_bytes: int) -> None:
        """
        Args:
            most_bytes: of the finished results of a key that stay in memory.
        """
        self.most_bytes = most_bytes
        self._bytes: Counter[str] = Counter()  # of finished results, by key
        self.pending: dict[str, PendingResult] = {}

    def open(self, request_id: str, owner: str, sampler: str | None = None) -> PendingResult:
        """The result of a request, made if there is none."""
        return self.pending.setdefault(request_id, PendingResult(request_id, owner, sampler))

    def resolve(self, request_id: str, outcome: Outcome) -> None:
        """Makes a result known; that of an unknown request is dropped."""
        found = self.pending.get(request_id)
        if found is None or found.outcome is not None:
            return
        found.outcome, found.finished = outcome, time.monotonic()
        found.known.set()
        self._bytes[found.owner] += len(outcome.result)
        if self._bytes[found.owner] > self.most_bytes:
            self._make_room(found)

    def _make_room(self, newest: PendingResult) -> None:
        """Drops results of a key down to half of what it may have: those on disk first, then the fetched and the oldest.

        A client that asks for a dropped sample is told so, and sends its request again.
        """
        others = [
            each for each in self.pending.values() if each.owner == newest.owner and each.outcome and each is not newest
        ]
        others.sort(key=lambda each: (each.sampler is not None, not each.fetched, each.finished))
        for each in others:
            if self._bytes[newest.owner] <= self.most_bytes // 2:
                return
            self._drop(each)

    def _drop(self, result: PendingResult) -> None:
        del self.pending[result.id]
        assert result.outcome is not None
        self._bytes[result.owner] -= len(result.outcome.result)

    async def wait(self, request_id: str, seconds: float) -> Outcome | None:
        """The outcome of a request, or ``None`` if it is not known in time."""
        found = self.pending[request_id]
        with suppress(TimeoutError):
            await asyncio.wait_for(found.known.wait(), seconds)
        return found.outcome

    def forget(self, finished_before: float) -> None:
        """Drops results that were known before a time of the monotonic clock. Those that train are on disk too."""
        old = [each for each in self.pending.values() if each.outcome is not None and each.finished < finished_before]
        for each in old:
            self._drop(each)


def outcome_of(result: PassResult | Failure) -> Outcome:
    """What the client of a pass gets."""
    if isinstance(result, Failure):
        return failed(result.message, result.category)
    return Outcome(write_pass_result(result), PROTOBUF)


def answered(answer: dict[str, Any]) -> Outcome:
    """What the client of a request gets in JSON."""
    return Outcome(json.dumps(answer).encode())


def failed(message: str, category: str) -> Outcome:
    """What the client of a failed request gets: status 200 with the error, which the SDK raises with its category.

    >>> failed("rank=0", "user").result
    b'{"error": "rank=0", "category": "user"}'
    """
    return Outcome(json.dumps({"error": message, "category": category}).encode(), failed=True)

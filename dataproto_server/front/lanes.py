"""The order of requests: those of a run are carried out by their numbers, without gaps, each once."""

import asyncio
import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf
from typing import Literal

from dataproto_server.config import LimitsConfig
from dataproto_server.ledger import journal
from dataproto_server.ledger.database import Database
from dataproto_server.ledger.journal import Entry
from dataproto_server.ledger.records import Run
from dataproto_server.refusals import Refused


@dataclass
class Lane:
    """The waiting requests of a run.

    >>> run = Run(id="r", number=1, session="s", owner="o", base_model="m", lora=None, metadata="{}", created=0, last_request=0)
    >>> lane = Lane(run)
    >>> lane.add(Entry("r:1", "r", 1, "pass", None, 10, 0.0))
    >>> lane.head() is None, lane.gap()
    (True, (0, [1]))
    >>> lane.add(Entry("r:0", "r", 0, "create", None, 10, 0.0))
    >>> lane.head().kind, lane.gap()
    ('create', None)
    """

    run: Run
    entries: dict[int, Entry] = field(default_factory=dict)
    blocked_since: float | None = None  # a request waits, but not the next one
    steps: int = 0  # updates since the last snapshot
    last_snapshot: float = field(default_factory=time.monotonic)
    last_pass: float = -inf  # when one was computed
    saving: bool = False  # it reads or writes files or ends, while rounds continue
    resting: str = ""  # why the run could not be restored: nothing is carried out before the next start
    not_before: float = 0.0  # it rests until this time after an error of the server
    ending: Literal["", "dropped", "kept"] = ""  # what becomes of it when nothing waits

    def add(self, entry: Entry) -> None:
        self.entries[entry.seq] = entry
        self._look()

    def head(self) -> Entry | None:
        """The request whose turn it is."""
        return self.entries.get(self.run.next_seq)

    def passes(self, most_bytes: int) -> list[Entry]:
        """The passes up to the next request of another kind, at least one if there is one."""
        found: list[Entry] = []
        size = 0
        while (entry := self.entries.get(self.run.next_seq + len(found))) is not None and entry.kind == "pass":
            size += entry.size
            if found and size > most_bytes:
                break
            found.append(entry)
        return found

    def done(self, entry: Entry) -> None:
        """Takes a request out; it is the turn of the next one."""
        done = self.entries.pop(entry.seq, None)
        if done is not None:
            done.body = None  # who waits for its result holds the request for long
        self.run.next_seq = max(self.run.next_seq, entry.seq + 1)
        self._look()

    def gap(self) -> tuple[int, list[int]] | None:
        """The number that is missing, and those that wait for it."""
        if not self.entries or self.head() is not None:
            return None
        return self.run.next_seq, sorted(self.entries)

    def _look(self) -> None:
        if self.gap() is None:
            self.blocked_since = None
        elif self.blocked_since is None:
            self.blocked_since = time.monotonic()


KEPT_BYTES = 8192  # of a body that stays in memory until its request is carried out
KEPT_BYTES_IN_ALL = 16 << 20  # of larger bodies that stay too; all others are read from disk again
MOST_GATHERING = 0.02  # seconds that a pass waits for those of other runs
GATHERING_PART = 0.1  # of the last round's time: how long it waits at most for one that has not come yet
RECENTLY = 60.0  # seconds in which a run has sent a pass whose next one is waited for


class Intake:
    """Writes requests to disk, and enters them into their lanes."""

    def __init__(
        self, database: Database, limits: LimitsConfig, lanes: Mapping[str, Lane], enter: Callable[[Entry], None]
    ) -> None:
        """
        Args:
            enter: is called with a new request when it is on disk.
        """
        self.database, self.limits, self.lanes, self.enter = database, limits, lanes, enter
        self._accepting: dict[str, tuple[str, asyncio.Task[None]]] = {}
        self._unwritten: dict[str, tuple[str, int]] = {}  # owner and bytes of requests that are not on disk yet

    async def accept(self, run: Run, seq: int, kind: str, body: bytes, tokens: int = 0) -> str:
        """Takes in a request, and returns its id as soon as it is on disk. One that came before has the same id.

        Args:
            tokens: of a pass.

        Raises:
            Refused: another request has this number, or too much waits.
        """
        request_id, digest = f"{run.id}:{seq}", hashlib.sha256(kind.encode() + b"\0" + body).hexdigest()
        if request_id not in self._accepting:
            entry = Entry(request_id, run.id, seq, kind, body, len(body), time.time(), tokens=tokens)
            task = asyncio.create_task(self._take_in(run, entry, digest))
            self._accepting[request_id] = (digest, task)
            task.add_done_callback(lambda _: self._accepting.pop(request_id))
        known, task = self._accepting[request_id]
        if known != digest:
            raise other_content(run, seq)
        await asyncio.shield(task)  # which continues when this client has gone
        return request_id

    async def gather(self, lanes: Sequence[Lane], pass_seconds: float, news: asyncio.Event) -> None:
        """Waits a moment where passes are all that is due, so that clients in step are computed in one batch.

        A request that is on its way to the disk is waited for longer than one that may not come.

        Args:
            pass_seconds: of the last round of passes.
            news: is set when a request is entered into a lane.
        """
        began = time.monotonic()
        while True:
            heads = {lane.run.id: head.kind for lane in lanes if (head := lane.head()) is not None}
            others = [lane for lane in lanes if lane.run.id not in heads]
            arriving = {request.rpartition(":")[0] for request in self._accepting}
            if any(lane.run.id in arriving for lane in others):
                most = MOST_GATHERING
            elif any(began - lane.last_pass < RECENTLY for lane in others):
                most = min(MOST_GATHERING, GATHERING_PART * pass_seconds)
            else:
                return
            left = began + most - time.monotonic()
            if left <= 0 or set(heads.values()) != {"pass"}:
                return
            news.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await news.wait()

    async def _take_in(self, run: Run, entry: Entry, digest: str) -> None:
        lane = self.lanes.get(run.id)
        if lane is None or entry.seq < run.next_seq or entry.seq in lane.entries:
            found = await self.database.run(journal.find(entry.id))
            if found is not None:
                if found[0] != digest:
                    raise other_content(run, entry.seq)
                if lane is None and found[1] == "queued":  # a kill at the end of its run has left it
                    self.enter(entry)
                return
            if entry.seq < run.next_seq:
                raise Refused(400, f"request {entry.seq} of {run.id} comes too late: the run is at {run.next_seq}")
        self._check_room(run.owner, entry.size)
        self._unwritten[entry.id] = run.owner, entry.size
        try:
            await self.database.run(journal.accept(entry, digest))
        finally:
            del self._unwritten[entry.id]
        if entry.size > KEPT_BYTES and self._kept() + entry.size > KEPT_BYTES_IN_ALL:
            entry.body = None  # it is on disk
        self.enter(entry)

    def _kept(self) -> int:
        return sum(len(e.body) for lane in self.lanes.values() for e in lane.entries.values() if e.body is not None)

    def _check_room(self, owner: str, size: int) -> None:
        waiting = [e.size for lane in self.lanes.values() if lane.run.owner == owner for e in lane.entries.values()]
        waiting += [taken for other, taken in self._unwritten.values() if other == owner]
        if len(waiting) >= self.limits.max_queued_requests:
            raise Refused(429, f"{len(waiting)} requests of this key wait (--max-queued-requests)")
        if sum(waiting) + size > self.limits.max_queued_mb << 20:
            raise Refused(429, f"the waiting requests of this key take {sum(waiting) >> 20} MB (--max-queued-mb)")


def other_content(run: Run, seq: int) -> Refused:
    """The refusal of a number that has been used."""
    return Refused(400, f"request {seq} of {run.id} has come before with another content")

"""The order of requests: those of a run are carried out by their numbers, without gaps, each once. Each is on disk before it is
acknowledged, each round before it is computed, and each outcome before it is told.
"""

import asyncio
import hashlib
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf
from typing import Literal

from dataproto_server.front.futures import failed
from dataproto_server.front.sample_queue import Samples
from dataproto_server.ledger import journal
from dataproto_server.ledger.journal import Entry, Outcome
from dataproto_server.ledger.records import Job, Run, together
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

    @property
    def is_free(self) -> bool:
        """Whether the next request may be carried out now."""
        return not self.saving and not self.resting and self.not_before <= time.monotonic()

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
MOST_TRIES = 3  # of a round at which the engine ends


class Requests:
    """The requests of all runs, in their lanes and in the journal."""

    def __init__(self, samples: Samples) -> None:
        """Has the requests that the journal has. The lane of a run that has ended goes with its last request."""
        self.link, self.futures, self.limits = samples.link, samples.futures, samples.config.limits
        self.catalogue, self.database = samples.catalogue, samples.catalogue.database
        self.on_change: Callable[[Lane], None] = lambda lane: None  # a request has come into a lane, or left it
        self._accepting: dict[str, tuple[str, asyncio.Task[None]]] = {}
        self._unwritten: dict[str, tuple[str, int]] = {}  # owner and bytes of requests that are not on disk yet
        self._last_round = self.database.run_now(journal.last_round)
        self._tries: Counter[tuple[str, ...]] = Counter()
        self.lanes = {run.id: Lane(run) for run in self.catalogue.runs.values() if run.state in ("new", "live")}
        begun = [entry for entries in self.database.run_now(journal.rounds_to_replay) for entry in entries]
        unfinished = [entry for entry in begun if entry.state == "queued"]
        for entry in [*unfinished, *self.database.run_now(journal.waiting)]:
            if entry.run in self.lanes:
                self._enter(entry)

    def _enter(self, entry: Entry) -> None:
        lane = self.lanes.setdefault(entry.run, Lane(self.catalogue.runs[entry.run]))
        self.futures.open(entry.id, lane.run.owner).reason = lambda: self._reason(lane, entry)
        lane.add(entry)
        self.on_change(lane)

    def _reason(self, lane: Lane, entry: Entry) -> str:
        if not self.link.connected:
            return "the engine starts again; the request continues then"
        if lane.resting:
            return lane.resting
        gap = lane.gap()
        if gap is not None:
            return f"request {entry.seq} waits for request {gap[0]}"
        ahead = sum(len(each.entries) for each in self.lanes.values()) - 1
        return f"request {entry.seq} is being computed or waits for its turn; {ahead} others wait"

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
                    self._enter(entry)
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
        self._enter(entry)

    def _kept(self) -> int:
        return sum(len(e.body) for lane in self.lanes.values() for e in lane.entries.values() if e.body is not None)

    def _check_room(self, owner: str, size: int) -> None:
        waiting = [e.size for lane in self.lanes.values() if lane.run.owner == owner for e in lane.entries.values()]
        waiting += [taken for other, taken in self._unwritten.values() if other == owner]
        if len(waiting) >= self.limits.max_queued_requests:
            raise Refused(429, f"{len(waiting)} requests of this key wait (--max-queued-requests)")
        if sum(waiting) + size > self.limits.max_queued_mb << 20:
            raise Refused(429, f"the waiting requests of this key take {sum(waiting) >> 20} MB (--max-queued-mb)")

    # Rounds

    async def begin(self, entries: Sequence[Entry]) -> bool:
        """Records a round before it is computed; ``False`` if the engine has ended at it too often.

        Then its only request fails, and several are taken out of the round, to be computed alone.
        """
        return bool(await self.begin_each([entries]))

    async def begin_each(self, rounds: Sequence[Sequence[Entry]]) -> list[Sequence[Entry]]:
        """Those of some rounds that `begin` begins, in one commit."""
        begun = [entries for entries in rounds if await self._may_begin(entries)]
        first = self._last_round + 1
        new = list(enumerate((each for each in begun if any(entry.round is None for entry in each)), first))
        if new:
            self._last_round += len(new)
            records = [journal.begin_round(number, [entry.id for entry in entries]) for number, entries in new]
            await self.database.run(together(*records))
        for number, entries in new:
            for entry in entries:
                entry.round = number
        return begun

    async def _may_begin(self, entries: Sequence[Entry]) -> bool:
        ids = tuple(entry.id for entry in entries)
        self._tries[ids] += 1
        if self._tries[ids] <= MOST_TRIES:
            return True
        if len(entries) == 1:
            message = f"the engine or the server failed {MOST_TRIES} times at this request"
            await self.finish([(entries[0], failed(message, "server"))])
        else:
            await self.dissolve([entry for entry in entries if entry.state == "queued"])
        return False

    async def dissolve(self, entries: Sequence[Entry]) -> None:
        """Takes requests out of their round, to be computed alone: the journal then says how they were."""
        await self.database.run(journal.withdraw([entry.id for entry in entries]))
        for entry in entries:
            if (waiting := self.waiting(entry)) is not None:
                waiting.round, waiting.alone = None, True

    def waiting(self, entry: Entry) -> Entry | None:
        """The request as it waits in its run, or ``None`` if it does not."""
        lane = self.lanes.get(entry.run)
        return None if lane is None else lane.entries.get(entry.seq)

    async def finish(self, finished: Sequence[tuple[Entry, Outcome]], *jobs: Job) -> None:
        """Writes outcomes in one commit, and gives them to who waits for them."""
        now = time.time()
        outcomes = [journal.finish(entry.id, entry.run, entry.seq + 1, outcome, now) for entry, outcome in finished]
        await self.database.run(together(*jobs, *outcomes))
        for entry, outcome in finished:
            self._ended(entry, outcome, now)

    def _ended(self, entry: Entry, outcome: Outcome, now: float) -> None:
        """Takes a request out of its run, and gives its outcome to who waits for it."""
        if (lane := self.lanes.get(entry.run)) is not None:
            lane.run.last_request = now
            lane.done(entry)
            self.on_change(lane)
            if lane.run.state not in ("new", "live") and not lane.entries:
                self.lanes.pop(lane.run.id, None)
        for ids in [each for each in self._tries if entry.id in each]:
            del self._tries[ids]
        self.futures.resolve(entry.id, outcome)


def other_content(run: Run, seq: int) -> Refused:
    """The refusal of a number that has been used."""
    return Refused(400, f"request {seq} of {run.id} has come before with another content")

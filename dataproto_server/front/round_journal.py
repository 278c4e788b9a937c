"""What is written of rounds and runs: each round before it is computed, each outcome before it is told, and snapshots."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, MutableMapping, Sequence
from typing import NoReturn

from dataproto_server.engine_link import CallFailed, EngineLost
from dataproto_server.front.barriers import Barriers
from dataproto_server.front.futures import failed
from dataproto_server.front.lanes import Lane
from dataproto_server.ledger import journal
from dataproto_server.ledger.directories import remove_directory
from dataproto_server.ledger.journal import Entry, Outcome
from dataproto_server.ledger.records import Job, Run, together

log = logging.getLogger("dataproto.serve")
MOST_TRIES = 3  # of a round at which the engine ends
PAUSE_SECONDS = 1.0  # before the engine is left


class RoundJournal:
    """Writes rounds as they begin and as their requests end."""

    def __init__(self, barriers: Barriers, lanes: MutableMapping[str, Lane], on_ended: Callable[[Lane], None]) -> None:
        """
        Args:
            lanes: of all runs; that of a run that has ended goes with its last request.
            on_ended: is called with a lane that a request has left.
        """
        self.link, self.catalogue, self.database = barriers.link, barriers.catalogue, barriers.catalogue.database
        self.futures = barriers.samples.futures
        self.lanes, self.on_ended = lanes, on_ended
        self._last_round = self.database.run_now(journal.last_round)
        self._tries: Counter[tuple[str, ...]] = Counter()

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
            for place, entry in enumerate(entries):
                entry.round, entry.place = number, place
        return begun

    async def _may_begin(self, entries: Sequence[Entry]) -> bool:
        ids = tuple(entry.id for entry in entries)
        self._tries[ids] += 1
        if self._tries[ids] <= MOST_TRIES:
            return True
        if len(entries) == 1:
            message = f"the engine or the server failed {MOST_TRIES} times at this request"
            await self.finish(entries[0], failed(message, "server"))
        else:
            await self.dissolve([entry for entry in entries if entry.state == "queued"])
        return False

    async def dissolve(self, entries: Sequence[Entry]) -> None:
        """Takes requests out of their round, to be computed alone: the journal then says how they were."""
        await self.database.run(journal.withdraw([entry.id for entry in entries]))
        for entry in entries:
            if (waiting := self.waiting(entry)) is not None:
                waiting.round, waiting.place, waiting.alone = None, None, True

    def waiting(self, entry: Entry) -> Entry | None:
        """The request as it waits in its run, or ``None`` if it does not."""
        lane = self.lanes.get(entry.run)
        return None if lane is None else lane.entries.get(entry.seq)

    async def finish(self, entry: Entry, outcome: Outcome, *jobs: Job) -> None:
        """Writes an outcome, and gives it to who waits for it."""
        await self.finish_all([(entry, outcome)], *jobs)

    async def finish_all(self, finished: Sequence[tuple[Entry, Outcome]], *jobs: Job) -> None:
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
            self.on_ended(lane)
            if lane.run.state not in ("new", "live") and not lane.entries:
                self.lanes.pop(lane.run.id, None)
        for ids in [each for each in self._tries if entry.id in each]:
            del self._tries[ids]
        self.futures.resolve(entry.id, outcome)

    async def start_over(self, error: Exception) -> NoReturn:
        """Leaves the engine, which is then brought to where the journal is: what it has computed may not be written."""
        log.error("a round failed and is tried again from the journal", exc_info=error)
        await asyncio.sleep(PAUSE_SECONDS)
        await self.link.close()
        raise EngineLost("the engine is ahead of the journal") from error


class RunSnapshots:
    """Writes the state of a run after an update, where no gradient stands.

    The engine copies the state before the next request of the run, and a thread writes the copy.
    """

    def __init__(self, barriers: Barriers) -> None:
        self.barriers, self.config = barriers, barriers.config
        self.catalogue, self.database = barriers.catalogue, barriers.catalogue.database
        self._writing: dict[str, asyncio.Task[None]] = {}  # by run

    async def after_step(self, lane: Lane, seq: int) -> None:
        """Begins a snapshot after the update ``seq`` if it is time, and none is being written."""
        lane.steps += 1
        due = lane.steps >= self.config.snapshot_steps
        if lane.run.id not in self._writing and (
            due or time.monotonic() - lane.last_snapshot >= self.config.snapshot_seconds
        ):
            await self._begin(lane, seq)

    async def settled(self, *runs: str) -> None:
        """Returns when the snapshots of runs, or of all runs, have been written or have failed."""
        tasks = [task for run, task in self._writing.items() if not runs or run in runs]
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _begin(self, lane: Lane, seq: int) -> None:
        task = self._writing[lane.run.id] = asyncio.create_task(self._write(lane, seq))
        task.add_done_callback(lambda _: self._writing.pop(lane.run.id))
        await asyncio.sleep(0)  # the engine is asked before the next request of the run can be

    async def _write(self, lane: Lane, seq: int) -> None:
        steps, began = lane.steps, time.monotonic()
        try:
            directory = await self.barriers.snapshot(lane.run, seq)
        except EngineLost:  # which is an OSError too
            return
        except (CallFailed, OSError):
            log.exception("no snapshot of %s: the journal keeps its requests", lane.run.id)
            return
        old, name = lane.run.snapshot, self.catalogue.name_of(directory)
        await self.database.run(journal.snapshot_taken(lane.run.id, seq, name))
        lane.run.snapshot, lane.run.snapshot_seq = name, seq
        lane.steps, lane.last_snapshot = lane.steps - steps, began
        if old is not None:
            await asyncio.to_thread(remove_directory, self.catalogue.place(old))

    async def keep(self, run: Run) -> bool:
        """Writes the checkpoint of an expired run; ``False`` if that has to be tried again."""
        try:
            done = await self.barriers.keep(run)
        except EngineLost:
            raise
        except (CallFailed, OSError) as error:
            log.exception("no checkpoint of the expired run %s", run.id)
            return isinstance(error, CallFailed) and error.failure.category == "user"  # its weights cannot be saved
        await self.database.run(together(*done.jobs))
        done.after()
        return True

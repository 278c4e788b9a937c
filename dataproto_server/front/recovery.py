"""Brings an engine that has just started to where the journal is."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from dataproto_server.backend import Failure, Pass
from dataproto_server.codec import read_pass
from dataproto_server.engine_link import EngineLost
from dataproto_server.front.futures import failed, outcome_of
from dataproto_server.front.scheduler import Results, Scheduler
from dataproto_server.ledger import journal
from dataproto_server.ledger.directories import is_damaged
from dataproto_server.ledger.journal import Entry
from dataproto_server.ledger.records import put
from dataproto_server.refusals import CallFailed, attempted, failure_of

log = logging.getLogger("dataproto.serve")
MOST_REPLAYS = 5
"""Tries, after which the runs at which the server fails are left for the next start."""
PAUSE_SECONDS = 2.0
"""Before a further try, for each one before it."""
ENDED = Failure(f"the engine ended {MOST_REPLAYS} times when it was brought back", "server")

Work = Callable[[], Awaitable[Mapping[str, Failure] | None]]
"""Changes runs, and may return those that failed."""


class Recovery:
    """Loads the runs from their snapshots, and carries out the requests after them again, in the same order and groups.

    No limit applies to a request that has been carried out before. One that failed changed nothing, and is left out. An error of
    the server, such as too little memory, may pass: then everything is tried again, from the snapshots, since a part of a round
    would add up in another order. A joint round at which the server fails each time is computed pass by pass in the end.

    A run that cannot be restored now rests: a later start may name its model, have its directory or more memory. Its requests
    wait, and the journal keeps all that it needs. One whose snapshot is damaged has failed.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler, self.barriers = scheduler, scheduler.barriers
        self.requests, self.lanes = scheduler.requests, scheduler.lanes
        self.link, self.database, self.catalogue = scheduler.link, scheduler.database, scheduler.catalogue
        self._tries = 0  # at which the server failed
        self._losses: Counter[tuple[str, ...]] = Counter()  # of the engine, by the run or the requests that it was at

    async def run(self) -> None:
        """Needs an engine that holds no run. An error of the server is raised before the last try: the scheduler connects again
        then, to an engine that has been reset.
        """
        began = time.monotonic()
        kept = [lane.run for lane in self.lanes.values() if lane.run.snapshot is not None and not lane.resting]
        for run in kept:
            if run.state == "live":
                await self._done([run.id], self._tried([run.id], run.id, partial(self.barriers.restore, run)))
        rounds = await self.database.run(journal.rounds_to_replay)
        for entries in rounds:
            needed = [entry for entry in entries if entry.state == "done" or self._is_due(entry)]
            changed = [entry.run for entry in needed if entry.state == "queued" or self._is_later(entry)]
            if changed:
                await self._done(changed, self._repeated(needed))
        if rounds:
            log.info("replayed %d rounds in %.1f s", len(rounds), time.monotonic() - began)
        self._tries = 0
        self._losses.clear()

    @property
    def _is_last(self) -> bool:
        """Whether this is the last try."""
        return self._tries == MOST_REPLAYS - 1

    async def _done(self, run_ids: Sequence[str], work: Awaitable[Mapping[str, Failure]]) -> None:
        """Does work that changes runs and returns those that failed, which rest."""
        try:
            failures = await work
        except EngineLost:
            raise
        except Exception as error:
            failures = dict.fromkeys(run_ids, failure_of(error))
        if not self._is_last and any(each.category == "server" and each is not ENDED for each in failures.values()):
            self._tries += 1
            await asyncio.sleep(PAUSE_SECONDS * self._tries)
            raise CallFailed(Failure(f"runs {', '.join(failures)} cannot be restored now: {failures}", "server"))
        for run_id, failure in failures.items():
            await self._set_aside(run_id, failure)

    async def _set_aside(self, run_id: str, failure: Failure) -> None:
        """Lets a run rest until the next start, or fail if its snapshot is damaged."""
        lane = self.lanes.get(run_id)
        if lane is None:
            return
        tries = f" in {MOST_REPLAYS} tries" if failure.category == "server" else ""
        message = f"run {run_id} cannot be restored{tries}: {failure.message}"
        snapshot = lane.run.snapshot
        if snapshot is None or not await asyncio.to_thread(is_damaged, self.catalogue.place(snapshot)):
            lane.resting = f"{message}; nothing of it is lost, and it continues after a start at which it can be"
            log.error(lane.resting)
        else:
            log.error(message)
            lane.run.state = "failed"
            await self.database.run(put(lane.run))
            for entry in list(lane.entries.values()):
                await self.requests.finish([(entry, failed(message, "server"))])
            self.lanes.pop(run_id, None)
        await self.link.call("release", model_id=run_id)

    async def _tried(self, ids: Sequence[str], run: str, work: Work) -> Mapping[str, Failure]:
        """Does work, and returns the runs that failed: its own if the engine has ended too often at it.

        Args:
            ids: what it is known by: a run, or requests.
        """
        key = tuple(ids)
        if self._losses[key] >= MOST_REPLAYS:
            return {run: ENDED}
        try:
            return await work() or {}
        except EngineLost:
            self._losses[key] += 1
            raise

    async def _repeated(self, entries: Sequence[Entry]) -> Mapping[str, Failure]:
        """Carries out the requests of a round again that did not fail; the runs that have failed at it."""
        first, queued = entries[0], [entry for entry in entries if entry.state == "queued"]
        if first.kind != "pass":
            return await self._barrier(first)
        if queued:
            try:
                if await self.requests.begin(entries):
                    return await self._passes(entries)
            except CallFailed:
                await self.requests.dissolve(queued)
        return await self._repeated_passes([entry for entry in entries if entry.state == "done"])

    async def _barrier(self, entry: Entry) -> Mapping[str, Failure]:
        waiting = self.requests.waiting(entry)
        if waiting is not None:
            await self.scheduler.barrier(waiting)
            return {}
        body = await self.database.run(journal.body_of(entry.id))
        repeat = partial(self.barriers.repeat, self.lanes[entry.run].run, entry, body)
        return await self._tried([entry.id], entry.run, repeat)

    async def _repeated_passes(self, entries: Sequence[Entry]) -> Mapping[str, Failure]:
        """Computes passes again that were computed before; one by one if the server fails each time at all of them."""
        later = [entry for entry in entries if self._is_later(entry)]
        if not later:
            return {}
        ids = [entry.id for entry in entries]
        if len(entries) == 1 or self._losses[tuple(ids)] < MOST_REPLAYS:
            try:
                return await self._tried(ids, entries[0].run, partial(self._passes, entries))
            except CallFailed as error:
                if len(entries) == 1 or (error.failure.category == "server" and not self._is_last):
                    raise
                log.error("a round cannot be computed again: %s", error)
        log.error("passes are computed alone that were computed together: %s. Sums may differ in their last bits", ids)
        failures: dict[str, Failure] = {}
        for entry in later:
            if entry.run not in failures:
                failures |= await self._repeated_passes([entry])
        return failures

    def _is_due(self, entry: Entry) -> bool:
        """Whether a request waits in a run that does not rest."""
        return self.requests.waiting(entry) is not None and not self.lanes[entry.run].resting

    def _is_later(self, entry: Entry) -> bool:
        """Whether a finished request changes its run, which is not yet so far."""
        lane = self.lanes.get(entry.run)
        if lane is None or lane.resting or lane.run.state != "live":
            return False
        return entry.state == "done" and entry.seq > lane.run.snapshot_seq

    async def _passes(self, entries: Sequence[Entry]) -> Mapping[str, Failure]:
        """Computes passes in one group. Where a pass may not change its run, another adapter takes its place."""
        read = [await self._read(entry) for entry in entries]
        passes = [each for each in read if isinstance(each, Pass)]
        computed = iter(await self.scheduler.results(passes) if passes else Results())
        found = [(entry, next(computed) if isinstance(each, Pass) else each) for entry, each in zip(entries, read)]
        new = [(entry, result) for entry, result in found if entry.state == "queued" and result is not None]
        if new:
            await self.requests.finish([(entry, outcome_of(result)) for entry, result in new])
        return {entry.run: result for entry, result in found if self._is_later(entry) and isinstance(result, Failure)}

    async def _read(self, entry: Entry) -> Pass | Failure | None:
        """A pass for the engine, or why it cannot be read; ``None`` if the others are the same without it."""
        body = await self.database.run(journal.body_of(entry.id))
        limits = self.scheduler.config.limits if entry.state == "queued" else None
        each = await asyncio.to_thread(attempted, read_pass, body, limits)
        if entry.state == "queued" or isinstance(each, Failure):
            return each
        if self._is_later(entry):
            return replace(each, replayed=True)
        run = self.catalogue.runs[entry.run]
        if run.spec is None or run.spec.rank == 0:  # all weights are computed by themselves
            return None
        return replace(each, stand_in=(run.base_model, run.spec), replayed=True)

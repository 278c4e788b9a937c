"""Carries out the requests of all runs, in the order of each."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Literal, NoReturn

from dataproto_server.backend import Failure, Pass, PassResult
from dataproto_server.codec import read_pass
from dataproto_server.engine_link import EngineLost
from dataproto_server.front.barriers import WITH_FILES, Barriers, Done, remove_run_files
from dataproto_server.front.fair_share import FairShare
from dataproto_server.front.futures import failed, outcome_of
from dataproto_server.front.lanes import Lane, Requests
from dataproto_server.ledger import journal
from dataproto_server.ledger.journal import Entry
from dataproto_server.ledger.records import put, together
from dataproto_server.refusals import CallFailed, InvalidRequest, attempted, failure_of

log = logging.getLogger("dataproto.serve")
ROUND_BYTES = 32 << 20  # of the bodies of a round's passes, of each run
LOOK_SECONDS = 1.0  # between looks for gaps
LARGE_BYTES = 1 << 18  # of the bodies of a round's passes that are read in another thread than the event loop's
PAUSE_SECONDS = 1.0  # before the engine is left
KEEP_SECONDS = 30.0  # between tries to write the checkpoint of an expired run
Results = list[PassResult | Failure]


class Scheduler:
    """One round after the other: passes of all runs together, then the updates of all, then the rest. What reads or writes
    files does not stop the rounds.

    Of the passes that wait, a round has a fair share of each client: see `FairShare`. A client is a session.
    """

    def __init__(self, barriers: Barriers, requests: Requests) -> None:
        self.barriers, self.config, self.link = barriers, barriers.config, barriers.link
        self.catalogue, self.database = barriers.catalogue, barriers.catalogue.database
        self.futures, self.counters = barriers.samples.futures, barriers.samples.counters
        self.requests, self.lanes, self.accept = requests, requests.lanes, requests.accept
        self.requests.on_change = self._changed
        self.on_connected: Callable[[], Awaitable[None]]  # to an engine that holds no run
        self._share: FairShare[Entry] = FairShare()
        self._pass_seconds = 0.0  # of the last round of passes
        self._wake = asyncio.Event()
        self._in_rounds = False
        self._saves: set[asyncio.Task[None]] = set()

    def _changed(self, lane: Lane) -> None:
        self._begin_save(lane)
        self._wake.set()

    def end(self, run_id: str, how: Literal["dropped", "kept"]) -> None:
        """Ends a run when nothing waits in it; one that is kept leaves a checkpoint for a day."""
        if run_id in self.lanes:
            self.lanes[run_id].ending = how
            self._wake.set()

    async def run(self) -> None:
        """Works for ever; connects again when the engine is lost."""
        while True:
            try:
                await self.settled()
                await self.link.connect()
                await self.on_connected()
                await self._rounds()
            except EngineLost:
                self.counters["engine_losses_total"] += 1
                log.warning("the engine ended: waiting for a new one")
            except Exception:
                log.exception("the engine is not ready, and is asked again")
                await asyncio.sleep(LOOK_SECONDS)
                await self.link.close()

    async def settled(self) -> None:
        """Returns when nothing is carried out in addition to the rounds."""
        await asyncio.gather(*self._saves, return_exceptions=True)
        await self.barriers.settled()

    async def _rounds(self) -> None:
        while True:
            self._wake.clear()
            try:
                self._in_rounds = True
                if not await self._round():
                    await self._rest()
            except EngineLost:
                raise
            except Exception as error:  # a request at which this repeats fails after some tries
                await self._start_over(error)
            finally:
                self._in_rounds = False

    async def _start_over(self, error: Exception) -> NoReturn:
        """Leaves the engine, which is then brought to where the journal is: what it has computed may not be written."""
        log.error("a round failed and is tried again from the journal", exc_info=error)
        await asyncio.sleep(PAUSE_SECONDS)
        await self.link.close()
        raise EngineLost("the engine is ahead of the journal") from error

    async def _rest(self) -> None:
        try:
            # `wait_for` of Python 3.11 may swallow the cancellation of a stop.
            async with asyncio.timeout(LOOK_SECONDS):
                await self._wake.wait()
        except TimeoutError:
            if not self.link.connected:
                raise EngineLost("the engine ended while nothing was to do") from None

    async def _round(self) -> bool:
        """Carries out what is due, and returns whether there was anything."""
        for lane in self.lanes.values():
            self._begin_save(lane)
        lanes = [lane for lane in self.lanes.values() if lane.is_free]
        await self._fail_gaps(lanes)
        await self.requests.gather(lanes, self._pass_seconds, self._wake)
        passes = self._share_of_each(lanes)
        for group in [[each] for each in passes] if any(each.alone for each in passes) else [passes]:
            await self._passes(group)
        steps = [head for lane in lanes if (head := lane.head()) is not None and head.kind == "optim_step"]
        await self._updates(steps)
        others = [head for lane in lanes if (head := lane.head()) is not None and head.kind == "create"]
        await self._together({entry.run: self.barrier(entry) for entry in others})
        ended = [lane for lane in lanes if lane.ending and not lane.entries and not lane.saving and self.link.connected]
        for lane in ended:
            self._begin(lane, self._end(lane))
        return bool(passes or steps or others or ended)

    def _begin_save(self, lane: Lane) -> None:
        """Begins the request of a run whose turn it is, if it reads or writes files: it changes nothing that other runs use."""
        head = lane.head()
        ready = self._in_rounds and self.link.connected  # without an engine it would count as a try
        if ready and lane.is_free and head is not None and head.kind in WITH_FILES:
            self._begin(lane, self.barrier(head))

    def _begin(self, lane: Lane, work: Awaitable[None]) -> None:
        """Begins work for a run, of which nothing else is carried out meanwhile. The rounds of others continue."""
        lane.saving = True
        task = asyncio.create_task(self._while_rounds_continue(lane, work))
        self._saves.add(task)
        task.add_done_callback(self._saves.discard)

    async def _while_rounds_continue(self, lane: Lane, work: Awaitable[None]) -> None:
        try:
            with suppress(EngineLost):  # as the rounds see
                await self._contained(lane, work)
        finally:
            lane.saving = False
            self._begin_save(lane)  # the next one does not wait for the round either
            self._wake.set()

    def _share_of_each(self, lanes: Sequence[Lane]) -> list[Entry]:
        """The passes of the next round; of a client with several runs the one that has waited longest comes first."""
        waiting: dict[str, list[tuple[Entry, int]]] = {}
        due = [passes for lane in lanes if (passes := lane.passes(ROUND_BYTES))]
        for passes in sorted(due, key=lambda passes: passes[0].arrived):
            session = self.lanes[passes[0].run].run.session
            waiting.setdefault(session, []).extend((each, each.tokens) for each in passes)
        return self._share.choose(waiting)

    async def _together(self, work: Mapping[str, Awaitable[None]]) -> None:
        """Does work for several runs at the same time, at most one for each: one's files are read while the engine computes
        for another.
        """
        parts = [self._contained(self.lanes[run], each) for run, each in work.items()]
        for error in await asyncio.gather(*parts, return_exceptions=True):
            if error is not None:
                raise error

    async def _contained(self, lane: Lane, work: Awaitable[None]) -> None:
        """Does work for one run. An error delays this run alone; one that repeats fails the request."""
        try:
            await work
        except EngineLost:
            raise
        except Exception:
            log.exception("the work for %s failed and is tried again", lane.run.id)
            lane.not_before = time.monotonic() + LOOK_SECONDS

    async def _fail_gaps(self, lanes: Sequence[Lane]) -> None:
        now = time.monotonic()
        for lane in lanes:
            gap = lane.gap()
            if gap is None or lane.blocked_since is None or now - lane.blocked_since < self.config.gap_seconds:
                continue
            missing, late = gap
            message = (
                f"request {missing} of {lane.run.id} has not come within {self.config.gap_seconds:g} s (--gap-seconds)"
            )
            outcomes = [failed(f"{message}: request {seq} waited for it", "user") for seq in late]
            await self.requests.finish([(lane.entries[seq], each) for seq, each in zip(late, outcomes)])

    # Passes

    async def _passes(self, entries: Sequence[Entry]) -> None:
        passes, ready = [], []
        for entry, found in zip(entries, await self._read_all(entries), strict=True):
            if isinstance(found, Pass):
                passes.append(found)
                ready.append(entry)
            else:
                await self.requests.finish([(entry, outcome_of(found))])
        if not ready or not await self.requests.begin(ready):
            return
        began = time.monotonic()
        try:
            results = await self.results(passes)
        except CallFailed:  # each is computed alone, so that only the guilty one fails
            await self.requests.dissolve(ready)
            return
        now = time.monotonic()
        self._pass_seconds = now - began
        for entry in ready:
            self.lanes[entry.run].last_pass = now
        self.counters["passes_total"] += len(passes)
        await self.requests.finish([(entry, outcome_of(result)) for entry, result in zip(ready, results)])

    async def _read_all(self, entries: Sequence[Entry]) -> list[Pass | Failure]:
        """The passes of some requests, or why one cannot be read."""
        bodies: list[bytes | Failure] = []
        for entry in entries:
            try:
                if self.lanes[entry.run].run.state != "live":
                    raise InvalidRequest(f"run {entry.run} is not in training")
                bodies.append(await self._body(entry))
            except Exception as error:
                bodies.append(failure_of(error))

        def parsed() -> list[Pass | Failure]:
            return [
                each if isinstance(each, Failure) else attempted(read_pass, each, self.config.limits) for each in bodies
            ]

        large = sum(len(body) for body in bodies if isinstance(body, bytes)) > LARGE_BYTES
        return await asyncio.to_thread(parsed) if large else parsed()

    async def _body(self, entry: Entry) -> bytes:
        return await self.database.run(journal.body_of(entry.id)) if entry.body is None else entry.body

    async def results(self, passes: Sequence[Pass]) -> Results:
        """What passes come to. Raises `CallFailed` if a joint computation fails as a whole; none has then added a gradient."""
        try:
            found: Results = await self.link.call("passes", passes=passes)
        except CallFailed as error:
            if len(passes) > 1:
                raise
            return [error.failure]
        return found

    # All other requests

    async def barrier(self, entry: Entry) -> None:
        """Carries out a request that is no pass."""
        if entry.kind == "load":  # which takes the place of a snapshot that is being written
            await self.barriers.settled(entry.run)
        if await self.requests.begin([entry]):
            await self._conclude([(entry, await self._carried_out(entry))])

    async def _updates(self, entries: Sequence[Entry]) -> None:
        """Carries out updates of different runs at the same time. One commit begins them, and one has their outcomes."""
        begun = [entry for (entry,) in await self.requests.begin_each([[entry] for entry in entries])]
        ended: list[tuple[Entry, Done]] = []

        async def carry_out(entry: Entry) -> None:
            ended.append((entry, await self._carried_out(entry)))

        try:
            await self._together({entry.run: carry_out(entry) for entry in begun})
        except BaseException:  # what the engine has done may not be done twice; a cancellation stays one
            try:
                await self._conclude(ended)
            except Exception:
                log.exception("the outcomes of updates are not written: the journal has them as unfinished")
            raise
        await self._conclude(ended)

    async def _carried_out(self, entry: Entry) -> Done:
        """What a request came to, which is not written yet."""
        run, body = self.lanes[entry.run].run, await self._body(entry)
        try:
            return await self.barriers.carry_out(run, entry, body)
        except EngineLost:
            raise
        except Exception as error:
            jobs = []
            if run.state == "new":  # it could not be created
                run.state = "failed"
                jobs.append(put(run))
            return Done(outcome_of(failure_of(error)), jobs)

    async def _conclude(self, ended: Sequence[tuple[Entry, Done]]) -> None:
        """Writes what requests came to, in one commit; then snapshots of their runs may begin."""
        if not ended:
            return
        lanes = [self.lanes[entry.run] for entry, _ in ended]
        jobs = [job for _, done in ended for job in done.jobs]
        try:
            await self.requests.finish([(entry, done.outcome) for entry, done in ended], *jobs)
            for _, done in ended:
                done.after()
        except Exception as error:  # what the engine has done may not be done twice
            await self._start_over(error)
        for lane, (entry, done) in zip(lanes, ended, strict=True):
            if done.outcome.failed:
                continue
            if entry.kind == "optim_step":
                await self.barriers.after_step(lane, entry.seq)
            elif entry.kind == "load":
                lane.steps, lane.last_snapshot = 0, time.monotonic()

    async def _end(self, lane: Lane) -> None:
        run = lane.run
        await self.barriers.settled(run.id)
        if lane.ending == "kept" and run.state == "live" and not await self.barriers.keep(run):
            lane.not_before = time.monotonic() + KEEP_SECONDS
            return
        await self.database.run(together(put(replace(run, state="ended")), journal.forget_covered))
        run.state, lane.ending = "ended", ""
        if not lane.entries:  # those that have come meanwhile fail, and the lane goes with the last one
            del self.lanes[run.id]
        for directory in await self.catalogue.drop_samplers(lambda each: each.run == run.id):
            self.barriers.samples.retire(directory)
        await self.link.call("release", model_id=run.id)
        await asyncio.to_thread(remove_run_files, self.catalogue.run_directory(run))

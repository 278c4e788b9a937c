"""Brings an engine that has just started to where the journal is."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import replace

from recipes.serve.backend import Failure, Pass
from recipes.serve.front.barriers import Barriers
from recipes.serve.front.futures import failed, pass_outcome
from recipes.serve.front.scheduler import Scheduler
from recipes.serve.ledger import journal
from recipes.serve.ledger.journal import Entry
from recipes.serve.ledger.records import Run, put
from recipes.serve.link import CallFailed, EngineLost, failure_of
from recipes.serve.wire import read_pass

log = logging.getLogger("dataproto.serve")
MOST_REPLAYS = 5
"""Tries, after which the runs at which the server fails are given up."""
FIRST_PAUSE_SECONDS = 1.0
"""Before the second try; each further pause is twice as long."""


class Recovery:
    """Loads the runs from their snapshots, and carries out the requests behind them again, in the same order and groups.

    No limit applies to a request that has been carried out before. An error of the server, such as too little memory, may pass:
    then everything is tried again, from the snapshots, since a part of a round would add up in another order.
    """

    def __init__(self, scheduler: Scheduler, barriers: Barriers) -> None:
        self.scheduler, self.barriers = scheduler, barriers
        self.link, self.database, self.catalogue = scheduler.link, scheduler.database, scheduler.catalogue
        self._losses: Counter[tuple[str, ...]] = Counter()  # of the engine, by the requests that it was at

    async def run(self) -> None:
        """Needs an engine that holds no run."""
        pause = FIRST_PAUSE_SECONDS
        for again in reversed(range(MOST_REPLAYS)):
            if await self._all(last=not again):
                self._losses.clear()
                return
            await asyncio.sleep(pause)
            pause *= 2
            await self.link.call("reset")

    async def _all(self, last: bool) -> bool:
        """``False`` if the server failed and it is not the last try."""
        began = time.monotonic()
        kept = [lane.run for lane in self.scheduler.lanes.values() if lane.run.snapshot is not None]
        for run in kept:
            if run.state == "live" and not await self._done([run.id], self._restored(run), last):
                return False
        rounds = await self.database.run(journal.rounds_to_replay)
        for entries in rounds:
            if not await self._done([entry.run for entry in entries], self._repeated(entries), last):
                return False
        if rounds:
            log.info("replayed %d rounds in %.1f s", len(rounds), time.monotonic() - began)
        return True

    async def _done(self, run_ids: Sequence[str], work: Awaitable[Mapping[str, Failure]], last: bool) -> bool:
        """Does work for runs, which returns those that failed, and gives these up; ``False`` if it is to be tried again."""
        try:
            failures = await work
        except EngineLost:
            raise
        except CallFailed as error:
            failures = dict.fromkeys(run_ids, error.failure)
        except Exception as error:
            failures = dict.fromkeys(run_ids, failure_of(error))
        if not last and any(failure.category == "server" for failure in failures.values()):
            log.warning("runs %s cannot be restored now: %s", ", ".join(failures), failures)
            return False
        for run_id, failure in failures.items():
            await self._give_up(run_id, failure)
        return True

    async def _give_up(self, run_id: str, failure: Failure) -> None:
        lane = self.scheduler.lanes.get(run_id)
        if lane is None:
            return
        tries = f" in {MOST_REPLAYS} tries" if failure.category == "server" else ""
        log.error("run %s cannot be restored%s: %s", run_id, tries, failure.message)
        lane.run.state = "failed"
        await self.database.run(put(lane.run))
        for entry in list(lane.entries.values()):
            message = f"the run cannot be restored{tries}: {failure.message}"
            await self.scheduler.finish(entry, failed(message, "server"))
        self.scheduler.lanes.pop(run_id, None)
        await self.link.call("release", model_id=run_id)

    async def _restored(self, run: Run) -> Mapping[str, Failure]:
        await self.barriers.restore(run)
        return {}

    async def _repeated(self, entries: Sequence[Entry]) -> Mapping[str, Failure]:
        """Carries out a round again; the runs that have failed at it."""
        first = entries[0]
        if any(entry.state == "queued" for entry in entries):
            if first.kind != "pass" and first.run in self.scheduler.lanes:
                await self.scheduler.barrier(self.scheduler.lanes[first.run].entries[first.seq])
            elif first.kind == "pass" and await self.scheduler.begin(entries):
                return await self._passes(entries)
            return {}
        ids = tuple(entry.id for entry in entries)
        if self._losses[ids] >= MOST_REPLAYS:
            failure = Failure(f"the engine ended {MOST_REPLAYS} times when it was brought back", "server")
            return {entry.run: failure for entry in entries if self._is_behind(entry)}
        self._losses[ids] += 1
        failures: Mapping[str, Failure] = {}
        if first.kind == "pass":
            failures = await self._passes(entries)
        elif first.run in self.scheduler.lanes and first.state == "done":
            body = await self.database.run(journal.body_of(first.id))
            await self.barriers.repeat(self.scheduler.lanes[first.run].run, first, body)
        self._losses[ids] -= 1
        return failures

    def _is_behind(self, entry: Entry) -> bool:
        """Whether a finished request changes its run, which is not yet so far."""
        run = self.catalogue.runs[entry.run]
        return entry.state == "done" and run.state == "live" and entry.seq > run.snapshot_seq

    async def _passes(self, entries: Sequence[Entry]) -> Mapping[str, Failure]:
        """Computes passes again in the same group. Where a pass may not change its run, another adapter takes its place."""
        passes: list[Pass] = []
        stand_ins: dict[str, str] = {}
        try:
            for entry in entries:
                body = await self.database.run(journal.body_of(entry.id))
                each = await asyncio.to_thread(read_pass, body, None)
                if entry.state != "queued" and not self._is_behind(entry):
                    each = await self._with_stand_in(each, self.catalogue.runs[entry.run], stand_ins)
                passes.append(each)
            results = await self.scheduler.results(passes, replayed=True)
        finally:
            for model in stand_ins.values():
                await self.link.call("release", model_id=model)
        found = list(zip(entries, results))
        for entry, result in found:
            if entry.state == "queued":
                waiting = self.scheduler.lanes[entry.run].entries[entry.seq]
                await self.scheduler.finish(waiting, pass_outcome(result))
        return {entry.run: result for entry, result in found if self._is_behind(entry) and isinstance(result, Failure)}

    async def _with_stand_in(self, each: Pass, run: Run, stand_ins: dict[str, str]) -> Pass:
        if run.id not in stand_ins:
            stand_ins[run.id] = f"{run.id}:stand-in"
            model = {"model_id": stand_ins[run.id], "base_model": run.base_model, "lora": run.spec}
            await self.link.call("create", **model, replayed=True)
        return replace(each, model_id=stand_ins[run.id])

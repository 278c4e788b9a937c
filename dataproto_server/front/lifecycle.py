"""The ends of things: silent sessions, checkpoints whose time is over, old results, and what a kill left on disk."""

import asyncio
import logging
import time
from pathlib import Path

from dataproto_server.config import ServeConfig
from dataproto_server.front.futures import Futures
from dataproto_server.front.sample_queue import Samples
from dataproto_server.front.scheduler import Scheduler
from dataproto_server.ledger import journal
from dataproto_server.ledger.catalogue import Catalogue
from dataproto_server.ledger.directories import remove_directory, remove_unfinished
from dataproto_server.ledger.records import Checkpoint, Sampler, Session, change, drop

log = logging.getLogger("dataproto.serve")
SWEEP_SECONDS = 5.0
RESULT_SECONDS = 86400.0  # for which a result is kept that no client has fetched
FETCHED_SECONDS = 600.0  # that a fetched result is kept, for a client that lost the answer


class Lifecycle:
    """Looks every few seconds for what has ended."""

    def __init__(
        self, catalogue: Catalogue, scheduler: Scheduler, samples: Samples, futures: Futures, config: ServeConfig
    ) -> None:
        self.catalogue, self.scheduler, self.samples = catalogue, scheduler, samples
        self.futures, self.config = futures, config
        self._ending = asyncio.Lock()
        self._offset = time.time() - time.monotonic()

    def begin(self) -> None:
        """Removes what a kill left, and goes on with ends that it interrupted. Sessions count as seen now."""
        for session in self.catalogue.sessions.values():
            session.seen = time.monotonic()
        for sampler in list(self.catalogue.samplers.values()):
            if self.catalogue.sessions[sampler.session].state != "live":
                del self.catalogue.samplers[sampler.id]  # its directory is unknown below
                self.catalogue.database.post(drop(sampler))
        for run in self.catalogue.runs.values():
            if run.state in ("new", "live") and self.catalogue.sessions[run.session].state != "live":
                self.scheduler.end(run.id, "kept")
        remove_unfinished(self.catalogue.state / "runs")
        if missing := self.catalogue.missing():
            log.error("nothing is cleaned up: %s: no such directory in %s", ", ".join(missing), self.catalogue.state)
            return
        for directory in (self.catalogue.state / "runs").glob("*/*"):
            self._remove_unknown(directory)

    def _remove_unknown(self, directory: Path) -> None:
        """Removes the directory of a snapshot, sampler or checkpoint of which no record knows."""
        known = self.catalogue.directories() | {run.snapshot for run in self.catalogue.runs.values()}
        nested = directory.name in ("weights", "sampler_weights", "external_weights")
        for each in directory.iterdir() if nested else [directory]:
            if self.catalogue.name_of(each) not in known:
                remove_directory(each)

    async def run(self) -> None:
        """Sweeps for ever."""
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            try:
                await self.sweep()
            except Exception:
                log.exception("a sweep failed; the next one comes in %g s", SWEEP_SECONDS)

    async def sweep(self) -> None:
        """Ends what has ended. A system clock that is set forward ends nothing before the next start."""
        elapsed = time.monotonic()
        now = min(time.time(), self._offset + elapsed)
        for session in list(self.catalogue.sessions.values()):
            if session.state == "live" and elapsed - session.seen > self.config.session_seconds:
                log.info("session %s is silent: its runs are kept as checkpoints", session.id)
                await self.end_session(session, "expired")
        for checkpoint in list(self.catalogue.checkpoints.values()):
            if checkpoint.expires is not None and checkpoint.expires <= now:
                await self.delete_checkpoint(checkpoint)
        self.futures.forget(elapsed - FETCHED_SECONDS)
        await self.catalogue.database.run(journal.forget_old(now - RESULT_SECONDS, now - FETCHED_SECONDS))

    async def end_session(self, session: Session, state: str) -> None:
        """Ends a session, its samplers and, when their work is done, its runs."""

        def its_own(sampler: Sampler) -> bool:
            return sampler.session == session.id

        async with self._ending:  # of two that end a session at the same time the second has nothing to do
            if session.state != "live":
                return
            gone = await self.catalogue.drop_samplers(its_own, change(session, state=state))
            session.state = state
        self.samples.cancel_session(session.id)
        for run in self.catalogue.runs.values():
            if run.session == session.id:
                self.scheduler.end(run.id, "kept" if state == "expired" else "dropped")
        for directory in gone | await self.catalogue.drop_samplers(its_own):  # with those that have come meanwhile
            self.samples.retire(directory)

    async def delete_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Deletes a checkpoint; requests for samples of it that are in flight still end."""
        await self.catalogue.database.run(drop(checkpoint))
        key = checkpoint.run, checkpoint.kind, checkpoint.name
        if self.catalogue.checkpoints.get(key) is checkpoint:  # another one may have taken its name
            del self.catalogue.checkpoints[key]
        self.samples.retire(checkpoint.directory)

"""The parts of the front process, put together, and the ends of things."""

import asyncio
import logging
import time
from collections import Counter
from pathlib import Path

from dataproto_server.backend import ModelInfo
from dataproto_server.config import ServeConfig
from dataproto_server.engine_link import EngineLink
from dataproto_server.front.barriers import Barriers
from dataproto_server.front.futures import Futures
from dataproto_server.front.lanes import Requests
from dataproto_server.front.recovery import Recovery
from dataproto_server.front.sample_queue import Samples
from dataproto_server.front.scheduler import Scheduler
from dataproto_server.keys import Keys, read_keys
from dataproto_server.ledger import journal
from dataproto_server.ledger.database import Database
from dataproto_server.ledger.directories import remove_directory, remove_unfinished
from dataproto_server.ledger.records import KINDS, Catalogue, Checkpoint, Sampler, Session, change, drop
from dataproto_server.refusals import NotFound, Refused

log = logging.getLogger("dataproto.serve")
SWEEP_SECONDS = 5.0
RESULT_SECONDS = 86400.0  # for which a result is kept that no client has fetched
FETCHED_SECONDS = 600.0  # that a fetched result is kept, for a client that lost the answer


class Lifecycle:
    """Looks every few seconds for what has ended."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler, self.samples, self.catalogue = scheduler, scheduler.barriers.samples, scheduler.catalogue
        self.futures, self.config = scheduler.futures, scheduler.config
        self._ending = asyncio.Lock()
        self._offset = time.time() - time.monotonic()

    def begin(self) -> None:
        """Removes what a kill left, and continues ends that it interrupted. Sessions count as seen now."""
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
        known = self.catalogue.directories() | {run.snapshot for run in self.catalogue.runs.values()}
        for directory in (self.catalogue.state / "runs").glob("*/*"):
            # Snapshots and samplers lie there, and checkpoints in a directory of their kind.
            for each in directory.iterdir() if directory.name in KINDS else [directory]:
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
        for request in [name for name, each in self.samples.flights.items() if each.session == session.id]:
            self.samples.cancel(request)
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


DATABASE_FILE = "serve.sqlite"
ENGINE_START_SECONDS = 25.0


class Service:
    """What routes need: records, futures, and the ways to the engine."""

    def __init__(self, config: ServeConfig, socket: Path) -> None:
        """
        Args:
            socket: of the engine process.
        """
        state = config.state.resolve()
        state.mkdir(parents=True, exist_ok=True)
        (state / "runs").mkdir(exist_ok=True)
        self.config = config
        self.keys: Keys = read_keys(config.api_keys, state)
        self.counters: Counter[str] = Counter()  # since the start of this process, by name and labels
        self.futures = Futures(config.limits.max_queued_mb << 20)
        self.database = Database(state / DATABASE_FILE)
        self.catalogue = Catalogue(self.database, state)
        self.link = EngineLink(socket, lambda request, result: self.samples.received(request, result))
        self.samples = Samples(self.link, self.catalogue, self.futures, config, self.counters)
        self.scheduler = Scheduler(Barriers(self.samples), Requests(self.samples))
        self.recovery = Recovery(self.scheduler)
        self.scheduler.on_connected = self._connected
        self.lifecycle = Lifecycle(self.scheduler)
        self._models: list[ModelInfo] = []
        self._described = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def _connected(self) -> None:
        await self.recovery.run()
        self._models = await self.link.call("describe")
        self._described.set()
        self.samples.ready(self._models)

    def start(self) -> None:
        """Begins to work. Needs a running event loop."""
        self.lifecycle.begin()
        self._tasks = [asyncio.create_task(self.scheduler.run()), asyncio.create_task(self.lifecycle.run())]

    async def stop(self) -> None:
        """Ends all work; what is unfinished continues at the next start."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.link.close()
        await self.scheduler.settled()
        self.database.close()

    async def models(self) -> list[ModelInfo]:
        """The base models of the engine. Waits for its start; refused with 429, which clients repeat, if that takes long."""
        try:
            await asyncio.wait_for(self._described.wait(), ENGINE_START_SECONDS)
        except TimeoutError:
            raise Refused(429, "the engine is starting") from None
        return self._models

    async def model(self, name: str) -> ModelInfo:
        """A base model by its name. Raises `NotFound`."""
        models = await self.models()
        for model in models:
            if model.name == name:
                return model
        raise NotFound(f"there is no model {name!r}: this server has {', '.join(model.name for model in models)}")

    def numbers(self) -> dict[str, float]:
        """What was counted, and numbers of now, by the names that Prometheus reads."""
        catalogue, lanes = self.catalogue, self.scheduler.lanes.values()
        return {
            "engine_connected": float(self.link.connected),
            "live_sessions": sum(each.state == "live" for each in catalogue.sessions.values()),
            "live_runs": len(lanes),
            "waiting_requests": sum(len(lane.entries) for lane in lanes),
            "waiting_bytes": sum(entry.size for lane in lanes for entry in lane.entries.values()),
            "sample_requests_in_flight": len(self.samples.flights),
            "checkpoints": len(catalogue.checkpoints),
            "checkpoint_bytes": sum(each.size for each in catalogue.checkpoints.values()),
        } | self.counters

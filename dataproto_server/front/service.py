"""The parts of the front process, put together."""

import asyncio
from pathlib import Path

from dataproto_server.backend import Capabilities, ModelInfo
from dataproto_server.config import ServeConfig
from dataproto_server.engine_link import EngineLink
from dataproto_server.front.barriers import Barriers
from dataproto_server.front.counters import Counters
from dataproto_server.front.futures import Futures
from dataproto_server.front.lifecycle import Lifecycle
from dataproto_server.front.recovery import Recovery
from dataproto_server.front.sample_queue import Samples
from dataproto_server.front.scheduler import Scheduler
from dataproto_server.keys import Keys, read_keys
from dataproto_server.ledger.catalogue import Catalogue
from dataproto_server.ledger.database import Database
from dataproto_server.refusals import NotFound, Refused

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
        self.counters = Counters()
        self.futures = Futures(config.limits.max_queued_mb << 20)
        self.database = Database(state / DATABASE_FILE)
        self.catalogue = Catalogue(self.database, state)
        self.link = EngineLink(socket, lambda request, result: self.samples.received(request, result))
        self.samples = Samples(self.link, self.catalogue, self.futures, config, self.counters)
        barriers = Barriers(self.link, self.catalogue, config, self.samples)
        self.scheduler = Scheduler(
            self.link, self.database, self.catalogue, self.futures, barriers, config, self.counters
        )
        self.recovery = Recovery(self.scheduler, barriers)
        self.scheduler.on_connected = self._connected
        self.lifecycle = Lifecycle(self.catalogue, self.scheduler, self.samples, self.futures, config)
        self._capabilities: Capabilities | None = None
        self._described = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def _connected(self) -> None:
        await self.recovery.run()
        self._capabilities = await self.link.call("describe")
        assert self._capabilities is not None
        self._described.set()
        self.samples.ready(self._capabilities)

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
        self.scheduler.barriers.syncs.close()  # a disk may take long; the journal keeps what is not there yet
        await self.scheduler.settled()
        self.database.close()

    async def capabilities(self) -> Capabilities:
        """What the engine has. Waits for its start; refused with 429, which clients repeat, if that takes long."""
        try:
            await asyncio.wait_for(self._described.wait(), ENGINE_START_SECONDS)
        except TimeoutError:
            raise Refused(429, "the engine is starting") from None
        assert self._capabilities is not None
        return self._capabilities

    async def model(self, name: str) -> ModelInfo:
        """A base model by its name. Raises `NotFound`."""
        models = (await self.capabilities()).models
        for model in models:
            if model.name == name:
                return model
        raise NotFound(f"there is no model {name!r}: this server has {', '.join(model.name for model in models)}")

    def gauges(self) -> dict[str, float]:
        """Numbers of now."""
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
        }

"""What the server writes of runs by itself: snapshots, from which a replay starts, and the checkpoints of expired runs."""

import asyncio
import logging
import sqlite3
import time

from dataproto_server.config import ServeConfig
from dataproto_server.engine_link import CallFailed, EngineLost
from dataproto_server.front.barriers import Barriers
from dataproto_server.front.lanes import Lane
from dataproto_server.ledger import journal
from dataproto_server.ledger.catalogue import Catalogue
from dataproto_server.ledger.database import Database, NotWritten
from dataproto_server.ledger.directories import remove_directory
from dataproto_server.ledger.records import Run, together

log = logging.getLogger("dataproto.serve")


class RunSnapshots:
    """Writes the state of a run behind an update, where no gradient stands.

    The engine copies the state before the next request of the run, and a thread writes the copy.
    """

    def __init__(self, database: Database, catalogue: Catalogue, barriers: Barriers, config: ServeConfig) -> None:
        self.database, self.catalogue, self.barriers, self.config = database, catalogue, barriers, config
        self._writing: dict[str, asyncio.Task[None]] = {}  # by run

    async def after_step(self, lane: Lane, seq: int) -> None:
        """Begins a snapshot behind the update ``seq`` if it is time, and none is being written."""
        lane.steps += 1
        due = lane.steps >= self.config.snapshot_steps
        if self.barriers.syncs.failed(lane.run.id):  # none could be recorded
            return
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
            # snapshots for samplers must be on disk first: a replay that begins here would not write them again
            await self.barriers.syncs.done(lane.run.id)
        except EngineLost:  # which is an OSError too
            return
        except (CallFailed, OSError):
            log.exception("no snapshot of %s: the journal keeps its requests", lane.run.id)
            return
        old, name = lane.run.snapshot, self.catalogue.name_of(directory)
        try:
            await self.database.keep(journal.snapshot_taken(lane.run.id, seq, name))
        except NotWritten as error:
            log.error("no snapshot of %s: %s", lane.run.id, error)
            await asyncio.to_thread(remove_directory, directory)
            return
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
        try:
            await self.database.run(together(*done.jobs))
        except sqlite3.OperationalError:
            log.exception("the checkpoint of the expired run %s cannot be recorded", run.id)
            await asyncio.to_thread(done.undo)
            return False
        done.after()
        return True

"""Sessions, runs, samplers and checkpoints in memory, as on disk, and who may see them."""

import asyncio
import json
import re
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dataproto_server.ledger.database import Database
from dataproto_server.ledger.records import (
    KINDS,
    Checkpoint,
    Job,
    Run,
    Sampler,
    Session,
    change,
    drop,
    everything,
    put,
    together,
)
from dataproto_server.refusals import NotFound, Refused

PATH = re.compile(rf"tinker://([^/]{{1,300}})/({'|'.join(KINDS)})/([^/]{{1,128}})")


class Catalogue:
    """All records. Look-ups refuse what does not exist and what belongs to another key alike, with 404."""

    def __init__(self, database: Database, state: Path) -> None:
        self.database = database
        self.state = state
        self.sessions: dict[str, Session] = {each.id: each for each in database.run_now(everything(Session))}
        self.runs: dict[str, Run] = {each.id: each for each in database.run_now(everything(Run))}
        self.samplers: dict[str, Sampler] = {each.id: each for each in database.run_now(everything(Sampler))}
        checkpoints = database.run_now(everything(Checkpoint))
        self.checkpoints: dict[tuple[str, str, str], Checkpoint] = {(e.run, e.kind, e.name): e for e in checkpoints}
        self.making: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)  # of each key: it makes one run at a time
        self._numbers = max((run.number for run in self.runs.values()), default=0)

    def next_number(self) -> int:
        """A number for a new run, which names its directory."""
        self._numbers += 1
        return self._numbers

    async def write(self, *records: Any) -> None:
        """Writes new records, all or none."""
        await self.database.run(together(*map(put, records)))

    async def change(self, record: Any, **values: Any) -> None:
        """Changes fields of a record: in memory when that is on disk, so that it is as before if it cannot be written.

        Raises:
            NotFound: it has been removed meanwhile, and another one may have its name.
        """
        if not await self.database.run(change(record, **values)):
            raise NotFound("it has been deleted or replaced meanwhile")
        for name, value in values.items():
            setattr(record, name, value)

    def session(self, session_id: str, owner: str) -> Session:
        found = self.sessions.get(session_id)
        if found is None or found.owner != owner:
            raise Refused(404, f"there is no session {session_id!r}")
        return found

    def live_session(self, session_id: str, owner: str) -> Session:
        """A session that has not ended; refused with 410 if it has."""
        found = self.session(session_id, owner)
        if found.state != "live":
            raise Refused(410, f"session {session_id!r} is {found.state}")
        return found

    def run(self, run_id: str, owner: str) -> Run:
        found = self.runs.get(run_id)
        if found is None or found.owner != owner:
            raise Refused(404, f"there is no run {run_id!r}")
        return found

    def sampler(self, sampler_id: str, owner: str) -> Sampler:
        found = self.samplers.get(sampler_id)
        if found is None or found.owner != owner:
            raise Refused(404, f"there is no sampling session {sampler_id!r}")
        return found

    def checkpoint(self, path: str, owner: str, *, own: bool = False) -> Checkpoint:
        """The checkpoint at a ``tinker://`` path: one of the key's, or a published one unless ``own``.

        Raises:
            NotFound: there is none.
        """
        match = PATH.fullmatch(path)
        found = self.checkpoints.get(match.groups()) if match else None  # type: ignore[arg-type]
        if found is None or (found.owner != owner and (own or not found.public)):
            raise NotFound(f"there is no checkpoint {path[:400]!r}: it may have expired or been deleted")
        return found

    def checkpoints_of(self, owner: str | None = None, run: str | None = None) -> list[Checkpoint]:
        """Checkpoints of a key or of a run, oldest first."""
        return [
            each
            for each in self.checkpoints.values()
            if (owner is None or each.owner == owner) and (run is None or each.run == run)
        ]

    def live_runs(self, owner: str) -> list[Run]:
        """The runs of a key that are in training, or may come to it: a request that was refused for now may come again."""
        mine = [run for run in self.runs.values() if run.owner == owner]
        return [run for run in mine if run.state == "live" or (run.state == "new" and self._is_live(run.session))]

    def _is_live(self, session_id: str) -> bool:
        return self.sessions[session_id].state == "live"

    def spec_of(self, checkpoint: Checkpoint) -> tuple[str, dict[str, Any] | None]:
        """Base model and LoRA options of the run that wrote a checkpoint."""
        run = self.runs[checkpoint.run]
        return run.base_model, None if run.lora is None else json.loads(run.lora)

    async def drop_samplers(self, which: Callable[[Sampler], bool], *jobs: Job) -> set[str]:
        """Forgets samplers, and returns their directories. ``jobs`` are writes that belong into the same commit."""
        gone = [each for each in self.samplers.values() if which(each)]
        await self.database.run(together(*jobs, *map(drop, gone)))
        for each in gone:
            self.samplers.pop(each.id, None)
        return {each.directory for each in gone if each.directory is not None}

    def place(self, directory: str) -> Path:
        """The path of a recorded directory. Records name it from the state directory, which may move."""
        return self.state / directory

    def name_of(self, path: Path) -> str:
        """How records name a directory."""
        return str(path.relative_to(self.state))

    def directories(self) -> set[str]:
        """Those of all checkpoints and samplers."""
        found = {each.directory for each in self.checkpoints.values()}
        return found | {each.directory for each in self.samplers.values() if each.directory is not None}

    def missing(self) -> list[str]:
        """The recorded directories that must exist, but do not."""
        recorded = {each.directory for each in self.checkpoints.values()}
        recorded |= {each.directory for each in self.samplers.values() if each.own and each.directory is not None}
        recorded |= {run.snapshot for run in self.runs.values() if run.state == "live" and run.snapshot is not None}
        return sorted(each for each in recorded if not self.place(each).is_dir())

    def run_directory(self, run: Run) -> Path:
        return self.state / "runs" / str(run.number)

"""Sessions, runs, samplers and checkpoints: rows of the database, in memory as on disk, and who may see them."""

import asyncio
import json
import re
import sqlite3
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

from dataproto_server.backend import LoraSpec
from dataproto_server.ledger.database import Database
from dataproto_server.ledger.directories import directory_size
from dataproto_server.refusals import NotFound, Refused

Record = TypeVar("Record")
Job = Callable[[sqlite3.Connection], Any]

KINDS = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}
"""The kinds of checkpoints: the part of a ``tinker://`` path, and the word of lists."""


@dataclass(kw_only=True)
class Session:
    id: str
    owner: str
    created: float = field(default_factory=time.time)
    state: str = "live"  # live, finished or expired
    project: str | None = None
    display_name: str | None = None
    metadata: str = "{}"
    tags: str = "[]"
    seen: float = 0.0  # by the monotonic clock; not written: at a start all live sessions count as seen


@dataclass(kw_only=True)
class Run:
    id: str
    number: int
    session: str
    owner: str
    base_model: str
    lora: str | None
    metadata: str
    created: float = field(default_factory=time.time)
    last_request: float = field(default_factory=time.time)
    state: str = "new"  # new, live, failed, or ended
    next_seq: int = 0  # of the next request that is carried out
    snapshot_seq: int = -1  # the last request that the snapshot covers
    snapshot: str | None = None  # its directory

    @property
    def spec(self) -> LoraSpec | None:
        return None if self.lora is None else LoraSpec(**json.loads(self.lora))


@dataclass(kw_only=True)
class Sampler:
    id: str
    session: str
    owner: str
    run: str | None = None
    base_model: str
    model_path: str | None = None
    directory: str | None  # of the adapter; None: the base model
    own: int = 0  # the directory belongs to this sampler alone, and is removed with it
    digest: str = ""
    created: float = field(default_factory=time.time)
    moving: int = 0  # follows the inflight saves of its run
    joined: int = 0  # clients that joined, as of its start: see `join`


@dataclass(kw_only=True)
class Checkpoint:
    run: str
    kind: str
    name: str
    owner: str
    directory: str
    created: float
    expires: float | None
    public: int
    size: int
    metadata: str

    @property
    def path(self) -> str:
        return f"tinker://{self.run}/{self.kind}/{self.name}"


TABLES: dict[type, str] = {Session: "sessions", Run: "runs", Sampler: "samplers", Checkpoint: "checkpoints"}
NOT_WRITTEN = ("seen",)


def put(record: Any) -> Job:
    """Writes a record, over one with the same key."""
    values = {name: value for name, value in asdict(record).items() if name not in NOT_WRITTEN}
    columns, marks = ", ".join(values), ", ".join("?" * len(values))
    sql = f"INSERT OR REPLACE INTO {TABLES[type(record)]} ({columns}) VALUES ({marks})"
    return lambda db: db.execute(sql, list(values.values()))


def together(*jobs: Job) -> Job:
    """Several writes, all or none."""

    def run(db: sqlite3.Connection) -> None:
        for job in jobs:
            job(db)

    return run


def everything(kind: type[Record]) -> Callable[[sqlite3.Connection], list[Record]]:
    """All records of a kind, in the order in which they were written: the system clock may have been set back since."""
    names = [each.name for each in fields(kind) if each.name not in NOT_WRITTEN]  # type: ignore[arg-type]
    sql = f"SELECT {', '.join(names)} FROM {TABLES[kind]} ORDER BY rowid"
    return lambda db: [kind(**dict(row)) for row in db.execute(sql)]


def change(record: Any, **values: Any) -> Callable[[sqlite3.Connection], bool]:
    """Writes some fields of a record, and returns whether it is still there. Other fields stay as they are on disk."""
    changes, (condition, keys) = ", ".join(f"{name} = ?" for name in values), _place(record)
    sql = f"UPDATE {TABLES[type(record)]} SET {changes} WHERE {condition}"
    return lambda db: db.execute(sql, [*values.values(), *keys]).rowcount > 0


def join(sampler: Sampler) -> Callable[[sqlite3.Connection], int | None]:
    """Counts a client that joins, and returns its number; ``None`` if the sampler has been removed."""

    def run(db: sqlite3.Connection) -> int | None:
        row = db.execute(
            "UPDATE samplers SET joined = joined + 1 WHERE id = ? RETURNING joined", [sampler.id]
        ).fetchone()
        return None if row is None else row["joined"]

    return run


def drop(record: Any) -> Job:
    """Removes a record."""
    condition, keys = _place(record)
    return lambda db: db.execute(f"DELETE FROM {TABLES[type(record)]} WHERE {condition}", keys)


def _place(record: Any) -> tuple[str, list[str]]:
    """The condition that finds a record's row, and its values. Another checkpoint may have taken the name of one."""
    names = ("run", "kind", "name", "directory") if isinstance(record, Checkpoint) else ("id",)
    return " AND ".join(f"{name} = ?" for name in names), [getattr(record, name) for name in names]


def text(value: Mapping[str, Any] | list[Any] | None) -> str:
    """JSON of metadata."""
    return json.dumps(value or {}, sort_keys=True)


Owned = TypeVar("Owned", Session, Run, Sampler)
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
        self.numbers = count(1 + max((run.number for run in self.runs.values()), default=0))
        """Of new runs; they name their directories."""

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
        return _owned(self.sessions, session_id, owner, "session")

    def live_session(self, session_id: str, owner: str) -> Session:
        """A session that has not ended; refused with 410 if it has."""
        found = self.session(session_id, owner)
        if found.state != "live":
            raise Refused(410, f"session {session_id!r} is {found.state}")
        return found

    def run(self, run_id: str, owner: str) -> Run:
        return _owned(self.runs, run_id, owner, "run")

    def sampler(self, sampler_id: str, owner: str) -> Sampler:
        return _owned(self.samplers, sampler_id, owner, "sampling session")

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
        return [each for each in self.checkpoints.values() if owner in (None, each.owner) and run in (None, each.run)]

    def bytes_of(self, owner: str) -> int:
        """What the checkpoints of a key and its samplers take on disk."""
        own = {each.directory for each in self.samplers.values() if each.owner == owner and each.own and each.directory}
        size = sum(each.size for each in self.checkpoints_of(owner))
        for directory in own:
            with suppress(FileNotFoundError):  # an absent one takes no room, and may come back
                size += directory_size(self.place(directory))
        return size

    def live_runs(self, owner: str) -> list[Run]:
        """The runs of a key that are in training, or may come to it: a request that was refused for now may come again."""
        mine = [run for run in self.runs.values() if run.owner == owner]
        return [run for run in mine if "live" in (run.state, run.state == "new" and self.sessions[run.session].state)]

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


def _owned(records: Mapping[str, Owned], name: str, owner: str, kind: str) -> Owned:
    found = records.get(name)
    if found is None or found.owner != owner:
        raise Refused(404, f"there is no {kind} {name!r}")
    return found

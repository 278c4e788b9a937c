"""Sessions, runs, samplers and checkpoints, as rows of the database."""

import json
import sqlite3
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeVar

from dataproto_server.backend import LoraSpec

Record = TypeVar("Record")
Job = Callable[[sqlite3.Connection], Any]

KINDS = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}
"""The kinds of checkpoints: the part of a ``tinker://`` path, and the word of lists."""


@dataclass(kw_only=True)
class Session:
    id: str
    owner: str
    created: float
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
    created: float
    last_request: float
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
    run: str | None
    base_model: str
    model_path: str | None
    directory: str | None  # of the adapter; None: the base model
    own: int  # the directory belongs to this sampler alone, and is removed with it
    digest: str
    created: float
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
    names = [field.name for field in fields(kind) if field.name not in NOT_WRITTEN]  # type: ignore[arg-type]
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

"""The journal: the bodies of requests that train, in what grouping they were carried out, and their results.

A request is ``queued`` until its result is known, and then ``done`` or ``failed``. Requests of a round are computed together, and
rounds one after the other. Grouping changes rounding, so a replay keeps it. A round is on disk before it is computed.

Bodies have a table of their own, since SQLite writes a row as a whole at each change of it. Those that are needed no more are
removed.
"""

import sqlite3
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from dataproto.grouping import grouped_by
from dataproto_server.ledger.records import Job

MEMBERS = "id, run, seq, kind, NULL AS body, size, tokens, created, round, state"
ROUNDS = "SELECT round FROM bodies JOIN requests ON requests.id = request JOIN runs ON runs.id = run WHERE round IS NOT NULL AND "
"""The rounds of requests whose bodies are kept."""


@dataclass
class Entry:
    """A request of the journal."""

    id: str
    run: str
    seq: int
    kind: str
    body: bytes | None
    size: int
    created: float
    round: int | None = None
    state: str = "queued"
    tokens: int = 0  # of a pass
    alone: bool = False  # not written: it is computed in a round of its own
    arrived: float = field(default_factory=time.monotonic)  # not written


@dataclass(frozen=True)
class Outcome:
    """What a client gets for a request: JSON or protobuf bytes; of a failed one its JSON says why."""

    result: bytes
    media: str = "application/json"
    failed: bool = False


def find(request_id: str) -> Callable[[sqlite3.Connection], tuple[str, str, Outcome | None] | None]:
    """The digest and state of a request, and its outcome if it is known and still kept."""

    def run(db: sqlite3.Connection) -> tuple[str, str, Outcome | None] | None:
        row = db.execute("SELECT digest, state, result, media FROM requests WHERE id = ?", [request_id]).fetchone()
        if row is None:
            return None
        digest, state, result, media = row
        return digest, state, None if result is None else Outcome(result, media, state == "failed")

    return run


def accept(entry: Entry, digest: str) -> Job:
    """Writes a new request."""
    values = {name: getattr(entry, name) for name in ("id", "run", "seq", "kind", "size", "tokens", "created", "state")}
    names, marks = ", ".join(["digest", *values]), ", ".join("?" * (1 + len(values)))
    body = entry.body

    def write(db: sqlite3.Connection) -> None:
        db.execute(f"INSERT INTO requests ({names}) VALUES ({marks})", [digest, *values.values()])
        db.execute("INSERT INTO bodies VALUES (?, ?)", (entry.id, body))

    return write


def begin_round(number: int, ids: Sequence[str]) -> Job:
    """Records which requests are carried out together, in their order."""
    rows = [(number, place, each) for place, each in enumerate(ids)]
    return lambda db: db.executemany("UPDATE requests SET round = ?, place = ? WHERE id = ?", rows)


def finish(request_id: str, run: str, next_seq: int, outcome: Outcome, now: float) -> Job:
    """Records the outcome of a request, and that its run has come so far."""

    def write(db: sqlite3.Connection) -> None:
        db.execute(
            "UPDATE requests SET state = ?, result = ?, media = ?, finished = ? WHERE id = ?",
            ("failed" if outcome.failed else "done", outcome.result, outcome.media, now, request_id),
        )
        db.execute("UPDATE runs SET next_seq = MAX(next_seq, ?), last_request = ? WHERE id = ?", (next_seq, now, run))

    return write


def withdraw(request_ids: Sequence[str]) -> Job:
    """Takes requests out of their rounds, so that no replay carries them out."""
    rows = [(each,) for each in request_ids]
    return lambda db: db.executemany("UPDATE requests SET round = NULL, place = NULL WHERE id = ?", rows)


def body_of(request_id: str) -> Callable[[sqlite3.Connection], bytes]:
    """The body of a request that is not covered by a snapshot."""
    return lambda db: db.execute("SELECT body FROM bodies WHERE request = ?", [request_id]).fetchone()["body"]


def snapshot_taken(run: str, seq: int, directory: str) -> Job:
    """Records a snapshot, and forgets the bodies that no replay can need: those of rounds that snapshots cover for all runs."""

    def write(db: sqlite3.Connection) -> None:
        db.execute("UPDATE runs SET snapshot_seq = ?, snapshot = ? WHERE id = ?", (seq, directory, run))
        forget_covered(db)

    return write


def forget_covered(db: sqlite3.Connection) -> None:
    """Removes the bodies of finished requests that no replay can need."""
    needed = f"{ROUNDS} (requests.state = 'queued' OR (runs.state = 'live' AND seq > snapshot_seq))"
    covered = f"state != 'queued' AND (round IS NULL OR round NOT IN ({needed}))"
    db.execute(
        f"DELETE FROM bodies WHERE request IN (SELECT id FROM bodies JOIN requests ON id = request WHERE {covered})"
    )


def forget_old(before: float, before_fetched: float) -> Job:
    """Removes results that were fetched, or that nobody fetched for long; and requests of ended runs."""

    def write(db: sqlite3.Connection) -> None:
        db.execute(
            "UPDATE requests SET result = NULL WHERE (fetched < ? OR finished < ?) AND result IS NOT NULL",
            (before_fetched, before),
        )
        db.execute(
            "DELETE FROM requests WHERE result IS NULL AND finished < ? AND id NOT IN (SELECT request FROM bodies)",
            (before,),
        )
        forget_covered(db)

    return write


def fetched(request_id: str, now: float) -> Job:
    """Records that a client got the result."""
    return lambda db: db.execute("UPDATE requests SET fetched = ? WHERE id = ?", (now, request_id))


def last_round(db: sqlite3.Connection) -> int:
    """The highest number of a round."""
    return int(db.execute("SELECT COALESCE(MAX(round), 0) FROM requests").fetchone()[0])


def rounds_to_replay(db: sqlite3.Connection) -> list[list[Entry]]:
    """The rounds of which at least one request is unfinished or later than its run's snapshot, in their order, without bodies."""
    needed = f"{ROUNDS} runs.state IN ('new', 'live') AND (requests.state = 'queued' OR seq > snapshot_seq)"
    sql = f"SELECT {MEMBERS} FROM requests WHERE round IN ({needed}) ORDER BY round, place"
    rounds = grouped_by(db.execute(sql), lambda row: int(row["round"]))
    return [[Entry(**dict(row)) for row in rows] for rows in rounds.values()]


def waiting(db: sqlite3.Connection) -> list[Entry]:
    """The requests that wait for their round, without bodies."""
    rows = db.execute(f"SELECT {MEMBERS} FROM requests WHERE state = 'queued' AND round IS NULL ORDER BY run, seq")
    return [Entry(**dict(row)) for row in rows]

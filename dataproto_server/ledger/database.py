"""The server's SQLite database: one connection, one thread, and one commit to disk for all writes that wait."""

import asyncio
import logging
import os
import queue
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from dataproto.errors import DataProtoError, FileFormatError

log = logging.getLogger("dataproto.serve")
Result = TypeVar("Result")
Job = tuple[Callable[[sqlite3.Connection], Any], "Future[Any]"]
VERSION = 3
PAGE_BYTES = 16_384  # bodies of some megabytes take half the time that they take in pages of the default size
OF_THE_DISK = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN)
HELD = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
HELD_SECONDS = 1.0  # for which a commit waits while another program holds the database
RETRY_SECONDS = 1.0  # between tries to write
DISK_SECONDS = 30.0  # for which `Database.keep` tries
SCHEMA = """
CREATE TABLE sessions (
    id TEXT PRIMARY KEY, owner TEXT, created REAL, state TEXT, project TEXT, display_name TEXT, metadata TEXT, tags TEXT);
CREATE TABLE runs (
    id TEXT PRIMARY KEY, number INTEGER, session TEXT, owner TEXT, base_model TEXT, lora TEXT, metadata TEXT, created REAL,
    last_request REAL, state TEXT, next_seq INTEGER, snapshot_seq INTEGER, snapshot TEXT);
CREATE TABLE requests (
    id TEXT PRIMARY KEY, run TEXT, seq INTEGER, kind TEXT, digest TEXT, size INTEGER, tokens INTEGER, created REAL,
    round INTEGER, place INTEGER, state TEXT, result BLOB, media TEXT, finished REAL, fetched REAL);
CREATE TABLE bodies (request TEXT PRIMARY KEY, body BLOB);
CREATE UNIQUE INDEX request_numbers ON requests (run, seq);
CREATE INDEX request_rounds ON requests (round) WHERE round IS NOT NULL;
CREATE TABLE checkpoints (
    run TEXT, kind TEXT, name TEXT, owner TEXT, directory TEXT, created REAL, expires REAL, public INTEGER, size INTEGER,
    metadata TEXT, PRIMARY KEY (run, kind, name));
CREATE TABLE samplers (
    id TEXT PRIMARY KEY, session TEXT, owner TEXT, run TEXT, base_model TEXT, model_path TEXT, directory TEXT, own INTEGER,
    digest TEXT, created REAL, moving INTEGER, joined INTEGER);
"""


class Answer(NamedTuple):
    """What a function has returned or raised."""

    result: Any = None
    problem: BaseException | None = None


class NotWritten(DataProtoError):
    """The database could not be written for some time: its disk is full or fails, or another program holds it."""


class Obstacle(NamedTuple):
    """What the server cannot write to, why, and what helps."""

    place: str
    reason: str
    way_out: str


def obstacle(error: BaseException | None) -> Obstacle | None:
    """Why SQLite failed, if it is the disk or another program. Any other error is a fault of this program.

    >>> obstacle(ValueError("of a fault")) is None
    True
    """
    code: int | None = getattr(error, "sqlite_errorcode", None)
    primary = None if code is None else code & 0xFF  # without what details it
    if primary in OF_THE_DISK:
        return Obstacle("its disk", str(error), "make room, or repair the disk of --state")
    if primary in HELD:
        return Obstacle("its database", f"another program holds it ({error})", "end that program")
    return None


class Database:
    """Runs functions of a connection in the order in which they come; each sees the writes of those before it.

    A function that raises changes nothing. `run` returns when what the function wrote is on disk.
    """

    def __init__(self, path: Path) -> None:
        """Opens or makes the database. Raises `FileFormatError` for one of another version."""
        self._unwritten: list[Callable[[sqlite3.Connection], Any]] = []
        self._jobs: queue.Queue[Job | None] = queue.Queue()
        self._later: deque[Job] = deque()
        ready: Future[None] = Future()
        self._thread = threading.Thread(target=self._work, args=(path, ready), name="database")
        self._thread.start()
        ready.result()

    async def run(self, function: Callable[[sqlite3.Connection], Result]) -> Result:
        """The result of a function, after the commit."""
        return await asyncio.wrap_future(self._submit(function))

    async def keep(self, function: Callable[[sqlite3.Connection], Any]) -> None:
        """Runs a function that writes what may not be lost: it is tried again for some time if the disk is full or fails,
        or if another program holds the database.

        Raises:
            NotWritten: it could not be written for that time.
        """
        began = time.monotonic()
        while True:
            try:
                await self.run(function)
                return
            except sqlite3.OperationalError as error:
                found = obstacle(error)
                if found is None:
                    raise
                if time.monotonic() - began >= DISK_SECONDS:
                    raise NotWritten(
                        f"the server could not write to {found.place} for {DISK_SECONDS:g} s: {found.reason}; "
                        f"{found.way_out}, and send the request again"
                    ) from error
                log.warning("the database cannot be written, and is tried again: %s", error)
                await asyncio.sleep(RETRY_SECONDS)

    def write_eventually(self, function: Callable[[sqlite3.Connection], Any]) -> None:
        """Tries a function in each later commit, and every `RETRY_SECONDS`, until it has succeeded once.

        One that fails by a fault of the program is dropped.
        """
        self._unwritten.append(function)
        self.post(lambda connection: None)

    def run_now(self, function: Callable[[sqlite3.Connection], Result]) -> Result:
        """The same for callers without an event loop."""
        return self._submit(function).result()

    def post(self, function: Callable[[sqlite3.Connection], Any]) -> None:
        """Runs a function without waiting for it."""
        self._submit(function)

    def later(self, function: Callable[[sqlite3.Connection], Any]) -> None:
        """Runs a function before the next one that is given to the other methods, in its commit. A kill may lose it."""
        self._later.append((function, Future()))

    def close(self) -> None:
        """Waits for all functions, and closes the database."""
        self.post(lambda connection: None)  # with those that wait for another one
        self._jobs.put(None)
        self._thread.join()

    def _submit(self, function: Callable[[sqlite3.Connection], Result]) -> "Future[Result]":
        done: Future[Result] = Future()
        self._jobs.put((function, done))
        return done

    def _work(self, path: Path, ready: "Future[None]") -> None:
        try:
            connection = _open(path)
        except BaseException as error:
            ready.set_exception(error)
            return
        ready.set_result(None)
        try:
            while (jobs := self._next()) is not None:
                again: list[Job] = [(function, Future()) for function in self._unwritten]
                together = [*again, *jobs]
                for _, done in together:
                    done.set_running_or_notify_cancel()  # it can no longer be cancelled
                _tell(together, _commit(connection, together))
                for function, done in again:
                    problem = done.exception()
                    if obstacle(problem) is not None:
                        continue
                    self._unwritten.remove(function)
                    if problem is not None:
                        log.error("a write fails, and is not tried again", exc_info=problem)
        except BaseException:
            log.critical(
                "the database thread failed: the process ends, and its supervisor starts it again", exc_info=True
            )
            os._exit(1)  # without this thread all requests would wait for ever
        connection.close()

    def _next(self) -> list[Job] | None:
        """All jobs that wait, at least one unless something unwritten is to be tried again; ``None`` at the end."""
        try:
            first = self._jobs.get(timeout=RETRY_SECONDS if self._unwritten else None)
        except queue.Empty:
            return []
        if first is None:
            return None
        jobs = [self._later.popleft() for _ in range(len(self._later))]
        jobs.append(first)
        while not self._jobs.empty():
            job = self._jobs.get()
            if job is None:
                self._jobs.put(None)
                break
            jobs.append(job)
        return jobs


def _open(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, isolation_level=None)
    connection.row_factory = sqlite3.Row
    connection.execute(f"PRAGMA page_size={PAGE_BYTES}")  # of a new file
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=FULL")
    connection.execute("PRAGMA journal_size_limit=67108864")
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version not in (0, VERSION):
        raise FileFormatError(f"{path} was written by another version of this program: choose another --state")
    if version == 0:
        connection.executescript(f"BEGIN; {SCHEMA} PRAGMA user_version={VERSION}; COMMIT;")
    _wait_at_most(connection, HELD_SECONDS)
    return connection


def _wait_at_most(connection: sqlite3.Connection, seconds: float) -> None:
    """Sets how long a statement waits while another program holds the database."""
    connection.execute(f"PRAGMA busy_timeout={round(1000 * seconds)}")


def _commit(connection: sqlite3.Connection, jobs: list[Job]) -> list[Answer]:
    """The result or error of each function, after the commit of all. If nothing could be written, each has one of its own:
    those that read, or for which there is room, do not fail.
    """
    try:
        return _written(connection, jobs)
    except sqlite3.Error as error:  # a full disk, say
        if connection.in_transaction:  # SQLite rolls back by itself at some errors
            connection.execute("ROLLBACK")
        if len(jobs) == 1:
            return [Answer(problem=error)]
        return [answer for job in jobs for answer in _commit(connection, [job])]


def _written(connection: sqlite3.Connection, jobs: list[Job]) -> list[Answer]:
    """Begins with the right to write, for which it waits. Without it functions that write fail, with no wait for each."""
    try:
        connection.execute("BEGIN IMMEDIATE")
    except sqlite3.OperationalError:
        _wait_at_most(connection, 0)
        connection.execute("BEGIN")
    try:
        return _results(connection, jobs)
    finally:
        _wait_at_most(connection, HELD_SECONDS)


def _tell(jobs: Sequence[Job], answers: Sequence[Answer]) -> None:
    """Gives answers to who waits for them."""
    for (_, done), answer in zip(jobs, answers):
        if done.cancelled():  # its function has run all the same
            continue
        if answer.problem is not None:
            done.set_exception(answer.problem)
        else:
            done.set_result(answer.result)


def _results(connection: sqlite3.Connection, jobs: list[Job]) -> list[Answer]:
    answers: list[Answer] = []
    for function, _ in jobs:
        connection.execute("SAVEPOINT job")
        try:
            answers.append(Answer(function(connection)))
        except BaseException as error:
            if not connection.in_transaction:  # the writes of the functions before this one are lost too
                raise
            connection.execute("ROLLBACK TO job")
            answers.append(Answer(problem=error))
        connection.execute("RELEASE job")
    connection.execute("COMMIT")
    return answers

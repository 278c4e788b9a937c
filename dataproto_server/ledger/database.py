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

from dataproto.errors import FileFormatError

log = logging.getLogger("dataproto.serve")
Result = TypeVar("Result")
Job = tuple[Callable[[sqlite3.Connection], Any], "Future[Any]"]
VERSION = 3
PAGE_BYTES = 16_384  # bodies of some megabytes take half the time that they take in pages of the default size
OBSTACLES = {  # what passes by itself or can be mended: errors of SQLite, and the way out
    **dict.fromkeys(
        (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN),
        "make room, or repair the disk of --state",
    ),
    **dict.fromkeys((sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED), "end the other program that holds it"),
}
RETRY_SECONDS = 1.0  # between tries to write
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
    problem: Exception | None = None


class Database:
    """Runs functions of a connection in the order in which they come; each sees the writes of those before it.

    A function that raises changes nothing. `run` returns when what the function wrote is on disk. While the disk is full or
    fails, or another program holds the database, all functions wait, and the log says for what.
    """

    def __init__(self, path: Path) -> None:
        """Opens or makes the database. Raises `FileFormatError` for one of another version."""
        self._jobs: queue.Queue[Job | None] = queue.Queue()
        self._later: deque[Job] = deque()
        ready: Future[None] = Future()
        self._thread = threading.Thread(target=self._work, args=(path, ready), name="database")
        self._thread.start()
        ready.result()

    async def run(self, function: Callable[[sqlite3.Connection], Result]) -> Result:
        """The result of a function, after the commit."""
        return await asyncio.wrap_future(self._submit(function))

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
                for _, done in jobs:
                    done.set_running_or_notify_cancel()  # it can no longer be cancelled
                _tell(jobs, _commit(connection, jobs))
        except BaseException:
            log.critical(
                "the database thread failed: the process ends, and its supervisor starts it again", exc_info=True
            )
            os._exit(1)  # without this thread all requests would wait for ever
        connection.close()

    def _next(self) -> list[Job] | None:
        """All jobs that wait, at least one; ``None`` at the end."""
        first = self._jobs.get()
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
    return connection


def _commit(connection: sqlite3.Connection, jobs: Sequence[Job]) -> list[Answer]:
    """The result or error of each function, after the commit of all, for which it waits as long as there is an obstacle."""
    while True:
        try:
            return _answers(connection, jobs)
        except sqlite3.OperationalError as error:
            if (way_out := _way_out(error)) is None:
                raise
            log.error("the database cannot be written (%s), and requests wait: %s", error, way_out)
            if connection.in_transaction:  # SQLite rolls back by itself at some errors
                connection.execute("ROLLBACK")
            time.sleep(RETRY_SECONDS)


def _way_out(error: Exception) -> str | None:
    """What lets the database be written again; ``None`` for a fault of this program."""
    return OBSTACLES.get(getattr(error, "sqlite_errorcode", 0) & 0xFF)  # without what details the error


def _answers(connection: sqlite3.Connection, jobs: Sequence[Job]) -> list[Answer]:
    connection.execute("BEGIN IMMEDIATE")  # with the right to write
    answers: list[Answer] = []
    for function, _ in jobs:
        connection.execute("SAVEPOINT job")
        try:
            answers.append(Answer(function(connection)))
        except Exception as error:
            if _way_out(error) is not None:
                raise
            connection.execute("ROLLBACK TO job")
            answers.append(Answer(problem=error))
        connection.execute("RELEASE job")
    connection.execute("COMMIT")
    return answers


def _tell(jobs: Sequence[Job], answers: Sequence[Answer]) -> None:
    """Gives answers to who waits for them."""
    for (_, done), answer in zip(jobs, answers):
        if done.cancelled():  # its function has run all the same
            continue
        if answer.problem is not None:
            done.set_exception(answer.problem)
        else:
            done.set_result(answer.result)

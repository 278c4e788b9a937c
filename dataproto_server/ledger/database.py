"""The server's SQLite database: one connection, one thread, and one commit to disk for all writes that wait."""

import asyncio
import logging
import os
import sqlite3
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

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


class Database:
    """Runs functions of a connection in the order in which they come; each sees the writes of those before it.

    A function that raises changes nothing. `run` returns when what the function wrote is on disk. While the disk is full or
    fails, or another program holds the database, all functions wait, and the log says for what.
    """

    def __init__(self, path: Path) -> None:
        """Opens or makes the database. Raises `FileFormatError` for one of another version."""
        self._connection = _open(path)
        self._jobs: deque[Job] = deque()
        self._thread = ThreadPoolExecutor(1, "database")

    async def run(self, function: Callable[[sqlite3.Connection], Result]) -> Result:
        """The result of a function, after the commit."""
        return await asyncio.wrap_future(self.post(function))

    def run_now(self, function: Callable[[sqlite3.Connection], Result]) -> Result:
        """The same for callers without an event loop."""
        return self.post(function).result()

    def post(self, function: Callable[[sqlite3.Connection], Result]) -> "Future[Result]":
        """Runs a function without waiting for it."""
        done = self.later(function)
        self._thread.submit(self._work)
        return done

    def later(self, function: Callable[[sqlite3.Connection], Result]) -> "Future[Result]":
        """Runs a function before the next one that is given to the other methods, in its commit. A kill may lose it."""
        done: Future[Result] = Future()
        self._jobs.append((function, done))
        return done

    def close(self) -> None:
        """Waits for all functions, and closes the database."""
        self._thread.submit(self._work)  # for those that wait for another one
        self._thread.shutdown()
        self._connection.close()

    def _work(self) -> None:
        """Runs all functions that wait: there are none if they were in the commit of an earlier one."""
        try:
            jobs = [self._jobs.popleft() for _ in range(len(self._jobs))]
            for _, done in jobs:
                done.set_running_or_notify_cancel()  # it can no longer be cancelled
            if jobs:
                _tell(jobs, _commit(self._connection, jobs))
        except BaseException:
            log.critical(
                "the database thread failed: the process ends, and its supervisor starts it again", exc_info=True
            )
            os._exit(1)  # without this thread all requests would wait for ever


def _open(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
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


def _commit(connection: sqlite3.Connection, jobs: Sequence[Job]) -> list[Any]:
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


def _answers(connection: sqlite3.Connection, jobs: Sequence[Job]) -> list[Any]:
    connection.execute("BEGIN IMMEDIATE")  # with the right to write
    answers: list[Any] = []
    for function, _ in jobs:
        connection.execute("SAVEPOINT job")
        try:
            answers.append(function(connection))
        except Exception as error:
            if _way_out(error) is not None:
                raise
            connection.execute("ROLLBACK TO job")
            answers.append(error)
        connection.execute("RELEASE job")
    connection.execute("COMMIT")
    return answers


def _tell(jobs: Sequence[Job], answers: Sequence[Any]) -> None:
    """Gives answers to who waits for them."""
    for (_, done), answer in zip(jobs, answers, strict=True):
        if done.cancelled():  # its function has run all the same
            continue
        if isinstance(answer, Exception):
            done.set_exception(answer)
        else:
            done.set_result(answer)

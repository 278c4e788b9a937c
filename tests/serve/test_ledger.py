"""What is on disk: commits, whole directories, and what a replay finds."""

import asyncio
import os
import sqlite3
import threading
import time
from contextlib import closing, contextmanager, suppress

import pytest

from dataproto.errors import CheckpointError
from dataproto_server.ledger import journal
from dataproto_server.ledger.database import Database
from dataproto_server.ledger.directories import (
    check_directory,
    checked_name,
    link_files,
    new_directory,
    remove_unfinished,
)
from dataproto_server.ledger.journal import Entry, Outcome
from dataproto_server.ledger.records import Run, everything, put
from dataproto_server.refusals import InvalidRequest


@pytest.fixture
def database(tmp_path):
    database = Database(tmp_path / "db")
    yield database
    database.close()


def run_of(name: str, number: int) -> Run:
    return Run(
        id=name,
        number=number,
        session="s",
        owner="o",
        base_model="m",
        lora=None,
        metadata="{}",
        created=number,
        last_request=0,
        state="live",
    )


def accept(database: Database, run: str, seq: int, round: int | None = None, place: int = 0) -> str:
    name = f"{run}:{seq}"
    database.run_now(journal.accept(Entry(name, run, seq, "pass", b"body", 4, 0.0), "digest"))
    if round is not None:
        database.run_now(
            lambda db: db.execute("UPDATE requests SET round = ?, place = ? WHERE id = ?", (round, place, name))
        )
    return name


def test_a_function_that_fails_changes_nothing_and_the_others_of_its_commit_stay(database):
    def fail(db):
        put(run_of("bad", 2))(db)
        raise ValueError("no")

    async def drive():
        jobs = [database.run(put(run_of("a", 1))), database.run(fail), database.run(put(run_of("c", 3)))]
        return await asyncio.gather(*jobs, return_exceptions=True)

    assert isinstance(asyncio.run(drive())[1], ValueError)
    assert [run.id for run in database.run_now(everything(Run))] == ["a", "c"]


def test_a_caller_that_has_gone_leaves_the_database_at_work(database):
    async def drive():
        going = [asyncio.create_task(database.run(put(run_of(f"r{number}", number)))) for number in range(200)]
        await asyncio.sleep(0)
        for each in going:
            each.cancel()
        await asyncio.gather(*going, return_exceptions=True)
        return await database.run(everything(Run))

    assert len(asyncio.run(asyncio.wait_for(drive(), 60))) == 200


def disk_full() -> sqlite3.OperationalError:
    """SQLite's own error."""
    with sqlite3.connect(":memory:") as small:
        small.execute("PRAGMA max_page_count = 1")
        try:
            small.execute("CREATE TABLE a (b)")
        except sqlite3.OperationalError as error:
            return error
    raise AssertionError("there was room")


def full_until(room):
    def write(job):
        def function(db):
            if not room.is_set():
                raise disk_full()
            return job(db)

        return function

    return write


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr("dataproto_server.ledger.database.RETRY_SECONDS", 0.05)


def roll_back_until(room):
    """As SQLite rolls back by itself where the disk is full."""

    def write(job):
        def function(db):
            if not room.is_set():
                db.execute("ROLLBACK")
            return full_until(room)(job)(db)

        return function

    return write


@pytest.mark.parametrize("disk", [full_until, roll_back_until])
def test_writes_wait_for_room_on_the_disk_and_keep_their_order(database, disk, caplog):
    room = threading.Event()

    async def drive():
        jobs = [put(run_of("a", 1)), disk(room)(put(run_of("b", 2))), put(run_of("c", 3))]
        writes = [asyncio.create_task(database.run(each)) for each in jobs]
        while (
            "the database cannot be written (database or disk is full), and requests wait: make room" not in caplog.text
        ):
            await asyncio.sleep(0.01)
        assert not any(each.done() for each in writes[1:])
        room.set()
        await asyncio.gather(*writes)
        return await database.run(everything(Run))

    assert [run.id for run in asyncio.run(asyncio.wait_for(drive(), 60))] == ["a", "b", "c"]


@contextmanager
def held(path):
    """Another program has changed something in the database, and has not committed it."""
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        yield other
        if other.in_transaction:
            other.execute("ROLLBACK")


def test_writes_wait_for_another_program(database, tmp_path, caplog):
    database.run_now(lambda db: db.execute("PRAGMA busy_timeout=10"))

    async def drive():
        with held(tmp_path / "db") as other:
            write = asyncio.create_task(database.run(put(run_of("a", 1))))
            while "end the other program that holds it" not in caplog.text:
                await asyncio.sleep(0.01)
            other.execute("ROLLBACK")
            await write
        return await database.run(everything(Run))

    assert [run.id for run in asyncio.run(asyncio.wait_for(drive(), 60))] == ["a"]


def test_what_another_program_writes_after_a_read_does_not_fail_a_write(database, tmp_path):
    """Both are in one commit, which would see the database as it was at the read."""
    with closing(sqlite3.connect(tmp_path / "db", isolation_level=None, timeout=0.1, check_same_thread=False)) as other:

        def read_and_let_other_write(db):
            found = db.execute("SELECT * FROM runs").fetchall()
            with suppress(sqlite3.OperationalError):
                other.execute("DELETE FROM runs WHERE id = 'absent'")
                other.execute("INSERT INTO bodies VALUES ('other', NULL)")
            return found

        hold = threading.Event()
        database.post(lambda db: hold.wait())
        database.post(read_and_let_other_write)
        written = database.post(put(run_of("a", 1)))
        hold.set()
        written.result()


def test_an_error_that_is_not_of_the_disk_is_raised_at_once(database):
    with pytest.raises(sqlite3.OperationalError, match="no such table"):
        database.run_now(lambda db: db.execute("DELETE FROM absent"))


def test_the_process_ends_with_its_database_thread(database, monkeypatch):
    ended = threading.Event()
    monkeypatch.setattr("dataproto_server.ledger.database.os._exit", lambda status: ended.set())
    database.post(lambda db: db.close())
    assert ended.wait(60)


def test_old_results_are_forgotten_once(database):
    database.run_now(put(run_of("a", 1)))
    name = accept(database, "a", 1, 1)
    database.run_now(journal.finish(name, "a", 2, Outcome(b"result"), 100.0))

    def changes(db):
        before = db.total_changes
        journal.forget_old(200.0, 50.0)(db)
        return db.total_changes - before

    assert database.run_now(changes) > 0
    assert database.run_now(changes) == 0


def bodies(database: Database) -> set[str]:
    return {row["id"] for row in database.run_now(lambda db: db.execute("SELECT request AS id FROM bodies").fetchall())}


def test_a_body_is_kept_as_long_as_a_run_of_its_turn_may_need_it(database):
    for number, name in enumerate("ab"):
        database.run_now(put(run_of(name, number)))
    first, other, second = accept(database, "a", 1, 1), accept(database, "b", 1, 1, 1), accept(database, "a", 2, 2)
    waits = accept(database, "a", 3)
    for name in (first, other, second):
        database.run_now(journal.finish(name, name[0], int(name[2:]) + 1, Outcome(b"result"), time.time()))
    database.run_now(journal.snapshot_taken("a", 2, "directory"))
    assert bodies(database) == {first, other, waits}  # b has no snapshot: its round is computed again with a's pass
    (round,) = database.run_now(journal.rounds_to_replay)
    assert [entry.id for entry in round] == [first, other]
    assert [entry.id for entry in database.run_now(journal.waiting)] == [waits]
    database.run_now(journal.snapshot_taken("b", 1, "directory"))
    assert bodies(database) == {waits}
    assert database.run_now(journal.rounds_to_replay) == []
    assert database.run_now(journal.find(first)) == ("digest", "done", Outcome(b"result"))


def test_results_go_when_they_are_old_and_an_ended_run_leaves_nothing(database):
    run = run_of("a", 1)
    database.run_now(put(run))
    name = accept(database, "a", 1, 1)
    database.run_now(journal.finish(name, "a", 2, Outcome(b"result"), 100.0))
    run.state = "ended"
    database.run_now(put(run))
    database.run_now(journal.forget_old(50.0, 50.0))
    assert database.run_now(journal.find(name))[2] == Outcome(b"result")
    database.run_now(journal.forget_old(200.0, 50.0))
    assert database.run_now(journal.find(name)) is None


def test_a_directory_is_whole_or_absent(tmp_path):
    target = tmp_path / "runs" / "one"

    async def write(text: str, fail: bool = False):
        async with new_directory(target) as directory:
            (directory / "weights").write_text(text)
            if fail:
                raise OSError("disk full")

    asyncio.run(write("a"))
    check_directory(target)
    with pytest.raises(OSError, match="disk full"):
        asyncio.run(write("b", fail=True))
    assert (target / "weights").read_text() == "a"
    asyncio.run(write("c"))
    assert (target / "weights").read_text() == "c"
    assert os.listdir(target.parent) == ["one"]
    (target / "weights").write_text("changed")
    with pytest.raises(CheckpointError, match="weights has changed"):
        check_directory(target)
    (target.parent / ".new-left").mkdir()
    remove_unfinished(tmp_path)
    assert os.listdir(target.parent) == ["one"]
    copy = tmp_path / "copy"
    copy.mkdir()
    link_files(target, copy)
    assert os.listdir(copy) == ["weights"]


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "../a", "-a", "a\n", "a b", "a" * 129, "é", ".new-1", "a\0"])
def test_a_name_that_could_be_a_path_is_refused(name):
    with pytest.raises(InvalidRequest, match="name"):
        checked_name(name)

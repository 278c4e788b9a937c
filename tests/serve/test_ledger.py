"""What is on disk: commits, whole directories, and what a replay finds."""

import asyncio
import itertools
import os
import sqlite3
import threading
import time
from contextlib import closing, contextmanager, suppress

import pytest

from dataproto.errors import CheckpointError
from dataproto_server.ledger import journal
from dataproto_server.ledger.database import Database, NotWritten
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


def test_a_write_error_at_which_sqlite_rolls_back_fails_its_own_function_alone(database):
    busy = threading.Event()

    def roll_back(db):
        db.execute("ROLLBACK")  # as SQLite does by itself when the disk is full
        raise disk_full()

    async def drive():
        database.post(lambda db: busy.wait())
        jobs = [
            asyncio.create_task(database.run(each)) for each in (put(run_of("a", 1)), roll_back, put(run_of("c", 3)))
        ]
        await asyncio.sleep(0)  # the three are in one commit
        busy.set()
        found = await asyncio.gather(*jobs, return_exceptions=True)
        assert [None if each is None else type(each) for each in found[1:2]] == [sqlite3.OperationalError]
        assert not any(isinstance(each, Exception) for each in (found[0], found[2]))
        await database.run(put(run_of("d", 4)))

    asyncio.run(asyncio.wait_for(drive(), 60))
    assert [run.id for run in database.run_now(everything(Run))] == ["a", "c", "d"]


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


@pytest.fixture
def seconds(monkeypatch):
    """Sets for how long a write is tried."""

    def set_seconds(value: float) -> None:
        monkeypatch.setattr("dataproto_server.ledger.database.DISK_SECONDS", value)

    monkeypatch.setattr("dataproto_server.ledger.database.RETRY_SECONDS", 0.1)
    set_seconds(0.3)
    return set_seconds


def test_a_write_that_may_not_be_lost_fails_by_name_after_a_time(database, seconds):
    room = threading.Event()
    write = full_until(room)

    async def drive():
        began = time.monotonic()
        with pytest.raises(NotWritten, match=r"for 0.3 s: database or disk is full"):
            await database.keep(write(put(run_of("a", 1))))
        assert 0.3 <= time.monotonic() - began < 5
        database.write_eventually(write(put(run_of("late", 3))))
        await database.run(put(run_of("c", 4)))
        assert [run.id for run in await database.run(everything(Run))] == ["c"]
        room.set()
        await database.keep(write(put(run_of("d", 5))))
        assert sorted(run.id for run in await database.run(everything(Run))) == ["c", "d", "late"]
        assert database._unwritten == []

    asyncio.run(asyncio.wait_for(drive(), 60))


def test_what_is_to_be_written_eventually_is_tried_while_nothing_else_is(database, seconds, tmp_path):
    room = threading.Event()
    database.write_eventually(full_until(room)(put(run_of("late", 1))))
    time.sleep(0.3)
    room.set()
    latest = time.monotonic() + 60
    with sqlite3.connect(tmp_path / "db") as other:
        while not (found := other.execute("SELECT id FROM runs").fetchall()) and time.monotonic() < latest:
            time.sleep(0.01)
    assert found == [("late",)]


def test_what_cannot_be_written_on_any_disk_is_dropped_with_a_word_in_the_log(database, seconds, caplog):
    database.write_eventually(lambda db: db.execute("DELETE FROM absent"))
    database.run_now(put(run_of("a", 1)))
    database.run_now(everything(Run))
    assert database._unwritten == []
    assert [(each.message, "no such table" in str(each.exc_info[1])) for each in caplog.records] == [
        ("a write fails, and is not tried again", True)
    ]


def test_a_write_for_which_there_is_no_room_fails_while_others_succeed(database, seconds):
    async def drive():
        async def others():
            for number in itertools.count():
                await database.keep(put(run_of(f"r{number}", number)))
                await asyncio.sleep(0.02)

        busy = asyncio.create_task(others())
        with pytest.raises(NotWritten, match=r"for 0.3 s: database or disk is full"):
            await asyncio.wait_for(database.keep(full_until(threading.Event())(put(run_of("big", -1)))), 20)
        busy.cancel()

    asyncio.run(drive())


@contextmanager
def held(path):
    """Another program has changed something in the database, and has not committed it."""
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        yield other
        if other.in_transaction:
            other.execute("ROLLBACK")


def test_writes_wait_once_for_another_program_and_fail_by_name_while_reads_do_not(
    database, seconds, tmp_path, monkeypatch
):
    monkeypatch.setattr("dataproto_server.ledger.database.HELD_SECONDS", 0.5)
    database.run_now(lambda db: db.execute("PRAGMA busy_timeout=500"))

    async def drive():
        with held(tmp_path / "db"):
            began = time.monotonic()
            writes = [database.run(put(run_of(f"r{number}", number))) for number in range(20)]
            *problems, found = await asyncio.gather(*writes, database.run(everything(Run)), return_exceptions=True)
            assert time.monotonic() - began < 5  # not 20 times
            assert {str(each) for each in problems} == {"database is locked"}
            assert found == []
            told = r"to its database for 0.3 s: another program holds it \(database is locked\); end that program, and send"
            with pytest.raises(NotWritten, match=told):
                await database.keep(put(run_of("a", 1)))
        assert await database.run(everything(Run)) == []

    asyncio.run(asyncio.wait_for(drive(), 60))


def test_a_write_that_may_not_be_lost_waits_for_another_program(database, seconds, tmp_path, caplog):
    seconds(60)

    async def drive():
        with held(tmp_path / "db") as other:
            write = asyncio.create_task(database.keep(put(run_of("a", 1))))
            while "tried again" not in caplog.text:
                await asyncio.sleep(0.01)
            other.execute("ROLLBACK")
            await write
        assert [run.id for run in await database.run(everything(Run))] == ["a"]

    asyncio.run(asyncio.wait_for(drive(), 60))


def test_what_another_program_has_written_behind_a_read_does_not_fail_a_write(database, tmp_path):
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
        written = database._submit(put(run_of("a", 1)))
        hold.set()
        written.result()


def test_an_error_that_is_not_of_the_disk_is_raised_at_once(database, monkeypatch):
    monkeypatch.setattr("dataproto_server.ledger.database.DISK_SECONDS", 1e9)
    with pytest.raises(sqlite3.OperationalError, match="no such table"):
        asyncio.run(asyncio.wait_for(database.keep(lambda db: db.execute("DELETE FROM absent")), 20))


def test_a_database_larger_than_its_disk_fails_writes_and_lives(database):
    database.run_now(lambda db: db.execute("PRAGMA max_page_count = 60"))  # what SQLite takes for a full disk
    run = run_of("big", 1)
    run.metadata = "x" * 1_000_000
    with pytest.raises(sqlite3.OperationalError, match="full"):
        database.run_now(put(run))
    database.run_now(put(run_of("small", 2)))
    assert [run.id for run in database.run_now(everything(Run))] == ["small"]


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

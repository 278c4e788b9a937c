"""What writes files goes on beside the rounds of passes."""

import asyncio
import shutil
import sqlite3
import threading
from pathlib import Path

import pytest

from dataproto_server.backend import OPTIMIZER_FILE, Failure
from dataproto_server.engine_link import CallFailed
from dataproto_server.front import barriers, recovery
from dataproto_server.front.futures import PROTOBUF
from dataproto_server.front.service import DATABASE_FILE
from dataproto_server.ledger import directories
from dataproto_server.ledger.records import Run
from helpers.fronts import Front, drive, take_in, until
from helpers.vector_backend import ADAPTER_FILE, VectorBackend


async def beside_a_pass(front: Front):
    """A run, and the request of another run whose pass the engine has begun and does not end until ``gate`` is set."""
    a, b = [await front.new_run(name) for name in "ab"]
    front.backend.in_parts = True
    front.backend.gate.clear()
    passed = await front.submit(a, 1, 7)
    assert await asyncio.to_thread(front.backend.entered.wait, 60)
    return b, passed


def test_a_snapshot_for_a_sampler_does_not_wait_for_the_passes_of_others(tmp_path):
    """Nor does a checkpoint, and nor does the snapshot's first sample."""

    async def work(front: Front):
        b, passed = await beside_a_pass(front)
        made = await front.result(await front.request(b, 1, "save_for_sampler", sampling_session_seq_id=0))
        saved = await front.result(await front.request(b, 2, "save", path="kept"))
        assert saved["path"] == "tinker://b/weights/kept"
        sampler = front.service.catalogue.samplers[made["sampling_session_id"]]
        take_in(front, directory=sampler.directory)
        assert await front.service.futures.wait("k:1", 60) is not None
        later = await front.submit(b, 3, 8)
        assert front.backend.groups == []
        front.backend.gate.set()
        for request in (passed, later):
            assert (await front.result(request))["rows:sum"] == 1

    drive(work, tmp_path, snapshot_steps=100)


def test_the_rounds_go_on_while_the_snapshot_of_a_run_is_written(tmp_path):
    """It has the state behind its update, though the run goes on, and a replay starts from it."""
    told, writing = threading.Event(), threading.Event()

    def slowly(backend, model_id, directory, *, later, between):
        def write(work):
            writing.set()
            assert told.wait(60)
            work()

        VectorBackend.save(backend, model_id, directory, later=lambda work: later(lambda: write(work)))

    async def work(front: Front):
        front.backend.save = slowly.__get__(front.backend)
        run = await front.new_run("r")
        for seq, token in ((1, 7), (2, None), (3, 8), (4, None)):
            await front.result(await front.submit(run, seq, token))
        assert writing.is_set()
        assert run.snapshot is None
        weights = front.backend.models["r"].weights
        told.set()
        await until(lambda: run.snapshot is not None)
        assert run.snapshot_seq == 2
        fresh = await front.lose_engine()
        await until(lambda: "r" in fresh.models and fresh.groups == [["r"]] and fresh.models["r"].steps == 2)
        assert (fresh.models["r"].weights == weights).all()

    drive(work, tmp_path)


async def snapshot_of(front: Front, seq: int) -> str:
    """The directory of a snapshot for samplers, of a run that has made an update."""
    run = front.service.catalogue.runs.get("r") or await front.new_run("r")
    for number, token in ((seq, 7), (seq + 1, None)):
        await front.result(await front.submit(run, number, token))
    made = await front.result(await front.request(run, seq + 2, "save_for_sampler", sampling_session_seq_id=seq))
    return front.service.catalogue.samplers[made["sampling_session_id"]].directory


@pytest.mark.parametrize("damage", ["shorter", "missing"])
def test_a_snapshot_that_a_loss_of_power_has_damaged_is_written_again_as_it_was(tmp_path, damage):
    found = []

    async def before(front: Front):
        found.append(await snapshot_of(front, 1))
        await snapshot_of(front, 4)  # the run has gone on

    front = drive(before, tmp_path, snapshot_steps=100)
    front.engine.listener.close()
    file = tmp_path / found[0] / ADAPTER_FILE
    content = file.read_bytes()
    if damage == "missing":
        shutil.rmtree(file.parent)
    else:
        file.write_bytes(content[:10])

    async def after(front: Front):
        take_in(front, directory=found[0])
        assert (await front.service.futures.wait("k:1", 60)).media == PROTOBUF
        assert file.read_bytes() == content

    drive(after, tmp_path, snapshot_steps=100)


async def stepped(front: Front, run: Run, seq: int) -> None:
    """Behind a pass and an update."""
    await front.result(await front.submit(run, seq, 7))
    await front.result(await front.submit(run, seq + 1, None))


@pytest.fixture
def slow_disk(monkeypatch):
    """Snapshots for samplers reach the disk when it is told; the names of those that are on their way."""
    told, tried, sync = threading.Event(), [], directories.sync_directory

    def slowly(directory):
        tried.append(directory.name)
        assert told.wait(60)
        sync(directory)

    monkeypatch.setattr(directories, "sync_directory", slowly)
    monkeypatch.setattr(directories, "SYNC_AFTER_SECONDS", 0.0)
    yield told, tried
    told.set()


def test_a_run_has_no_snapshot_until_those_for_its_samplers_are_on_disk(tmp_path, slow_disk):
    """A replay that begins behind them could not write them again."""
    told, tried = slow_disk

    async def work(front: Front):
        run = await front.new_run("r")
        await stepped(front, run, 1)
        await until(lambda: run.snapshot is not None)
        await front.result(await front.request(run, 3, "save_for_sampler", sampling_session_seq_id=1))
        await stepped(front, run, 4)
        await until(lambda: (front.state / "runs/1/snapshot-5").exists())
        await front.result(await front.submit(run, 6, 7))
        await until(lambda: tried)
        assert run.snapshot_seq == 2
        told.set()
        await until(lambda: run.snapshot_seq == 5)
        assert tried == ["sampler-3"]

    drive(work, tmp_path)


def test_a_run_has_no_snapshot_behind_a_disk_that_has_failed(tmp_path, monkeypatch):
    """A second try would succeed and prove nothing. The journal keeps the requests, from which a replay writes the files."""
    tried = []

    def fails_once(directory):
        tried.append(directory.name)
        if len(tried) == 1:
            raise OSError("input/output error")

    monkeypatch.setattr(directories, "sync_directory", fails_once)

    async def work(front: Front):
        run = await front.new_run("r")
        await stepped(front, run, 1)
        await until(lambda: run.snapshot is not None)
        await front.result(await front.request(run, 3, "save_for_sampler", sampling_session_seq_id=1))
        await until(lambda: tried)
        await stepped(front, run, 4)
        await front.service.scheduler.settled()
        assert (run.snapshot_seq, tried) == (2, ["sampler-3"])
        weights = front.backend.models["r"].weights
        (tmp_path / "runs/1/sampler-3" / ADAPTER_FILE).unlink()
        fresh = await front.lose_engine()
        await front.result(await front.submit(run, 6, 7))
        assert (fresh.models["r"].weights == weights).all()
        assert (tmp_path / "runs/1/sampler-3" / ADAPTER_FILE).exists()

    drive(work, tmp_path)


@pytest.mark.parametrize("told", [True, False])
def test_a_later_process_trusts_no_snapshot_for_samplers_that_may_not_be_on_disk(tmp_path, monkeypatch, told):
    """The disk loses a file. Linux tells of it once at most, to a process that has ended, and then takes the file for written."""
    lost, sync, sampler = set(), directories._sync, tmp_path / "runs/1/sampler-1"

    def loses_the_first(path):
        if path == sampler / ADAPTER_FILE and not lost:
            lost.add(path.stat().st_ino)
            if told:
                raise OSError("input/output error")
        sync(path)

    monkeypatch.setattr(directories, "_sync", loses_the_first)

    async def before(front: Front):
        run = await front.new_run("r")
        await front.result(await front.request(run, 1, "save_for_sampler", sampling_session_seq_id=1))
        await until(lambda: lost)
        await stepped(front, run, 2)
        await front.service.scheduler.settled()
        assert run.snapshot is None

    drive(before, tmp_path, snapshot_steps=1 if told else 100).engine.listener.close()
    content = (sampler / ADAPTER_FILE).read_bytes()

    async def after(front: Front):
        run = front.service.catalogue.runs["r"]
        await stepped(front, run, 4)
        await until(lambda: run.snapshot_seq == 5)
        assert (sampler / ADAPTER_FILE).read_bytes() == content
        assert (sampler / ADAPTER_FILE).stat().st_ino not in lost

    drive(after, tmp_path)


def test_a_run_has_no_snapshot_while_the_disk_refuses_a_copy_of_those_for_its_samplers(tmp_path, monkeypatch):
    """The run itself goes on."""
    drive(lambda front: snapshot_of(front, 1), tmp_path, snapshot_steps=100).engine.listener.close()
    sync = directories._sync

    def refuses_samplers(path):
        if path.name == ADAPTER_FILE and not (path.parent / OPTIMIZER_FILE).exists():
            raise OSError("input/output error")
        sync(path)

    monkeypatch.setattr(directories, "_sync", refuses_samplers)

    async def after(front: Front):
        run = front.service.catalogue.runs["r"]
        await stepped(front, run, 4)
        await front.service.scheduler.settled()
        assert (run.state, run.snapshot) == ("live", None)

    drive(after, tmp_path)


def test_a_snapshot_that_the_disk_cannot_read_is_written_again(tmp_path, monkeypatch):
    drive(lambda front: snapshot_of(front, 1), tmp_path, snapshot_steps=100).engine.listener.close()
    file = next(tmp_path.glob("runs/1/sampler-*")) / ADAPTER_FILE
    content, unreadable = file.read_bytes(), file.stat().st_ino

    def refusing(read):
        def refuses(path, *arguments, **options):
            if path == file and path.stat().st_ino == unreadable:
                raise OSError("input/output error")
            return read(path, *arguments, **options)

        return refuses

    monkeypatch.setattr(Path, "open", refusing(Path.open))
    monkeypatch.setattr(shutil, "copyfile", refusing(shutil.copyfile))

    async def after(front: Front):
        run = front.service.catalogue.runs["r"]
        await stepped(front, run, 4)
        await front.service.scheduler.settled()
        assert run.snapshot_seq == 5
        assert (file.read_bytes(), file.stat().st_ino == unreadable) == (content, False)

    drive(after, tmp_path)


@pytest.mark.parametrize("begun", [True, False])
def test_a_server_stops_while_the_disk_is_slow_and_records_no_snapshot_behind_it(
    tmp_path, slow_disk, monkeypatch, begun
):
    told, tried = slow_disk
    if not begun:
        monkeypatch.setattr(directories, "SYNC_AFTER_SECONDS", 3600.0)

    async def stop():
        front = Front(tmp_path)
        front.service.start()
        run = await front.new_run("r")
        await front.result(await front.request(run, 1, "save_for_sampler", sampling_session_seq_id=1))
        if begun:
            await stepped(front, run, 2)
            await until(lambda: (tmp_path / "runs/1/snapshot-3").exists())
            await until(lambda: tried)
        assert bool(tried) == begun
        try:
            await asyncio.wait_for(front.service.stop(), 30)
        finally:
            told.set()
        assert run.snapshot is None

    asyncio.run(stop())


def test_a_sync_begins_at_once_when_somebody_waits_for_it(tmp_path, monkeypatch):
    monkeypatch.setattr(directories, "SYNC_AFTER_SECONDS", 3600.0)

    async def work():
        syncs = directories.Syncs()
        for _ in range(2):
            syncs.begin("r", tmp_path)
            await asyncio.wait_for(syncs.done("r"), 30)
        syncs.begin("r", tmp_path)
        await asyncio.sleep(0.1)  # without a call of `done` it does not begin
        assert syncs._tasks["r"]
        syncs.close()

    asyncio.run(work())


def test_all_who_wait_for_the_disk_wait_until_its_end(tmp_path, slow_disk):
    told, tried = slow_disk

    async def work():
        syncs = directories.Syncs()
        syncs.begin("r", tmp_path)
        waiting = [asyncio.create_task(syncs.done("r")) for _ in range(2)]
        await until(lambda: tried)
        done, _ = await asyncio.wait(waiting, timeout=0.1)
        assert not done
        told.set()
        await asyncio.gather(*waiting)

    asyncio.run(work())


def test_snapshots_of_many_runs_are_answered_before_the_first_is_brought_to_the_disk(tmp_path, monkeypatch):
    """A commit waits for what is being brought to the disk."""
    monkeypatch.setattr(directories, "SYNC_AFTER_SECONDS", 3600.0)
    synced = []
    monkeypatch.setattr(directories, "sync_directory", synced.append)

    async def work(front: Front):
        runs = [await front.new_run(name) for name in "abcd"]
        asked = [
            await front.request(run, 1, "save_for_sampler", sampling_session_seq_id=number)
            for number, run in enumerate(runs)
        ]
        answers = [await front.result(each) for each in asked]
        assert all("sampling_session_id" in each for each in answers)
        assert not synced
        monkeypatch.setattr(directories, "SYNC_AFTER_SECONDS", 0.0)
        await front.result(await front.request(runs[0], 2, "save_for_sampler", sampling_session_seq_id=4))
        await until(lambda: [each.name for each in synced] == ["sampler-2"])

    drive(work, tmp_path, snapshot_steps=100)


def test_the_second_of_two_saves_does_not_wait_for_the_passes_of_others(tmp_path):
    async def work(front: Front):
        b, passed = await beside_a_pass(front)
        saves = [await front.request(b, seq, "save", path=f"kept-{seq}") for seq in (1, 2)]
        try:
            for each in saves:
                assert "path" in await asyncio.wait_for(front.result(each), 20)
            assert front.backend.groups == []
        finally:
            front.backend.gate.set()
        await front.result(passed)

    drive(work, tmp_path, snapshot_steps=100)


def test_a_save_at_which_the_engine_ends_once_is_tried_again_by_the_next_engine(tmp_path):
    entered, told = threading.Event(), threading.Event()

    async def work(front: Front):
        run = await front.new_run("r")

        def hangs(model_id, directory, **options):
            entered.set()
            told.wait(60)

        front.backend.save = hangs
        saved = await front.request(run, 1, "save", path="kept")
        assert await asyncio.to_thread(entered.wait, 60)
        await front.lose_engine()
        told.set()
        assert (await front.result(saved)).get("path") == "tinker://r/weights/kept"

    drive(work, tmp_path, snapshot_steps=100)


def test_a_missing_directory_of_a_sampler_fails_no_save_of_its_key(tmp_path):
    async def work(front: Front):
        shutil.rmtree(front.service.catalogue.place(await snapshot_of(front, 1)))
        saved = await front.result(await front.request(front.service.catalogue.runs["r"], 4, "save", path="kept"))
        assert saved.get("path") == "tinker://r/weights/kept"

    drive(work, tmp_path, snapshot_steps=100)


def test_a_snapshot_that_a_failed_try_has_begun_is_written_before_the_engine_is_reset(tmp_path, monkeypatch):
    """A reset drops the calls that wait, which would never be answered."""

    monkeypatch.setattr(recovery, "FIRST_PAUSE_SECONDS", 0.0)

    async def before(front: Front):
        a, b = await front.new_run("a"), await front.new_run("b")
        await front.result(await front.submit(a, 1, 3))
        await front.result(await front.submit(a, 2, None))
        await front.result(await front.submit(b, 1, 3))

    drive(before, tmp_path, snapshot_steps=100).engine.listener.close()
    with sqlite3.connect(tmp_path / DATABASE_FILE) as db:
        db.execute("UPDATE requests SET state = 'queued', result = NULL WHERE id = 'a:2'")
        db.execute("UPDATE runs SET next_seq = 2 WHERE id = 'a'")

    async def after(front: Front):
        link, call, under_way, at_reset, failures = front.service.link, front.service.link.call, set(), [], [1]

        async def noted(method, **arguments):
            if method == "reset":
                at_reset.append(set(under_way))
            if method == "passes" and arguments["passes"][0].model_id == "b" and failures:
                failures.clear()
                raise CallFailed(Failure("out of memory", "server"))
            if method != "save":
                return await call(method, **arguments)
            under_way.add(method)
            try:
                await asyncio.sleep(0.1)
                return await call(method, **arguments)
            finally:
                under_way.discard(method)

        monkeypatch.setattr(link, "call", noted)
        run = front.service.catalogue.runs["b"]
        assert "steps" in (await front.result(await front.submit(run, 2, None)))["metrics"]
        assert at_reset == [set(), set()]
        assert front.service.catalogue.runs["a"].snapshot_seq == 2

    drive(after, tmp_path)


def test_an_engine_that_is_lost_costs_no_copies_of_snapshots_that_this_process_has_written(tmp_path, monkeypatch):
    copied, copy = [], barriers.copy_files

    def counted(source, target):
        copied.append(source.name)
        copy(source, target)

    monkeypatch.setattr(barriers, "copy_files", counted)

    async def lost(front: Front, run):
        await front.lose_engine()
        await front.result(await front.submit(run, run.next_seq, 7))

    async def before(front: Front):
        run = await front.new_run("r")
        for seq in (1, 4, 7):
            await stepped(front, run, seq)
            await front.result(await front.request(run, seq + 2, "save_for_sampler", sampling_session_seq_id=seq))
        await lost(front, run)
        assert copied == []

    async def after(front: Front):
        run = front.service.catalogue.runs["r"]
        for _ in range(2):
            await lost(front, run)
        assert copied == ["sampler-3", "sampler-6", "sampler-9"]  # once, of an earlier process

    drive(before, tmp_path, snapshot_steps=100).engine.listener.close()
    drive(after, tmp_path, snapshot_steps=100)

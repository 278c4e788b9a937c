"""What writes files goes on beside the rounds of passes."""

import asyncio
import shutil
import sqlite3
import threading

from dataproto_server.backend import Failure
from dataproto_server.engine_link import CallFailed
from dataproto_server.front import recovery
from dataproto_server.front.service import DATABASE_FILE
from helpers.fronts import Front, drive, take_in, until
from helpers.vector_backend import VectorBackend


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
    """It has the state after its update, though the run goes on, and a replay starts from it."""
    told, writing = threading.Event(), threading.Event()

    def slowly(backend, model_id, directory, *, later):
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

    monkeypatch.setattr(recovery, "PAUSE_SECONDS", 0.0)

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

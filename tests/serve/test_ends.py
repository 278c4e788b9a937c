"""The ends of runs, samplers and checkpoints, and what a start removes."""

import asyncio
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from dataproto_server.front import scheduler, service
from dataproto_server.ledger.directories import check_directory
from dataproto_server.ledger.records import Checkpoint, Run, Sampler, everything, put
from dataproto_server.refusals import NotFound, Refused
from dataproto_server.routes import session_routes
from helpers.fronts import Front, drive, until

SELDOM = {"snapshot_steps": 100, "snapshot_seconds": 1e9}


async def trained(front: Front, name: str) -> Run:
    """A run after an update."""
    run = await front.new_run(name)
    await front.submit(run, 1, 3)
    await front.result(await front.submit(run, 2, None))
    return run


def test_a_state_directory_can_be_moved(tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir()

    async def before(front: Front):
        run = await trained(front, "r")
        await front.result(await front.request(run, 3, "save", path="a"))
        await front.result(await front.request(run, 4, "save_for_sampler", sampling_session_seq_id=1))
        await until(lambda: run.snapshot is not None)

    front = drive(before, old)
    front.engine.listener.close()
    old.rename(new)

    async def after(front: Front):
        catalogue = front.service.catalogue
        directories = [*catalogue.directories(), catalogue.runs["r"].snapshot]
        assert len(directories) == 3
        for each in directories:
            assert not Path(each).is_absolute()
            check_directory(catalogue.place(each))
        await front.submit(catalogue.runs["r"], 5, 3)
        stepped = await front.result(await front.submit(catalogue.runs["r"], 6, None))
        assert stepped["metrics"]["steps"] == 2

    drive(after, new)


def test_nothing_is_removed_where_a_recorded_directory_is_missing(tmp_path):
    async def before(front: Front):
        run = await trained(front, "r")
        await front.result(await front.request(run, 3, "save", path="a"))

    front = drive(before, tmp_path)
    front.engine.listener.close()
    (checkpoint,) = (tmp_path / "runs/1/weights").iterdir()
    checkpoint.rename(tmp_path / "elsewhere")
    unknown = tmp_path / "runs/1/weights/unknown"
    unknown.mkdir()

    async def after(front: Front):
        assert unknown.exists()

    front = drive(after, tmp_path)
    front.engine.listener.close()
    (tmp_path / "elsewhere").rename(checkpoint)

    async def mended(front: Front):
        assert checkpoint.exists()
        assert not unknown.exists()

    drive(mended, tmp_path)


def test_an_engine_that_ends_while_an_expired_run_is_written_loses_nothing(tmp_path, monkeypatch):
    async def work(front: Front):
        run = await trained(front, "r")
        weights, first = front.backend.models["r"].weights, front.backend
        saving, gone = threading.Event(), threading.Event()

        def save(model_id, directory, **options):
            saving.set()
            gone.wait()

        monkeypatch.setattr(first, "save", save)
        front.service.scheduler.end("r", "kept")
        await until(saving.is_set)
        fresh = await front.lose_engine()
        gone.set()
        await until(lambda: run.state == "ended")
        checkpoint = front.service.catalogue.checkpoints["r", "weights", "_expired"]
        fresh.create("again", "tiny/vector", run.spec)
        fresh.load("again", front.service.catalogue.place(checkpoint.directory), optimizer=True)
        assert (fresh.models["again"].weights == weights).all()

    drive(work, tmp_path, **SELDOM)


@pytest.mark.slow
def test_an_expired_run_is_kept_when_the_disk_has_room_again_and_beyond_the_quota(tmp_path, monkeypatch):
    monkeypatch.setattr(scheduler, "KEEP_SECONDS", 0.01)

    async def work(front: Front):
        run = await trained(front, "r")
        save = front.backend.save
        tries = []

        def full_at_first(model_id, directory, **options):
            tries.append(model_id)
            if len(tries) < 3:
                raise OSError("no space left on device")
            save(model_id, directory, **options)

        await front.result(await front.request(run, 3, "save", path="a"))
        refused = await front.result(await front.request(run, 4, "save", path="b"))
        assert (refused["category"], "--max-checkpoint-gb" in refused["error"]) == ("user", True)
        refused = await front.result(await front.request(run, 5, "save_for_sampler", sampling_session_seq_id=1))
        assert (refused["category"], "--max-checkpoint-gb" in refused["error"]) == ("user", True)
        monkeypatch.setattr(front.backend, "save", full_at_first)
        front.service.scheduler.end("r", "kept")
        await until(lambda: run.state == "ended")
        assert len(tries) == 3
        check_directory(
            front.service.catalogue.place(front.service.catalogue.checkpoints["r", "weights", "_expired"].directory)
        )

    drive(work, tmp_path, max_checkpoint_gb=1e-9, **SELDOM)


def test_a_sampler_that_is_saved_behind_the_end_of_its_session_goes_with_its_run(tmp_path):
    async def work(front: Front):
        run = await front.new_run("r")
        front.backend.gate.clear()
        await front.submit(run, 1, 3)
        await until(front.backend.entered.is_set)
        waiting = await front.request(run, 2, "save_for_sampler", sampling_session_seq_id=1)
        await front.service.lifecycle.end_session(front.service.catalogue.sessions["s"], "finished")
        front.backend.gate.set()
        assert (await front.result(waiting))["sampling_session_id"] == "s:sample:1"
        await until(lambda: run.state == "ended" and not list((tmp_path / "runs/1").glob("sampler-*")))
        assert front.service.catalogue.samplers == {}

    drive(work, tmp_path, **SELDOM)


@pytest.mark.parametrize("how", ["deleted", "expired"])
def test_a_checkpoint_that_is_deleted_stays_on_disk_for_its_open_samplers(tmp_path, how):
    async def work(front: Front):
        run = await front.new_run("r")
        await front.result(await front.request(run, 1, "save_for_sampler", path="a"))
        catalogue = front.service.catalogue
        checkpoint = catalogue.checkpoints["r", "sampler_weights", "a"]
        place = catalogue.place(checkpoint.directory)
        sampler = Sampler(
            id="k",
            session="s",
            owner="ann",
            run=None,
            base_model="tiny/vector",
            model_path=checkpoint.path,
            directory=checkpoint.directory,
            own=0,
            digest="",
            created=0.0,
        )
        await catalogue.write(sampler)
        catalogue.samplers["k"] = sampler
        if how == "deleted":
            await front.service.lifecycle.delete_checkpoint(checkpoint)
        else:
            checkpoint.expires = 1.0
            catalogue.sessions["s"].seen = time.monotonic()
            await front.service.lifecycle.sweep()
        await front.service.samples._remove_unused()
        check_directory(place)
        await front.service.lifecycle.end_session(catalogue.sessions["s"], "finished")
        await until(lambda: not place.exists())

    drive(work, tmp_path)


def test_a_checkpoint_that_is_deleted_while_a_sampling_session_is_made_stays_for_it(tmp_path, monkeypatch):
    async def work(front: Front):
        run = await front.new_run("r")
        await front.result(await front.request(run, 1, "save_for_sampler", path="a"))
        catalogue, loop = front.service.catalogue, asyncio.get_running_loop()
        checkpoint = catalogue.checkpoints["r", "sampler_weights", "a"]
        place = catalogue.place(checkpoint.directory)

        def check_a_deleted_one(directory):  # in a thread
            for work in (front.service.lifecycle.delete_checkpoint(checkpoint), front.service.samples._remove_unused()):
                asyncio.run_coroutine_threadsafe(work, loop).result(60)
            check_directory(directory)

        monkeypatch.setattr(session_routes, "check_directory", check_a_deleted_one)
        asked = {"session_id": "s", "sampling_session_seq_id": 1, "model_path": checkpoint.path}
        assert "sampling_session_id" in await session_routes.create_sampling_session(front.call(**asked))
        await front.service.samples._remove_unused()
        check_directory(place)
        await front.service.lifecycle.end_session(catalogue.sessions["s"], "finished")
        await until(lambda: not place.exists())

    drive(work, tmp_path)


def test_a_sampling_session_of_a_session_that_ends_meanwhile_is_refused_and_leaves_nothing(tmp_path, monkeypatch):
    async def work(front: Front):
        run = await front.new_run("r")
        await front.result(await front.request(run, 1, "save_for_sampler", path="a"))
        catalogue, loop = front.service.catalogue, asyncio.get_running_loop()

        def check_at_the_end(directory):  # in a thread
            ended = front.service.lifecycle.end_session(catalogue.sessions["s"], "finished")
            asyncio.run_coroutine_threadsafe(ended, loop).result(60)
            check_directory(directory)

        monkeypatch.setattr(session_routes, "check_directory", check_at_the_end)
        asked = {"session_id": "s", "sampling_session_seq_id": 1, "model_path": "tinker://r/sampler_weights/a"}
        with pytest.raises(Refused, match="is finished"):
            await session_routes.create_sampling_session(front.call(**asked))
        assert catalogue.samplers == {}
        assert await front.service.database.run(everything(Sampler)) == []

    drive(work, tmp_path)


@pytest.mark.parametrize("again", [False, True])
def test_a_request_that_comes_while_its_run_ends_fails_and_does_not_wait_for_ever(tmp_path, monkeypatch, again):
    """``again``: the request is sent a second time."""

    async def work(front: Front):
        run = await front.new_run("r")
        database, ending, sent = front.service.database, [], []
        write, put = database.run, scheduler.put

        def noted(record):
            ending.append(record)
            return put(record)

        async def written(function):
            found = await write(function)
            if ending:
                ending.clear()
                sent.append(await front.submit(run, 1, token=1))
            return found

        monkeypatch.setattr(scheduler, "put", noted)
        monkeypatch.setattr(database, "run", written)
        await front.service.lifecycle.end_session(front.service.catalogue.sessions["s"], "finished")
        await until(lambda: run.state == "ended" and sent)
        if again:
            assert await front.submit(run, 1, token=1) == sent[0]
        assert "is not in training" in (await asyncio.wait_for(front.result(sent[0]), 20))["error"]
        await until(lambda: "r" not in front.service.scheduler.lanes)

    drive(work, tmp_path)


def test_a_request_that_a_kill_at_the_end_of_its_run_has_left_fails_when_it_is_sent_again(tmp_path):
    async def before(front: Front):
        run = await front.new_run("r")
        front.backend.gate.clear()
        await front.submit(run, 1, token=1)
        await front.service.database.run(put(replace(run, state="ended")))

    async def after(front: Front):
        run = front.service.catalogue.runs["r"]
        request = await front.submit(run, 1, token=1)
        assert "is not in training" in (await asyncio.wait_for(front.result(request), 20))["error"]

    drive(before, tmp_path).backend.gate.set()
    drive(after, tmp_path)


def test_a_start_drops_the_samplers_of_sessions_that_have_ended(tmp_path):
    async def before(front: Front):
        run = await front.new_run("r")
        await front.result(await front.request(run, 1, "save_for_sampler", sampling_session_seq_id=1))
        session = front.service.catalogue.sessions["s"]
        session.state = "finished"
        await front.service.catalogue.write(session)  # and then the process is killed

    front = drive(before, tmp_path)
    front.engine.listener.close()
    assert len(list((tmp_path / "runs/1").glob("sampler-*"))) == 1

    async def after(front: Front):
        assert front.service.catalogue.samplers == {}
        assert list((tmp_path / "runs/1").glob("sampler-*")) == []
        assert await front.service.database.run(everything(Sampler)) == []

    drive(after, tmp_path)


# The clock of the system, and names that are taken again


def test_a_clock_that_is_set_forward_ends_no_session_and_no_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setattr(service, "SWEEP_SECONDS", 0.0)
    now = time.time

    async def work(front: Front):
        run = await front.new_run("r")
        await front.result(await front.request(run, 1, "save", path="a", ttl_seconds=86400))
        catalogue, forgotten = front.service.catalogue, []
        session = front.call(tags=[], sdk_version="x")
        made = (await session_routes.create_session(session))["session_id"]
        monkeypatch.setattr(time, "time", lambda: now() + 1e6)
        await session_routes.heartbeat(front.call(session_id=made))
        monkeypatch.setattr(front.service.futures, "forget", forgotten.append)
        await until(lambda: len(forgotten) > 2)
        monkeypatch.setattr(time, "time", now)
        await until(lambda: len(forgotten) > 5)
        assert catalogue.sessions[made].state == run.state == "live"
        assert list(catalogue.checkpoints) == [("r", "weights", "a")]
        catalogue.sessions[made].seen -= 1e6  # silent for so long by any clock
        await until(lambda: catalogue.sessions[made].state == "expired")

    drive(work, tmp_path)


def test_a_clock_that_is_set_back_drops_no_newer_checkpoint(tmp_path, monkeypatch):
    now, path = time.time, ("r", "weights")

    async def before(front: Front):
        run = await front.new_run("r")
        await front.result(await front.request(run, 1, "save", path="a"))
        monkeypatch.setattr(time, "time", lambda: now() - 3600)
        for seq, name in ((2, "b"), (3, "c")):
            await front.result(await front.request(run, seq, "save", path=name))
        assert list(front.service.catalogue.checkpoints) == [(*path, "b"), (*path, "c")]

    drive(before, tmp_path, keep_last=2).engine.listener.close()
    monkeypatch.setattr(time, "time", lambda: now() - 7200)

    async def after(front: Front):
        catalogue = front.service.catalogue
        await front.result(await front.request(catalogue.runs["r"], 4, "save", path="d"))
        assert [each.name for each in catalogue.checkpoints_of(run="r")] == ["c", "d"]

    drive(after, tmp_path, keep_last=2)


@pytest.mark.parametrize("how", ["deleted", "published"])
def test_what_is_meant_for_a_checkpoint_does_not_reach_the_next_one_of_its_name(tmp_path, how):
    """The deletion, by a client or at the end of its time, was on its way while the name was written again."""

    async def work(front: Front):
        run, catalogue = await front.new_run("r"), front.service.catalogue
        await front.result(await front.request(run, 1, "save", path="a"))
        old = catalogue.checkpoints["r", "weights", "a"]
        await front.result(await front.request(run, 2, "save", path="a", overwrite=True))
        if how == "deleted":
            await front.service.lifecycle.delete_checkpoint(old)
        else:
            with pytest.raises(NotFound, match="replaced"):
                await catalogue.change(old, public=1)
        (kept,) = await front.service.database.run(everything(Checkpoint))
        assert kept == catalogue.checkpoints["r", "weights", "a"] != old
        assert kept.public == 0
        check_directory(catalogue.place(kept.directory))

    drive(work, tmp_path)


def test_a_sampling_session_is_not_replaced_by_another_one_of_its_number(tmp_path):
    async def work(front: Front):
        a, b = await front.new_run("a"), await front.new_run("b")
        made = await front.result(await front.request(a, 1, "save_for_sampler", sampling_session_seq_id=1))
        refused = await front.result(await front.request(b, 1, "save_for_sampler", sampling_session_seq_id=1))
        assert (refused["category"], "choose another number" in refused["error"]) == ("user", True)
        assert front.service.catalogue.samplers[made["sampling_session_id"]].run == "a"

    drive(work, tmp_path)

"""Runs that one start cannot restore continue after the next one, and what was loaded stays loaded."""

import asyncio
import json
import threading

import numpy as np
import pytest

from dataproto.errors import InvalidConfig
from dataproto_server.front import recovery
from dataproto_server.ledger import directories
from dataproto_server.routes import training_routes
from helpers.fronts import Front, Recording, drive, until


async def trained(front: Front, name: str, *, session: str = "s"):
    """A run with a snapshot after an update, and a gradient after that."""
    run = await front.new_run(name, session=session)
    await front.submit(run, 1, 3)
    await front.result(await front.submit(run, 2, None))
    await until(lambda: run.snapshot is not None)
    await front.result(await front.submit(run, 3, 5))
    return run


async def continues(front: Front, gradient: np.ndarray) -> None:
    """The run "r" is where it was, and the update that was sent during the other start is made."""
    stepped = (await front.result("r:4"))["metrics"]
    assert (stepped["steps"], stepped["grad_norm"]) == (2, float(np.linalg.norm(gradient)))


def no_model(monkeypatch, front: Front) -> None:
    create = Recording.create

    def of_served_models(self, model_id, *arguments, **options):
        if model_id == "r":
            raise InvalidConfig("there is no base model 'tiny/vector'")
        create(self, model_id, *arguments, **options)

    monkeypatch.setattr(Recording, "create", of_served_models)


def no_directory(monkeypatch, front: Front) -> None:
    front.state.joinpath("runs/1").rename(front.state / "not-mounted")


@pytest.mark.parametrize("mistake", [no_model, no_directory])
@pytest.mark.parametrize("client", ["waits", "has gone"])
def test_a_run_that_a_start_cannot_restore_continues_after_the_next_one(tmp_path, monkeypatch, mistake, client):
    async def before(front: Front):
        await trained(front, "r")
        await front.new_run("other", session="other")

    first = drive(before, tmp_path)
    gradient = first.backend.models["r"].gradient
    first.engine.listener.close()

    async def wrong(front: Front):
        run, other = (front.service.catalogue.runs[name] for name in ("r", "other"))
        request = await front.submit(run, 4, None)
        assert "rows:sum" in await front.result(await front.submit(other, 1, 7))
        polled = await training_routes.retrieve_future(front.call(request_id=request))
        told = json.loads(polled.body)
        assert (polled.status_code, told["queue_state"]) == (408, "paused_capacity")
        assert "run r cannot be restored: " in told["queue_state_reason"]
        assert "nothing of it is lost" in told["queue_state_reason"]
        if client == "has gone":
            await front.service.lifecycle.end_session(front.service.catalogue.sessions["s"], "expired")
            await front.result(await front.submit(other, 2, None))

    with monkeypatch.context() as during:
        mistake(during, first)
        second = drive(wrong, tmp_path, poll_seconds=0.01)
    second.engine.listener.close()
    if mistake is no_directory:
        (tmp_path / "not-mounted").rename(tmp_path / "runs/1")

    async def right(front: Front):
        await continues(front, gradient)
        if client == "has gone":
            await until(lambda: ("r", "weights", "_expired") in front.service.catalogue.checkpoints)

    drive(right, tmp_path)


def test_a_start_that_cannot_read_a_snapshot_gives_up_no_run(tmp_path, monkeypatch):
    async def before(front: Front):
        await trained(front, "r")

    first = drive(before, tmp_path)
    gradient = first.backend.models["r"].gradient
    first.engine.listener.close()

    def refused(self, model_id, directory, *, optimizer):
        raise OSError("permission denied")

    async def wrong(front: Front):
        await front.submit(front.service.catalogue.runs["r"], 4, None)
        await until(lambda: front.service.scheduler.lanes["r"].resting)

    with monkeypatch.context() as during:
        during.setattr(recovery, "PAUSE_SECONDS", 0.0)
        during.setattr(Recording, "load", refused)
        second = drive(wrong, tmp_path)
    second.engine.listener.close()
    drive(lambda front: continues(front, gradient), tmp_path)


# What was loaded


def save_that_waits(front: Front, monkeypatch, name: str) -> threading.Event:
    """Lets the files of one model wait until the event is set."""
    save, gate = front.backend.save, threading.Event()

    def slow(model_id, directory, *, later=lambda write: write(), **options):
        save(
            model_id,
            directory,
            later=lambda write: later(lambda: (model_id != name or gate.wait(60), write())),
            **options,
        )

    monkeypatch.setattr(front.backend, "save", slow)
    return gate


@pytest.mark.parametrize("how", ["overwritten", "deleted"])
@pytest.mark.parametrize("new", [True, False])
def test_weights_that_were_loaded_are_the_same_after_a_kill(tmp_path, monkeypatch, how, new):
    async def work(front: Front):
        source = await front.new_run("source")
        await front.submit(source, 1, 7)
        await front.result(await front.submit(source, 2, None))
        path = (await front.result(await front.request(source, 3, "save", path="latest")))["path"]
        await front.submit(source, 4, 7)
        await front.result(await front.submit(source, 5, None))
        gate = save_that_waits(front, monkeypatch, "b")
        b = await front.new_run("b", load=path if new else None)
        if not new:
            await front.result(await front.request(b, 1, "load", path=path, optimizer=True))
        loaded = front.backend.models["b"]
        if how == "overwritten":
            await front.result(await front.request(source, 6, "save", path="latest", overwrite=True))
        else:
            checkpoint = front.service.catalogue.checkpoints["source", "weights", "latest"]
            await front.service.lifecycle.delete_checkpoint(checkpoint)
        fresh = await front.lose_engine()
        gate.set()
        await front.result(await front.submit(b, 1 if new else 2, 9))
        assert (fresh.models["b"].weights == loaded.weights).all()
        assert (fresh.models["b"].moments == loaded.moments).all()
        assert fresh.models["b"].steps == loaded.steps == 1

    drive(work, tmp_path, snapshot_steps=100)


@pytest.mark.parametrize(("kind", "place"), [("save", "weights"), ("save_for_sampler", "sampler_weights")])
def test_a_load_without_the_optimizer_is_one_after_a_kill_too(tmp_path, kind, place):
    async def work(front: Front):
        run = await front.new_run("r")
        await front.submit(run, 1, 7)
        await front.result(await front.submit(run, 2, None))
        await front.result(await front.request(run, 3, kind, path="a"))
        weights = front.backend.models["r"].weights
        path = f"tinker://r/{place}/a"
        assert "path" in await front.result(await front.request(run, 4, "load", path=path, optimizer=False))
        fresh = await front.lose_engine()
        await front.result(await front.submit(run, 5, 9))
        model = fresh.models["r"]
        assert (model.weights == weights).all()
        assert (model.steps, model.moments.any()) == (0, False)

    drive(work, tmp_path, snapshot_steps=100)


def test_a_snapshot_that_is_written_while_a_load_comes_does_not_take_its_place(tmp_path, monkeypatch):
    async def work(front: Front):
        run = await front.new_run("r")
        path = (await front.result(await front.request(run, 1, "save", path="a")))["path"]
        gate = save_that_waits(front, monkeypatch, "r")
        await front.submit(run, 2, 7)
        await front.result(await front.submit(run, 3, None))
        loading = await front.request(run, 4, "load", path=path, optimizer=True)
        gate.set()
        await front.result(loading)
        assert (run.snapshot, run.snapshot_seq) == ("runs/1/snapshot-4", 4)
        for _ in range(200):  # the one before is deleted after the answer
            if len(kept := list((tmp_path / "runs/1").glob("snapshot-*"))) == 1:
                break
            await asyncio.sleep(0.02)
        assert [each.name for each in kept] == ["snapshot-4"]

    drive(work, tmp_path)


@pytest.mark.parametrize("at", ["files", "snapshot"])
def test_the_passes_of_others_do_not_wait_for_a_load(tmp_path, monkeypatch, at):
    async def work(front: Front):
        mine, other = await front.new_run("mine", session="mine"), await front.new_run("other")
        path = (await front.result(await front.request(other, 1, "save", path="a")))["path"]
        gate, checked, check = threading.Event(), [], directories.check_directory

        def slow_check(directory):
            gate.wait(5)
            check(directory)
            checked.append(directory)

        if at == "files":
            monkeypatch.setattr(directories, "check_directory", slow_check)
        else:
            gate = save_that_waits(front, monkeypatch, "other")
        loading = await front.request(other, 2, "load", path=path, optimizer=True)
        assert "rows:sum" in await asyncio.wait_for(front.result(await front.submit(mine, 1, 7)), 20)
        assert checked == []
        gate.set()
        assert "path" in await front.result(loading)

    drive(work, tmp_path, snapshot_steps=100)


def test_the_passes_of_others_do_not_wait_for_the_checkpoint_of_an_expired_run(tmp_path, monkeypatch):
    async def work(front: Front):
        mine, other = await front.new_run("mine", session="mine"), await front.new_run("other")
        gate = save_that_waits(front, monkeypatch, "other")
        await front.service.lifecycle.end_session(front.service.catalogue.sessions["s"], "expired")
        for seq in (1, 2):
            await asyncio.wait_for(front.result(await front.submit(mine, seq, 7)), 20)
        assert other.state == "live"
        gate.set()
        await until(lambda: other.state == "ended")

    drive(work, tmp_path, snapshot_steps=100)

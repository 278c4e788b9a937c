"""Poisonous requests and replays, with the engine's process as a thread."""

import asyncio
import sqlite3

import numpy as np
import pytest

from dataproto.errors import CheckpointError, InvalidConfig
from dataproto_server.backend import LoraSpec
from dataproto_server.engine_link import EngineLost
from dataproto_server.front import lanes, recovery, scheduler
from dataproto_server.front.service import DATABASE_FILE
from dataproto_server.ledger import database
from helpers.fronts import Front, Recording, drive, until

POISON = "ppo"  # the loss of a pass at which a call fails as a whole


@pytest.fixture(autouse=True)
def _at_once(monkeypatch):
    monkeypatch.setattr(recovery, "PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(scheduler, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(scheduler, "PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(database, "RETRY_SECONDS", 0.0)


def poisonous(monkeypatch):
    compute = Recording.passes

    def passes(self, passes, **options):
        found = compute(self, passes, **options) if all(each.loss != POISON for each in passes) else None
        if found is None:
            self.groups.append([each.model_id for each in passes])
            raise RuntimeError("out of memory")
        return found

    monkeypatch.setattr(Recording, "passes", passes)


async def behind_a_busy_engine(front: Front, run) -> None:
    """What comes now is computed together."""
    front.backend.gate.clear()
    front.backend.entered.clear()
    await front.submit(run, 1, 3)
    assert await asyncio.to_thread(front.backend.entered.wait, 60)


def test_a_pass_at_which_the_joint_call_fails_fails_alone_and_in_the_replay_too(tmp_path, monkeypatch):
    async def work(front: Front):
        a, b = await front.new_run("a"), await front.new_run("b")
        await behind_a_busy_engine(front, a)
        poisonous(monkeypatch)
        fine, bad = await front.submit(a, 2, 5), await front.submit(b, 1, 6, loss=POISON)
        front.backend.gate.set()
        assert (await front.result(fine))["rows:sum"] == 1
        failed = await front.result(bad)
        assert failed["category"] == "server"
        assert "RuntimeError in the server, incident" in failed["error"]
        assert front.backend.groups == [["a"], ["a", "b"], ["a"], ["b"]]
        gradient = front.backend.models["a"].gradient
        fresh = await front.lose_engine()
        stepped = await front.result(await front.submit(a, 3, None))
        assert fresh.groups == [["a"], ["a"]]
        assert stepped["metrics"]["grad_norm"] == float(np.linalg.norm(gradient))
        assert "steps" in (await front.result(await front.submit(b, 2, None)))["metrics"]

    drive(work, tmp_path)


def test_a_pass_at_which_the_engine_ends_fails_alone(tmp_path, monkeypatch):
    async def work(front: Front):
        link, call = front.service.link, front.service.link.call

        async def fragile(method, **arguments):
            if method == "passes" and any(each.loss == POISON for each in arguments["passes"]):
                await link.close()
                raise EngineLost("the engine process ended")
            return await call(method, **arguments)

        a, b = await front.new_run("a"), await front.new_run("b")
        await behind_a_busy_engine(front, a)
        monkeypatch.setattr(link, "call", fragile)
        fine, bad = await front.submit(a, 2, 5), await front.submit(b, 1, 6, loss=POISON)
        front.backend.gate.set()
        assert (await front.result(fine))["rows:sum"] == 1
        failed = await front.result(bad)
        assert failed["error"] == "the engine or the server failed 3 times at this request"
        assert "steps" in (await front.result(await front.submit(b, 2, None)))["metrics"]

    drive(work, tmp_path)


def test_limits_that_were_lowered_do_not_refuse_what_has_been_computed(tmp_path):
    async def before(front: Front):
        run = await front.new_run("r")
        await front.result(await front.submit(run, 1, 7, rows=3))

    first = drive(before, tmp_path)
    gradient = first.backend.models["r"].gradient
    first.engine.listener.close()

    async def after(front: Front):
        run = front.service.catalogue.runs["r"]
        stepped = await front.result(await front.submit(run, 2, None))
        assert stepped["metrics"]["grad_norm"] == float(np.linalg.norm(gradient)) > 0
        assert "--max-data" in (await front.result(await front.submit(run, 3, 7, rows=3)))["error"]

    drive(after, tmp_path, max_data=1)


@pytest.mark.parametrize("method", ["load", "passes"])
def test_errors_of_the_server_in_a_replay_pass(tmp_path, monkeypatch, method):
    """Two of the five tries fail; the result is that of an undisturbed run."""

    async def work(front: Front):
        run = await front.new_run("r")
        await front.submit(run, 1, 3)
        await front.result(await front.submit(run, 2, None))
        await until(lambda: run.snapshot is not None)
        await front.result(await front.submit(run, 3, 5))
        gradient, weights = front.backend.models["r"].gradient, front.backend.models["r"].weights
        failures = fail(monkeypatch, method, RuntimeError("out of memory"), times=2)
        fresh = await front.lose_engine()
        stepped = await front.result(await front.submit(run, 4, None))
        assert failures == [] != weights.tolist()
        assert stepped["metrics"]["grad_norm"] == float(np.linalg.norm(gradient))
        assert stepped["metrics"]["steps"] == 2
        assert set(fresh.models) == {"r"}

    drive(work, tmp_path)


@pytest.mark.parametrize(
    ("error", "message", "tries"),
    [(RuntimeError("out of memory"), "cannot be restored in 5 tries: RuntimeError in the server", 5),
     (CheckpointError("damaged"), "cannot be restored: damaged", 1)],
)  # fmt: skip
def test_a_run_rests_when_the_server_fails_too_often_and_others_go_on(tmp_path, monkeypatch, error, message, tries):
    async def work(front: Front):
        a, b = await front.new_run("a"), await front.new_run("b")
        await front.submit(a, 1, 3)
        await front.result(await front.submit(a, 2, None))
        await until(lambda: a.snapshot is not None)
        await front.submit(b, 1, 3)
        await front.submit(a, 4, 3)  # waits for number 3
        left = fail(monkeypatch, "load", error, times=9)
        await front.lose_engine()
        assert "steps" in (await front.result(await front.submit(b, 2, None)))["metrics"]
        assert message in front.service.futures.pending["a:4"].reason()
        assert 9 - len(left) == tries
        assert a.state == "live"

    drive(work, tmp_path)


def test_a_pass_that_failed_adds_no_gradient_when_it_succeeds_in_the_replay(tmp_path, monkeypatch):
    async def work(front: Front):
        run = await front.new_run("r")
        await front.result(await front.submit(run, 1, 3))
        gradient = front.backend.models["r"].gradient
        fail(monkeypatch, "passes", RuntimeError("out of memory"), times=1)
        assert (await front.result(await front.submit(run, 2, 9)))["category"] == "server"
        await front.lose_engine()
        stepped = await front.result(await front.submit(run, 3, None))
        assert stepped["metrics"]["grad_norm"] == float(np.linalg.norm(gradient))

    drive(work, tmp_path)


def fail(monkeypatch, method: str, error: Exception, times: int) -> list[Exception]:
    """Lets calls of a method fail; returns the failures that are left."""
    left, work = [error] * times, getattr(Recording, method)

    def failing(self, *arguments, **options):
        if left:
            raise left.pop()
        return work(self, *arguments, **options)

    monkeypatch.setattr(Recording, method, failing)
    return left


# What takes part in a replay


async def joint_round(front: Front, **options):
    """Two runs that have computed a pass together."""
    a, b = await front.new_run("a"), await front.new_run("b")
    await behind_a_busy_engine(front, a)
    requests = [await front.submit(a, 2, 5), await front.submit(b, 1, 6, **options)]
    front.backend.gate.set()
    for each in requests:
        await front.result(each)
    assert front.backend.groups == [["a"], ["a", "b"]]
    return a, b


def test_a_pass_that_was_refused_takes_no_part_in_the_replay(tmp_path):
    async def work(front: Front):
        await joint_round(front, loss="unknown")
        fresh = await front.lose_engine()
        await until(lambda: len(fresh.groups) == 2)
        assert fresh.groups == [["a"], ["a"]]
        assert set(fresh.models) == {"a", "b"}

    drive(work, tmp_path)


def test_limits_apply_to_a_pass_that_was_not_finished(tmp_path, monkeypatch):
    compute, replayed = Recording.passes, []

    def passes(self, passes, **options):
        replayed.append([each.replayed for each in passes])
        return compute(self, passes, **options)

    monkeypatch.setattr(Recording, "passes", passes)

    async def before(front: Front):
        run = await front.new_run("r")
        await front.result(await front.submit(run, 1, 7, rows=3))
        await front.result(await front.submit(run, 2, 8))
        front.backend.gate.clear()
        front.backend.entered.clear()
        await front.submit(run, 3, 7, rows=3)
        assert await asyncio.to_thread(front.backend.entered.wait, 60)

    first = drive(before, tmp_path)
    first.engine.listener.close()
    assert replayed == [[False]] * 3

    async def after(front: Front):
        assert "--max-data" in (await front.result("r:3"))["error"]
        run = front.service.catalogue.runs["r"]
        assert "steps" in (await front.result(await front.submit(run, 4, None)))["metrics"]

    assert drive(after, tmp_path, max_data=1).backend.groups == [["r"]] * 2
    assert replayed[3:] == [[True], [True]]


def test_a_run_whose_snapshot_is_damaged_leaves_the_others_of_its_unfinished_round(tmp_path, monkeypatch):
    async def work(front: Front):
        a, b = await front.new_run("a"), await front.new_run("b")
        await front.submit(a, 1, 3)
        await front.result(await front.submit(a, 2, None))
        await until(lambda: a.snapshot is not None)
        await behind_a_busy_engine(front, await front.new_run("c"))
        both = await front.submit(a, 3, 3), await front.submit(b, 1, 6)
        (front.state / a.snapshot / "adapter_model.safetensors").unlink()
        ended = ends_the_engine(front, monkeypatch, lambda method, given: len(given.get("passes", ())) == 2)
        front.backend.gate.set()
        assert "cannot be restored" in (await front.result(both[0]))["error"]
        assert (await front.result(both[1]))["rows:sum"] == 1
        assert "steps" in (await front.result(await front.submit(b, 2, None)))["metrics"]
        assert (ended, a.state, b.state) == (["passes"], "failed", "live")

    drive(work, tmp_path)


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), InvalidConfig("no slot is free")])
def test_a_stand_in_that_cannot_be_made_is_left_out(tmp_path, monkeypatch, error):
    async def work(front: Front):
        a, b = await joint_round(front)
        await front.result(await front.submit(a, 3, None))
        await until(lambda: a.snapshot is not None)
        compute, gradient = Recording.passes, front.backend.models["b"].gradient

        def no_stand_in(self, passes, **options):
            if any(each.stand_in is not None for each in passes):
                raise error
            return compute(self, passes, **options)

        monkeypatch.setattr(Recording, "passes", no_stand_in)
        fresh = await front.lose_engine()
        stepped = await front.result(await front.submit(b, 2, None))
        assert stepped["metrics"]["grad_norm"] == float(np.linalg.norm(gradient))
        assert fresh.groups == [["b"]]
        assert "steps" in (await front.result(await front.submit(a, 4, None)))["metrics"]

    drive(work, tmp_path)


def test_all_weights_have_no_stand_in(tmp_path, monkeypatch):
    """They are computed by themselves, and a copy of them may find no room."""

    async def work(front: Front):
        a, b = await joint_round(front)
        await front.result(await front.submit(a, 3, None))
        await until(lambda: a.snapshot is not None)
        create = Recording.create

        def of_any_weights(self, model_id, base_model, lora, **options):
            create(self, model_id, base_model, lora or LoraSpec(4), **options)

        monkeypatch.setattr(Recording, "create", of_any_weights)
        a.lora = None
        fresh = await front.lose_engine()
        await front.result(await front.submit(b, 2, None))
        assert fresh.groups == [["b"]]
        assert set(fresh.models) == {"a", "b"}

    drive(work, tmp_path)


# Engines that end in a replay


def test_a_run_at_whose_snapshot_the_engine_ends_rests(tmp_path, monkeypatch):
    async def work(front: Front):
        a, b = await front.new_run("a"), await front.new_run("b")
        await front.submit(a, 1, 3)
        await front.result(await front.submit(a, 2, None))
        await until(lambda: a.snapshot is not None)
        ended = ends_the_engine(front, monkeypatch, lambda method, arguments: method == "load")
        await front.lose_engine()
        assert "steps" in (await front.result(await front.submit(b, 1, None)))["metrics"]
        assert (len(ended), a.state, b.state) == (5, "live", "live")
        await front.submit(a, 3, None)
        assert "the engine ended 5 times" in front.service.futures.pending["a:3"].reason()

    drive(work, tmp_path)


def test_passes_at_which_the_engine_ends_together_are_computed_alone(tmp_path, monkeypatch):
    async def work(front: Front):
        a, b = await joint_round(front)
        gradients = [front.backend.models[name].gradient for name in "ab"]
        ended = ends_the_engine(front, monkeypatch, lambda method, arguments: len(arguments.get("passes", ())) > 1)
        await front.lose_engine()
        for run, seq, gradient in zip((a, b), (3, 2), gradients):
            stepped = await front.result(await front.submit(run, seq, None))
            assert stepped["metrics"]["grad_norm"] == float(np.linalg.norm(gradient))
        assert len(ended) == 5

    drive(work, tmp_path)


def test_what_is_finished_of_a_round_is_computed_without_the_rest_at_which_the_engine_ends(tmp_path, monkeypatch):
    async def before(front: Front):
        await joint_round(front)

    first = drive(before, tmp_path)
    gradient = first.backend.models["a"].gradient
    first.engine.listener.close()
    with sqlite3.connect(tmp_path / DATABASE_FILE) as db:
        db.execute("UPDATE requests SET state = 'queued', result = NULL WHERE id = 'b:1'")
        db.execute("UPDATE runs SET next_seq = 1 WHERE id = 'b'")

    def fragile(front: Front):
        return ends_the_engine(front, monkeypatch, lambda method, arguments: len(arguments.get("passes", ())) > 1)

    async def after(front: Front):
        ended = fragile(front)
        run = front.service.catalogue.runs["a"]
        stepped = await front.result(await front.submit(run, 3, None))
        assert stepped["metrics"]["grad_norm"] == float(np.linalg.norm(gradient))
        assert (await front.result("b:1"))["rows:sum"] == 1
        assert len(ended) == 3

    drive(after, tmp_path)


def ends_the_engine(front: Front, monkeypatch, at) -> list[str]:
    """Lets the engine end at some calls; returns their methods."""
    link, call, ended = front.service.link, front.service.link.call, []

    async def fragile(method, **arguments):
        if at(method, arguments):
            ended.append(method)
            await link.close()
            raise EngineLost("the engine process ended")
        return await call(method, **arguments)

    monkeypatch.setattr(link, "call", fragile)
    return ended


# Results that cannot be written


@pytest.mark.parametrize("kind", ["pass", "optim_step"])
def test_what_was_computed_counts_once_when_its_result_cannot_be_written(tmp_path, monkeypatch, kind):
    async def work(front: Front):
        run = await front.new_run("r")
        if kind == "optim_step":
            await front.result(await front.submit(run, 1, 7))
        front.backend.gate.clear()
        run_of_database, left = front.service.database.run, 2 * [RuntimeError("no such value")]
        finishing = lanes.Requests.finish

        async def finish(self, *arguments):
            async def full(job):
                if left:
                    raise left.pop()
                return await run_of_database(job)

            monkeypatch.setattr(front.service.database, "run", full)
            try:
                return await finishing(self, *arguments)
            finally:
                monkeypatch.setattr(front.service.database, "run", run_of_database)

        monkeypatch.setattr(lanes.Requests, "finish", finish)
        front.backend.gate.set()
        requests = [await front.submit(run, 1, 7)] if kind == "pass" else []
        requests.append(await front.submit(run, 2, None))
        found = [await front.result(each) for each in requests][-1]["metrics"]
        assert left == []
        assert found["steps"] == 1
        expected = np.zeros(32, np.float32)
        weights = np.random.default_rng(1).normal(size=32).astype(np.float32)
        expected[7] = np.tanh(weights[7])
        assert found["grad_norm"] == float(np.linalg.norm(expected))
        assert front.backend.models["r"].steps == 1

    drive(work, tmp_path)

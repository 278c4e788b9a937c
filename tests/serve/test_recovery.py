"""Poisonous requests and replays, with the engine's process as a thread."""

import asyncio

import numpy as np
import pytest

from dataproto.errors import CheckpointError
from helpers.fronts import Front, Recording, drive, until
from recipes.serve.front import recovery
from recipes.serve.link import EngineLost

POISON = "ppo"  # the loss of a pass at which a call fails as a whole


@pytest.fixture(autouse=True)
def _at_once(monkeypatch):
    monkeypatch.setattr(recovery, "FIRST_PAUSE_SECONDS", 0.0)


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
        assert fresh.groups == [["a"], ["a", "b:stand-in"], ["a"], ["b:stand-in"]]
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
def test_a_run_is_given_up_when_the_server_fails_too_often_and_others_go_on(
    tmp_path, monkeypatch, error, message, tries
):
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
        assert message in (await front.result("a:4"))["error"]
        assert 9 - len(left) == tries
        assert front.service.catalogue.runs["a"].state == "failed"

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

"""Order, grouping and replay, with the engine's process as a thread."""

import asyncio
import threading

import numpy as np
import pytest

from dataproto.errors import CheckpointError
from dataproto_server.front import lanes, recovery, scheduler
from dataproto_server.front.barriers import Barriers
from dataproto_server.front.futures import PROTOBUF
from dataproto_server.front.lanes import Requests
from dataproto_server.front.scheduler import Scheduler
from dataproto_server.ledger import directories, journal
from dataproto_server.ledger.records import together
from dataproto_server.refusals import Refused
from helpers.fronts import Front, drive, take_in, until


def test_requests_are_carried_out_by_their_numbers_in_whatever_order_they_come(tmp_path):
    async def work(front: Front):
        run = await front.new_run("r")
        later = [await front.submit(run, seq, token) for seq, token in ((4, None), (3, 8), (2, None))]
        first = await front.submit(run, 1, 7)
        assert (await front.result(first))["rows:sum"] == 1
        assert [(await front.result(each)).get("metrics", {}).get("steps") for each in later] == [2, None, 1]
        assert await front.submit(run, 1, 7) == first  # the same request again
        with pytest.raises(Refused, match="with another content"):
            await front.submit(run, 1, 9)

    drive(work, tmp_path)


def test_two_equal_requests_at_the_same_time_are_one(tmp_path):
    async def work(front: Front):
        run = await front.new_run("r")
        ids = await asyncio.gather(*(front.submit(run, 1, 7) for _ in range(5)))
        assert set(ids) == {"r:1"}
        assert (await front.result("r:1"))["rows:sum"] == 1

    assert drive(work, tmp_path).backend.groups == [["r"]]


def test_a_small_body_is_let_go_of_with_its_request_and_not_with_the_result(tmp_path):
    async def work(front: Front):
        run = await front.new_run("r")
        front.backend.gate.clear()
        request = await front.submit(run, 1, token=1)
        entry = front.service.scheduler.lanes["r"].entries[1]
        assert entry.body is not None  # not read from disk again
        front.backend.gate.set()
        await front.result(request)
        assert request in front.service.futures.pending
        assert entry.body is None

    drive(work, tmp_path)


def test_clients_in_step_are_computed_in_one_batch(tmp_path, monkeypatch):
    """A pass waits for the other run, whose last one was just computed, and not for one that has never sent a pass."""
    monkeypatch.setattr(lanes, "MOST_GATHERING", 60.0)

    async def work(front: Front):
        one, two, _ = [await front.new_run(name) for name in ("one", "two", "silent")]
        for run in (one, two):
            await front.result(await front.submit(run, 1, 7))
        front.service.scheduler._pass_seconds = 600.0
        waiting = [await front.submit(one, 2, 7)]
        waiting.append(await front.submit(two, 2, 7))
        for each in waiting:
            await front.result(each)
        front.service.scheduler._pass_seconds = 600.0
        assert (
            "steps" in (await front.result(await front.submit(one, 3, None)))["metrics"]
        )  # an update waits for nobody

    assert drive(work, tmp_path).backend.groups == [["one"], ["two"], ["one", "two"]]


def test_a_pass_waits_for_one_that_is_on_its_way_to_the_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(lanes, "MOST_GATHERING", 60.0)
    accept, held, told = journal.accept, [], asyncio.Event()

    def noted(entry, digest):
        job = accept(entry, digest)
        if entry.id == "two:1":
            held.append(job)
        return job

    async def work(front: Front):
        one, two = [await front.new_run(name) for name in ("one", "two")]
        run_of_database = front.service.database.run

        async def run(job):
            if job in held:
                await told.wait()
            return await run_of_database(job)

        monkeypatch.setattr(journal, "accept", noted)
        monkeypatch.setattr(front.service.database, "run", run)
        late = asyncio.create_task(front.submit(two, 1, 7))
        await until(lambda: held)
        waiting = await front.submit(one, 1, 7)
        assert not await asyncio.to_thread(front.backend.entered.wait, 0.2)
        told.set()
        for each in (waiting, await late):
            await front.result(each)

    assert drive(work, tmp_path).backend.groups == [["two", "one"]]


async def updates_together(front: Front) -> list[str]:
    """The updates of the runs a and b, after passes that are computed together when the gate opens."""
    a, b, other = [await front.new_run(name) for name in ("a", "b", "other")]
    front.backend.gate.clear()
    await front.submit(other, 1, 7)
    assert await asyncio.to_thread(front.backend.entered.wait, 60)
    for run in (a, b):
        await front.submit(run, 1, 7)
    return [await front.submit(run, 2, None) for run in (a, b)]


def test_the_updates_of_a_round_are_begun_and_finished_in_one_commit_each(tmp_path, monkeypatch):
    begun, finished, finish = [], [], Requests.finish

    def noted(*jobs):
        begun.append(sum("begin_round" in job.__qualname__ for job in jobs))
        return together(*jobs)

    async def note(self, results, *jobs):
        finished.append([entry.id for entry, _ in results])
        await finish(self, results, *jobs)

    async def work(front: Front):
        updates = await updates_together(front)
        monkeypatch.setattr(lanes, "together", noted)
        monkeypatch.setattr(Requests, "finish", note)
        front.backend.gate.set()
        for each in updates:
            assert (await front.result(each))["metrics"]["steps"] == 1

    drive(work, tmp_path, snapshot_steps=100)
    assert finished == [["other:1"], ["a:1", "b:1"], ["a:2", "b:2"]]
    assert begun == [0, 1, 0, 2, 0]  # two rounds of passes, and the updates


def test_an_update_that_cannot_be_read_now_delays_no_other_and_repeats_none(tmp_path, monkeypatch):
    body, left = Scheduler._body, [OSError("input/output error")]

    async def fails_once(self, entry):
        if entry.id == "a:2" and left:
            raise left.pop()
        return await body(self, entry)

    async def work(front: Front):
        updates = await updates_together(front)
        monkeypatch.setattr(Scheduler, "_body", fails_once)
        front.backend.gate.set()
        for each in reversed(updates):
            assert (await front.result(each))["metrics"]["steps"] == 1
        assert left == []
        assert [front.backend.models[name].steps for name in "ab"] == [1, 1]

    drive(work, tmp_path, snapshot_steps=100)


def test_a_server_stops_while_it_cannot_write_the_outcome_of_an_update(tmp_path, monkeypatch):
    """One of two updates is done when it stops. The journal has both as unfinished."""
    carry_out, done, tried = Barriers.carry_out, [], []

    async def one_alone(self, run, entry, body):
        if entry.id == "b:2":
            await asyncio.Event().wait()
        found = await carry_out(self, run, entry, body)
        done.append(entry.id)
        return found

    async def cannot(self, finished, *jobs):
        tried.extend(entry.id for entry, _ in finished)
        raise OSError("input/output error")

    async def work(front: Front):
        await updates_together(front)
        monkeypatch.setattr(Barriers, "carry_out", one_alone)
        front.backend.gate.set()
        await until(lambda: done == ["a:2"])
        monkeypatch.setattr(Requests, "finish", cannot)
        monkeypatch.setattr(scheduler, "PAUSE_SECONDS", 0.01)
        rounds = front.service._tasks[0]
        rounds.cancel()
        await asyncio.wait([rounds], timeout=10)
        assert rounds.cancelled()
        assert tried == ["a:2"]

    drive(work, tmp_path, snapshot_steps=100)


def test_files_of_different_runs_are_written_at_the_same_time(tmp_path, monkeypatch):
    both, publish = threading.Barrier(2), directories._publish

    def publish_together(temporary, target):
        both.wait(timeout=60)  # breaks, and fails the request, unless the other run's files are being written too
        publish(temporary, target)

    async def work(front: Front):
        runs = [await front.new_run(name) for name in ("one", "two")]
        front.backend.gate.clear()
        busy = await front.submit(runs[0], 1, 7)
        assert await asyncio.to_thread(front.backend.entered.wait, 60)
        monkeypatch.setattr(directories, "_publish", publish_together)
        saves = [await front.request(run, seq, "save", path="x") for seq, run in zip((2, 1), runs)]
        front.backend.gate.set()
        await front.result(busy)
        found = [await front.result(each) for each in saves]
        assert [each["path"] for each in found] == [f"tinker://{run.id}/weights/x" for run in runs]

    drive(work, tmp_path, snapshot_steps=100)


def test_a_checkpoint_that_is_replaced_while_another_run_loads_it_stays_until_it_is_loaded(tmp_path, monkeypatch):
    async def work(front: Front):
        one, two = [await front.new_run(name) for name in ("one", "two")]
        await front.result(await front.request(one, 1, "save", path="x"))
        old = front.service.catalogue.place(front.service.catalogue.checkpoints["one", "weights", "x"].directory)
        link, call = front.service.link, front.service.link.call
        front.backend.gate.clear()
        busy = await front.submit(one, 2, 7)
        assert await asyncio.to_thread(front.backend.entered.wait, 60)
        save = await front.request(one, 3, "save", path="x", overwrite=True)
        load = await front.request(two, 1, "load", path="tinker://one/weights/x", optimizer=True)

        async def behind_the_save(method, **arguments):
            if method == "load":
                assert "error" not in await front.result(save)
                await until(lambda: not front.service.samples._tasks)  # which remove directories
            return await call(method, **arguments)

        monkeypatch.setattr(link, "call", behind_the_save)
        front.backend.gate.set()
        await front.result(busy)
        assert (await front.result(load)).get("path") == "tinker://one/weights/x"
        await until(lambda: not old.exists())

    drive(work, tmp_path, snapshot_steps=100)


@pytest.mark.slow
def test_a_gap_fails_those_that_wait_for_it(tmp_path):
    async def work(front: Front):
        run = await front.new_run("r")
        waiting = await front.submit(run, 3, 7)
        found = await front.result(waiting)
        assert found["category"] == "user"
        assert "request 2 of r has not come" not in found["error"]
        assert "request 1 of r has not come within 0.05 s (--gap-seconds): request 3 waited for it" in found["error"]
        with pytest.raises(Refused, match="comes too late"):
            await front.submit(run, 1, 7)
        assert "loss:sum" in await front.result(await front.submit(run, 4, 7))

    drive(work, tmp_path, gap_seconds=0.05)


def test_those_that_wait_for_a_gap_fail_in_one_commit(tmp_path, monkeypatch):
    async def work(front: Front):
        run = await front.new_run("r")
        waiting = [await front.submit(run, seq, 7) for seq in range(2, 12)]
        run_of_database, written = front.service.database.run, []

        async def note(job):
            written.append(job)
            return await run_of_database(job)

        monkeypatch.setattr(front.service.database, "run", note)
        front.service.scheduler.lanes["r"].blocked_since = float("-inf")
        assert [(await front.result(each))["category"] for each in waiting] == ["user"] * 10
        assert len(written) == 1

    drive(work, tmp_path)


def test_a_replay_keeps_the_groups_in_which_passes_were_computed(tmp_path):
    """The run a is further than b when the engine ends: another adapter takes its place, and b's result is the same."""

    async def work(front: Front):
        a, b = await front.new_run("a"), await front.new_run("b")
        front.backend.gate.clear()
        await front.submit(a, 1, 3)  # computed alone while the others gather after it
        assert await asyncio.to_thread(front.backend.entered.wait, 60)
        requests = [await front.submit(a, 2, 5), await front.submit(b, 1, 6), await front.submit(a, 3, None)]
        front.backend.gate.set()
        expected = [await front.result(each) for each in requests]
        assert front.backend.groups == [["a"], ["a", "b"]]  # b has no snapshot, a has one after its update
        await until(lambda: a.snapshot is not None)  # it is written after the answer
        weights, gradient = front.backend.models["a"].weights, front.backend.models["b"].gradient
        fresh = await front.lose_engine()
        stepped = await front.result(await front.submit(b, 2, None))
        assert fresh.groups == [["a", "b"]]
        assert (fresh.models["a"].weights == weights).all()
        assert stepped["metrics"]["grad_norm"] == float(np.linalg.norm(gradient))
        assert fresh.models["a"].gradient is None
        assert expected[0]["rows:sum"] == 1

    drive(work, tmp_path)


def test_a_cancelled_request_for_samples_fails_and_never_reaches_a_busy_engine(tmp_path):
    async def work(front: Front):
        run = await front.new_run("r")
        front.backend.gate.clear()
        await front.submit(run, 1, 3)
        assert await asyncio.to_thread(front.backend.entered.wait, 60)
        take_in(front)
        front.service.samples.cancel("k:1")
        assert (await front.result("k:1"))["error"] == "the client cancelled the request"
        front.backend.gate.set()
        await front.result("r:1")

    assert drive(work, tmp_path).backend.flying == {}


def test_a_request_at_which_the_engine_ended_too_often_fails(tmp_path):
    async def work(front: Front):
        await until(lambda: front.service.samples._ready)
        for number in (1, 2):
            take_in(front, number)
        front.service.samples.flights["k:2"].tries = 3
        assert (await front.result("k:2"))["error"] == "the engine ended 3 times at this request"
        assert (await front.service.futures.wait("k:1", 60)).media == PROTOBUF

    drive(work, tmp_path)


def test_requests_of_a_sampler_that_cannot_be_opened_fail_by_the_reason_of_that(tmp_path):
    async def work(front: Front):
        await until(lambda: front.service.samples._ready)
        for number in (1, 2):
            take_in(front, number, directory="nowhere")
        for number in (1, 2):
            assert "FileNotFoundError in the server" in (await front.result(f"k:{number}"))["error"]
        take_in(front, 3)  # of another sampler, the base
        assert await front.service.futures.wait("k:3", 60) is not None

    drive(work, tmp_path)


def test_a_front_that_starts_again_finds_results_and_continues(tmp_path):
    async def before(front: Front):
        run = await front.new_run("r")
        await front.result(await front.submit(run, 1, 7))
        front.backend.gate.clear()
        await front.submit(run, 2, 8)

    front = drive(before, tmp_path, snapshot_steps=100)
    front.engine.listener.close()

    async def after(front: Front):
        assert (await front.result("r:2"))["rows:sum"] == 1
        stepped = await front.result(await front.submit(front.service.catalogue.runs["r"], 3, None))
        assert stepped["metrics"]["steps"] == 1

    assert drive(after, tmp_path).backend.groups == [["r"], ["r"]]


def test_a_run_that_cannot_be_restored_fails_and_the_others_go_on(tmp_path, monkeypatch):
    monkeypatch.setattr(recovery, "PAUSE_SECONDS", 0.01)

    async def work(front: Front):
        a, b = await front.new_run("a"), await front.new_run("b")
        for run in (a, b):
            await front.submit(run, 1, 3)
            await front.result(await front.submit(run, 2, None))
            await until(lambda run=run: run.snapshot is not None)
        (front.state / a.snapshot / "adapter_model.safetensors").unlink()
        await front.lose_engine()
        assert "loss:sum" in await front.result(await front.submit(b, 3, 4))
        found = await front.result(await front.submit(a, 3, 4))
        assert "a" in found["error"]
        assert front.service.catalogue.runs["a"].state == "failed"

    drive(work, tmp_path)


def test_a_key_has_only_so_many_requests_that_wait(tmp_path):
    async def work(front: Front):
        run = await front.new_run("r")
        for seq in (2, 3):
            await front.submit(run, seq, 7)
        with pytest.raises(Refused, match="--max-queued-requests"):
            await front.submit(run, 4, 7)

    drive(work, tmp_path, max_queued_requests=2)


def test_an_error_of_the_server_delays_the_run_at_which_it_happens_alone(tmp_path, monkeypatch):
    async def work(front: Front):
        a, b = await front.new_run("a"), await front.new_run("b")
        tried = asyncio.Event()

        async def keep(run):
            tried.set()
            raise RuntimeError("no checkpoint today")

        monkeypatch.setattr(front.service.scheduler.barriers, "keep", keep)
        front.service.scheduler.end(a.id, "kept")
        await tried.wait()
        await front.submit(b, 1, 3)
        assert "steps" in (await front.result(await front.submit(b, 2, None)))["metrics"]
        assert a.state == "live"
        assert front.service.scheduler.lanes["b"].not_before == 0 < front.service.scheduler.lanes["a"].not_before

    drive(work, tmp_path)


def test_a_run_whose_weights_cannot_be_loaded_takes_no_place_in_the_engine(tmp_path, monkeypatch):
    async def work(front: Front):
        run = await front.new_run("r")
        await front.result(await front.request(run, 1, "save", path="a"))

        def load(model_id, directory, *, optimizer):
            raise CheckpointError("not finite")

        monkeypatch.setattr(front.backend, "load", load)
        other = await front.new_run("other", load="tinker://r/weights/a")
        assert other.state == "failed"
        await until(lambda: set(front.backend.models) == {"r"})

    drive(work, tmp_path)

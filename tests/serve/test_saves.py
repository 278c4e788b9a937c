"""What writes files goes on beside the rounds of passes."""

import asyncio
import threading

from helpers.fronts import Front, drive, take_in, until
from helpers.vector_backend import VectorBackend


def test_a_snapshot_for_a_sampler_does_not_wait_for_the_passes_of_others(tmp_path):
    """Nor does a checkpoint, and nor does the snapshot's first sample."""

    async def work(front: Front):
        a, b = [await front.new_run(name) for name in "ab"]
        front.backend.in_parts = True
        front.backend.gate.clear()
        passed = await front.submit(a, 1, 7)
        assert await asyncio.to_thread(front.backend.entered.wait, 60)
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

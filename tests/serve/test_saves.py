"""What writes files goes on beside the rounds of passes."""

import asyncio
import shutil
import threading

import pytest

from helpers.fronts import Front, drive, take_in, until
from helpers.vector_backend import ADAPTER_FILE, VectorBackend
from recipes.serve.front.futures import PROTOBUF
from recipes.serve.ledger import directories


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


def test_a_run_has_no_snapshot_until_those_for_its_samplers_are_on_disk(tmp_path, monkeypatch):
    """A replay that begins behind them could not write them again. A disk that fails is tried again."""
    told, tried, sync = threading.Event(), [], directories.sync_directory

    def slowly(directory):
        tried.append(directory.name)
        assert told.wait(60)
        if len(tried) == 1:
            raise OSError("the disk does not answer")
        sync(directory)

    monkeypatch.setattr(directories, "sync_directory", slowly)
    monkeypatch.setattr(directories, "RETRY_SECONDS", 0.01)

    async def work(front: Front):
        run = await front.new_run("r")
        await front.result(await front.submit(run, 1, 7))
        await front.result(await front.submit(run, 2, None))
        await until(lambda: run.snapshot is not None)
        await front.result(await front.request(run, 3, "save_for_sampler", sampling_session_seq_id=1))
        await front.result(await front.submit(run, 4, 7))
        await front.result(await front.submit(run, 5, None))
        await until(lambda: (front.state / "runs/1/snapshot-5").exists())
        await front.result(await front.submit(run, 6, 7))
        assert run.snapshot_seq == 2
        told.set()
        await until(lambda: run.snapshot_seq == 5)
        assert tried == ["sampler-3"] * 2

    drive(work, tmp_path)

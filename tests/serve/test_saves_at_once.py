"""Snapshots of several tenants at once do not wait for one another's files."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

from dataproto_server.front import sample_queue
from dataproto_server.ledger import directories
from helpers.fronts import Front, drive, take_in, until


def slow(monkeypatch, module, name):
    """Lets a function of a directory wait until the second event; it sets the first."""
    begun, told = threading.Event(), threading.Event()

    def slowly(directory):
        begun.set()
        assert told.wait(60)

    monkeypatch.setattr(module, name, slowly)
    return begun, told


def test_snapshots_get_their_names_while_the_disk_is_slow(tmp_path, monkeypatch):
    _, told = slow(monkeypatch, directories, "sync_directory")

    async def work(front: Front):
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        runs = [await front.new_run(name) for name in "abcdefgh"]
        asked = [
            await front.request(run, 1, "save_for_sampler", sampling_session_seq_id=number)
            for number, run in enumerate(runs)
        ]
        assert all("sampling_session_id" in each for each in await asyncio.gather(*map(front.result, asked)))
        told.set()

    drive(work, tmp_path)


def test_samples_are_sent_while_the_files_of_a_sampler_are_removed(tmp_path, monkeypatch):
    removing, told = slow(monkeypatch, sample_queue, "remove_directory")

    async def work(front: Front):
        front.service.samples.retire("runs/9/sampler-1")
        assert await asyncio.to_thread(removing.wait, 60)
        await until(lambda: front.service.samples._ready)
        take_in(front)
        await until(lambda: front.backend.submitted == ["k:1"])
        told.set()

    drive(work, tmp_path)

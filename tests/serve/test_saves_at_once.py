"""Snapshots of several tenants at once do not wait for one another's files."""

import asyncio
import threading

from dataproto_server.front import sample_queue
from helpers.fronts import Front, drive, take_in, until


def slow(monkeypatch, module, name):
    """Lets a function of a directory wait until the second event; it sets the first."""
    begun, told = threading.Event(), threading.Event()

    def slowly(directory):
        begun.set()
        assert told.wait(60)

    monkeypatch.setattr(module, name, slowly)
    return begun, told


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

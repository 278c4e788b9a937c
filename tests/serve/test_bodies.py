"""Where the bodies of requests are read from."""

import asyncio
from types import SimpleNamespace

import pytest

from dataproto_server.front import lanes, scheduler
from helpers.fronts import Front, drive


@pytest.mark.parametrize(("kept", "read_again"), [(1 << 20, 0), (0, 2)])
def test_large_bodies_stay_in_memory_as_long_as_there_is_room(tmp_path, monkeypatch, kept, read_again):
    reads = []
    body_of = scheduler.journal.body_of
    monkeypatch.setattr(lanes, "KEPT_BYTES_IN_ALL", kept)
    journal = SimpleNamespace(**vars(scheduler.journal))
    journal.body_of = lambda request: (reads.append(request), body_of(request))[1]
    monkeypatch.setattr(scheduler, "journal", journal)

    async def work(front: Front) -> None:
        run = await front.new_run("a")
        for seq in (1, 2):
            await front.result(await front.submit(run, seq, 5, rows=1000))
        entries = [entry for lane in front.service.scheduler.lanes.values() for entry in lane.entries.values()]
        assert entries == []

    drive(work, tmp_path)
    assert len(reads) == read_again


def test_a_body_that_cannot_be_read_fails_its_own_pass_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(lanes, "KEPT_BYTES_IN_ALL", 0)
    body_of = scheduler.journal.body_of
    journal = SimpleNamespace(**vars(scheduler.journal))

    def damaged(request):
        def fail(connection):
            raise OSError("of the disk")

        return fail if request == "a:1" else body_of(request)

    journal.body_of = damaged
    monkeypatch.setattr(scheduler, "journal", journal)

    async def work(front: Front) -> None:
        runs = [await front.new_run(name) for name in ("a", "b")]
        requests = await asyncio.gather(*(front.submit(run, 1, 5, rows=1000) for run in runs))
        first, second = [await front.result(each) for each in requests]
        assert first["category"] == "server"
        assert "loss:sum" in second

    drive(work, tmp_path)

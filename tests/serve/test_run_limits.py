"""How many runs a key may have in training, requests for runs that come again, and how many requests may wait."""

import asyncio
import json
from unittest.mock import patch

import pytest

from dataproto_server.ledger.records import Session
from dataproto_server.refusals import Refused
from dataproto_server.routes.training_routes import create_model, retrieve_future
from helpers.fronts import Front, drive

ONE = {"max_runs": 1}
FULL = "this key has 1 runs in training: finish a session (--max-runs 1)"


async def new_session(front: Front, name: str) -> None:
    made = Session(id=name, owner="ann", created=0.0)
    front.service.catalogue.sessions[name] = made
    await front.service.catalogue.write(made)


async def create(front: Front, session: str, number: int, rank: int = 4) -> dict:
    """What a client gets that asks for a run."""
    given = {"session_id": session, "model_seq_id": number, "base_model": "tiny/vector", "lora_config": {"rank": rank}}
    request = (await create_model(front.call(**given)))["request_id"]
    return json.loads((await retrieve_future(front.call(request_id=request))).body)


def test_a_run_beyond_the_limit_is_refused_by_the_same_words_when_its_request_comes_again(tmp_path):
    async def work(front: Front):
        await new_session(front, "s")
        assert (await create(front, "s", 0))["model_id"] == "s:train:0"
        for _ in range(2):
            assert await create(front, "s", 1) == {"error": FULL, "category": "user"}
        with pytest.raises(Refused, match="with another content"):
            await create(front, "s", 1, rank=8)
        assert (await create(front, "s", 0))["model_id"] == "s:train:0"

    async def after(front: Front):  # by another process
        assert await create(front, "s", 1) == {"error": FULL, "category": "user"}

    drive(work, tmp_path, **ONE).engine.listener.close()
    drive(after, tmp_path, **ONE).engine.listener.close()


def nothing_fits(front: Front):
    """No request can be taken in."""
    refused = Refused(429, "too much waits")
    return patch.object(front.service.scheduler.requests, "_check_room", side_effect=refused)


async def refused_at_first(front: Front, session: str, number: int) -> None:
    with nothing_fits(front), pytest.raises(Refused, match="too much waits"):
        await create(front, session, number)


def test_the_limit_holds_for_a_request_that_comes_again_because_too_much_waited(tmp_path):
    async def work(front: Front):
        await new_session(front, "s")
        assert (await create(front, "s", 0))["model_id"] == "s:train:0"
        await refused_at_first(front, "s", 1)
        assert await create(front, "s", 1) == {"error": FULL, "category": "user"}

    drive(work, tmp_path, **ONE)


def test_a_run_whose_request_never_came_again_does_not_count_when_its_session_has_ended(tmp_path):
    async def work(front: Front):
        await new_session(front, "s")
        await new_session(front, "t")
        await refused_at_first(front, "s", 0)
        assert await create(front, "t", 0) == {"error": FULL, "category": "user"}  # it may still come
        await front.service.lifecycle.end_session(front.service.catalogue.sessions["s"], "finished")
        assert (await create(front, "t", 1))["model_id"] == "t:train:1"

    drive(work, tmp_path, **ONE)


@pytest.mark.parametrize(("limit", "taken"), [({"max_queued_requests": 2}, 2), ({"max_queued_mb": 1}, 3)])
def test_requests_that_come_at_the_same_time_count_before_they_are_on_disk(tmp_path, limit, taken):
    async def work(front: Front):
        run = await front.new_run("r")  # whose request 1 never comes
        body = b"{" + b" " * 300_000 + b"}"
        sent = (front.service.scheduler.accept(run, seq, "optim_step", body) for seq in range(2, 8))
        found = await asyncio.gather(*sent, return_exceptions=True)
        refusals = [each for each in found if not isinstance(each, str)]
        assert len(found) - len(refusals) == taken
        assert all(isinstance(each, Refused) and each.status == 429 for each in refusals)
        (lane,) = front.service.scheduler.lanes.values()
        assert len(lane.entries) == taken

    drive(work, tmp_path, **limit)

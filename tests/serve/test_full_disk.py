"""A disk that cannot be written: requests fail by name in a bounded time, and all goes on when there is room again."""

import asyncio
import json
import os
import sqlite3
import threading
import time
from contextlib import closing
from functools import partial
from unittest.mock import Mock, patch

import numpy as np
import pytest
from starlette.testclient import TestClient

from dataproto_server.front import barriers
from dataproto_server.front.service import DATABASE_FILE
from dataproto_server.ledger import database, records
from dataproto_server.ledger.records import Checkpoint, Session
from dataproto_server.routes import gate
from dataproto_server.routes.application import application
from dataproto_server.routes.training_routes import create_model
from helpers.fronts import Front, drive, until

NAMED = "the server could not write to its disk for 0.3 s: attempt to write a readonly database"
FULL = {"snapshot_steps": 100}


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(database, "DISK_SECONDS", 0.3)
    monkeypatch.setattr(database, "RETRY_SECONDS", 0.1)


def fill(front: Front, full: bool = True) -> None:
    """Lets all writes of the database fail, as on a full disk, until it is called with ``False``."""
    front.service.database.run_now(lambda db: db.execute(f"PRAGMA query_only = {int(full)}"))


async def failure_of(front: Front, request: str) -> dict:
    found = await front.result(request)
    assert found["error"].startswith(NAMED), found
    return found


def files(front: Front) -> list:
    """Of all runs. A directory can be removed meanwhile, which `Path.rglob` takes for an error."""
    return [name for _, _, names in os.walk(front.state / "runs") for name in names]


async def stepped(front: Front, run, seq: int, token: int = 7) -> dict:
    await front.result(await front.submit(run, seq, token))
    return (await front.result(await front.submit(run, seq + 1, None)))["metrics"]


def test_results_that_cannot_be_written_fail_and_count_for_nothing(tmp_path):
    async def before(front: Front):
        run, other = await front.new_run("r"), await front.new_run("q")
        await stepped(front, run, 1)
        await stepped(front, other, 1)
        front.backend.gate.clear()
        requests = [await front.submit(run, 3, 8), await front.submit(run, 4, None), await front.submit(run, 5, 9)]
        fill(front)
        front.backend.gate.set()
        began = time.monotonic()
        assert [(await failure_of(front, each))["category"] for each in requests] == ["server"] * 3
        assert time.monotonic() - began < 20
        fill(front, False)
        found = await stepped(front, run, 6)
        assert found["steps"] == 2 == (await stepped(front, other, 3))["steps"]
        weights.append(front.backend.models["r"].weights.copy())

    async def after(front: Front):
        run = front.service.catalogue.runs["r"]
        assert (await stepped(front, run, 8))["steps"] == 3
        weights.append(front.backend.models["r"].weights.copy())

    weights: list[np.ndarray] = []
    drive(before, tmp_path, **FULL).engine.listener.close()
    drive(after, tmp_path, **FULL).engine.listener.close()  # what has failed has failed here too

    async def undisturbed(front: Front):
        run = await front.new_run("r")
        for seq in (1, 3, 5):
            await stepped(front, run, seq)
            weights.append(front.backend.models["r"].weights.copy())

    (tmp_path / "other").mkdir()
    drive(undisturbed, tmp_path / "other", **FULL)
    disturbed, others = weights[:2], weights[2:]
    assert all(np.array_equal(a, b) for a, b in zip(disturbed, others[1:], strict=True))


def filling(front: Front, write):
    """What lets the disk be full from now on, and then writes."""

    def and_fill(*arguments, **options):
        fill(front)
        return write(*arguments, **options)

    return and_fill


@pytest.mark.parametrize("kind", ["save", "save_for_sampler", "save_external"])
def test_a_checkpoint_that_cannot_be_recorded_leaves_the_engine_to_the_others(tmp_path, monkeypatch, kind):
    fields = {"sampling_session_seq_id": 1} if kind == "save_for_sampler" else {"path": "one"}
    threads = []
    remove = barriers.remove_directory
    monkeypatch.setattr(
        barriers, "remove_directory", lambda path: (threads.append(threading.get_ident()), remove(path))
    )

    async def work(front: Front):
        run, other = await front.new_run("r"), await front.new_run("q")
        await stepped(front, run, 1)
        await stepped(front, other, 1)
        models = dict(front.backend.models)
        method = "save" if kind == "save" else "export"
        monkeypatch.setattr(front.backend, method, filling(front, getattr(front.backend, method)))
        await failure_of(front, await front.request(run, 3, kind, **fields))
        await until(lambda: threads and not files(front))
        monkeypatch.undo()
        fill(front, False)
        assert (await stepped(front, run, 4))["steps"] == 2 == (await stepped(front, other, 3))["steps"]
        assert all(front.backend.models[name] is models[name] for name in models)
        assert "engine_losses" not in front.service.counters.sums
        assert threading.get_ident() not in threads  # large files are not removed on the event loop

    drive(work, tmp_path, **FULL)


@pytest.mark.parametrize("kind", ["save", "save_for_sampler"])
def test_a_checkpoint_that_cannot_be_recorded_leaves_no_files(tmp_path, kind):
    fields = {"path": "one"} if kind == "save" else {"sampling_session_seq_id": 1}

    async def work(front: Front):
        run = await front.new_run("r")
        await stepped(front, run, 1)
        method = "save" if kind == "save" else "export"
        setattr(front.backend, method, filling(front, getattr(front.backend, method)))
        await failure_of(front, await front.request(run, 3, kind, **fields))
        while files(front):  # a moment after the answer
            await asyncio.sleep(0.01)
        fill(front, False)
        delattr(front.backend, method)
        found = await front.result(await front.request(run, 4, kind, **fields))
        assert "error" not in found
        assert files(front)

    drive(work, tmp_path, **FULL)


def test_another_program_that_holds_the_database_delays_an_update_and_is_named_to_clients(
    tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(database, "DISK_SECONDS", 60)
    front = Front(tmp_path, **FULL)
    key = {"X-API-Key": (tmp_path / "api-key").read_text().strip()}
    sent = {"tags": [], "sdk_version": "0.38.0"}
    with TestClient(application(front.service), headers=key) as client:
        submit, stepped_here = client.portal.call, partial(client.portal.call, stepped, front)
        run = submit(front.new_run, "r")
        assert stepped_here(run, 1)["steps"] == 1
        requests = [submit(front.submit, run, 3, 7)]
        submit(front.result, requests[0])
        front.service.database.run_now(lambda db: db.execute("PRAGMA busy_timeout=100"))
        front.backend.gate.clear()
        front.backend.entered.clear()
        waiting = submit(front.submit, run, 4, 8)
        assert front.backend.entered.wait(60)
        with closing(sqlite3.connect(tmp_path / DATABASE_FILE, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            front.backend.gate.set()
            refused = client.post("/api/v1/create_session", json=sent)
            assert (refused.status_code, refused.json()["detail"]) == (
                429,
                "the server cannot write to its database: another program holds it (database is locked); end that program",
            )
            while "is tried again: database is locked" not in caplog.text:  # the result of the pass
                time.sleep(0.01)
            other.execute("ROLLBACK")
        assert "error" not in submit(front.result, waiting)
        assert stepped_here(run, 5)["steps"] == 2
        assert client.post("/api/v1/create_session", json=sent).status_code == 200
        assert "engine_losses" not in front.service.counters.sums
    front.engine.listener.close()


def test_an_error_of_the_database_that_is_not_of_the_disk_is_an_incident(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(gate, "ERROR_SECONDS", 0)
    front = Front(tmp_path, **FULL)
    key = {"X-API-Key": (tmp_path / "api-key").read_text().strip()}
    with TestClient(application(front.service), headers=key) as client:
        front.service.database.run_now(lambda db: db.execute("ALTER TABLE sessions RENAME TO others"))
        found = client.post("/api/v1/create_session", json={"tags": [], "sdk_version": "0.38.0"})
    assert (found.status_code, "in the server, incident" in found.json()["detail"]) == (500, True)
    (said,) = [each for each in caplog.records if each.message.startswith("incident")]
    assert "no such table" in str(said.exc_info[1])
    front.engine.listener.close()


def test_a_run_that_cannot_be_recorded_is_no_run_and_clients_are_told_to_try_again(tmp_path):
    front = Front(tmp_path, **FULL)
    key = {"X-API-Key": (tmp_path / "api-key").read_text().strip()}
    with TestClient(application(front.service), headers=key) as client:
        session = client.post("/api/v1/create_session", json={"tags": [], "sdk_version": "0.38.0"}).json()["session_id"]
        body = {"session_id": session, "model_seq_id": 0, "base_model": "tiny/vector", "lora_config": {"rank": 4}}
        fill(front)
        refused = client.post("/api/v1/create_model", json=body)
        assert (refused.status_code, refused.json()["detail"][:38]) == (429, "the server cannot write to its disk: a")
        assert client.post("/api/v1/session_heartbeat", json={"session_id": session}).status_code == 200
        assert front.service.catalogue.runs == {}
        fill(front, False)
        request = client.post("/api/v1/create_model", json=body).json()["request_id"]
        found = client.post("/api/v1/retrieve_future", json={"request_id": request})
        assert json.loads(found.content)["model_id"] == f"{session}:train:0"
    front.engine.listener.close()


def test_what_cannot_be_written_is_in_memory_as_on_disk(tmp_path):
    front = Front(tmp_path, **FULL)
    key, catalogue = {"X-API-Key": (tmp_path / "api-key").read_text().strip()}, front.service.catalogue
    owner = front.service.keys.owner(key["X-API-Key"])
    with TestClient(application(front.service), headers=key) as client:
        session = client.post("/api/v1/create_session", json={"tags": [], "sdk_version": "0.38.0"}).json()["session_id"]
        body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "tiny/vector"}
        sampler = client.post("/api/v1/create_sampling_session", json=body).json()["sampling_session_id"]
        values = {"created": 0.0, "expires": None, "public": 0, "size": 0, "metadata": "{}"}
        made = Checkpoint(run="r", kind="weights", name="a", owner=owner, directory="runs/9/weights/a", **values)
        client.portal.call(catalogue.write, made)
        catalogue.checkpoints["r", "weights", "a"] = made
        place = "/api/v1/training_runs/r/checkpoints/weights/a"
        calls = {
            "publish": lambda: client.post(f"{place}/publish"),
            "ttl": lambda: client.put(f"{place}/ttl", json={"ttl_seconds": 100}),
            "join": lambda: client.post("/api/v1/join_sampling_session", json={"sampling_session_id": sampler}),
            "finish": lambda: client.post(f"/api/v1/sessions/{session}/finish", json={"reason": {"type": "success"}}),
            "delete": lambda: client.delete(place),
        }
        fill(front)
        assert {name: each().status_code for name, each in calls.items()} == dict.fromkeys(calls, 429)
        fill(front, False)
        assert catalogue.checkpoints == {("r", "weights", "a"): made}
        assert (made.public, made.expires) == (0, None)
        assert (catalogue.sessions[session].state, list(catalogue.samplers)) == ("live", [sampler])
        found = {name: each() for name, each in calls.items()}
        assert [each.status_code for each in found.values()] == [204, 204, 200, 200, 204]
        assert found["join"].json()["client_counter"] == 1
        assert (made.public, made.expires is not None, catalogue.checkpoints) == (1, True, {})
        assert (catalogue.sessions[session].state, catalogue.samplers) == ("finished", {})
    front.engine.listener.close()


def test_a_request_for_a_run_that_comes_again_waits_for_the_first_one(tmp_path):
    async def work(front: Front):
        made = Session(id="s", owner="ann", created=0.0)
        front.service.catalogue.sessions["s"] = made
        await front.service.catalogue.write(made)
        given = {"session_id": "s", "model_seq_id": 0, "base_model": "tiny/vector", "lora_config": {"rank": 4}}
        busy = threading.Event()
        front.service.database.post(lambda db: busy.wait())
        fails = Mock(side_effect=sqlite3.OperationalError("database or disk is full"))
        with patch.object(records, "put", lambda record: fails):
            first = asyncio.create_task(create_model(front.call(**given)))
            await asyncio.sleep(0.05)
        again = asyncio.create_task(create_model(front.call(**given)))
        await asyncio.sleep(0.05)
        busy.set()
        with pytest.raises(sqlite3.OperationalError):
            await first
        request = json.loads((await again).body)["request_id"]
        assert (await front.result(request))["model_id"] == "s:train:0"
        assert front.service.catalogue.runs["s:train:0"].state == "live"

    drive(work, tmp_path, **FULL)

"""A disk that cannot be written: requests wait, and all continues when there is room again."""

import asyncio
import sqlite3
import threading
from contextlib import closing
from unittest.mock import Mock, patch

import pytest
from starlette.testclient import TestClient

from dataproto_server.front.service import DATABASE_FILE
from dataproto_server.ledger import database, records
from dataproto_server.ledger.records import Session
from dataproto_server.routes import gate
from dataproto_server.routes.application import application
from dataproto_server.routes.training_routes import create_model
from helpers.fronts import Front, drive

FULL = {"snapshot_steps": 100}


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(database, "RETRY_SECONDS", 0.05)


@pytest.mark.parametrize("kind", ["save", "save_for_sampler", "optim_step"])
def test_requests_wait_while_another_program_holds_the_database(tmp_path, caplog, kind):
    """They count once, and heartbeats are answered meanwhile."""
    fields = {
        "save": {"path": "one"},
        "save_for_sampler": {"sampling_session_seq_id": 1},
        "optim_step": {"adam_params": {}},
    }

    async def work(front: Front):
        run = await front.new_run("r")
        front.service.database.run_now(lambda db: db.execute("PRAGMA busy_timeout=10"))
        front.backend.gate.clear()
        front.backend.entered.clear()
        waiting = [await front.submit(run, 1, 7), await front.request(run, 2, kind, **fields[kind])]
        assert await asyncio.to_thread(front.backend.entered.wait, 60)
        with closing(sqlite3.connect(tmp_path / DATABASE_FILE, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            front.backend.gate.set()
            while "and requests wait: end the other program that holds it" not in caplog.text:
                await asyncio.sleep(0.01)
            assert not any(front.service.futures.pending[each].outcome for each in waiting)
            other.execute("ROLLBACK")
        found = [await front.result(each) for each in waiting]
        assert not any("error" in each for each in found)
        assert front.backend.models["r"].steps == int(kind == "optim_step")
        assert not front.service.counters["engine_losses_total"]

    drive(work, tmp_path, **FULL)


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


def test_a_request_for_a_run_that_comes_again_waits_for_the_first_one(tmp_path):
    async def work(front: Front):
        made = Session(id="s", owner="ann", created=0.0)
        front.service.catalogue.sessions["s"] = made
        await front.service.catalogue.write(made)
        given = {"session_id": "s", "model_seq_id": 0, "base_model": "tiny/vector", "lora_config": {"rank": 4}}
        busy = threading.Event()
        front.service.database.post(lambda db: busy.wait())
        fails = Mock(side_effect=RuntimeError("no such value"))
        with patch.object(records, "put", lambda record: fails):
            first = asyncio.create_task(create_model(front.call(**given)))
            await asyncio.sleep(0.05)
        again = asyncio.create_task(create_model(front.call(**given)))
        await asyncio.sleep(0.05)
        busy.set()
        with pytest.raises(RuntimeError):
            await first
        request = (await again)["request_id"]
        assert (await front.result(request))["model_id"] == "s:train:0"
        assert front.service.catalogue.runs["s:train:0"].state == "live"

    drive(work, tmp_path, **FULL)

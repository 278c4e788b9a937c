"""Who may come in, what is read of their bodies, and what stays in memory for them."""

import asyncio
import json
import socket
import threading
import urllib.error
import urllib.request

import pytest

from dataproto.chunks import EncodedTextChunk
from dataproto_server.backend import SampleRequest, Sampling, Snapshot
from dataproto_server.front.futures import Futures
from dataproto_server.ledger.journal import Outcome
from dataproto_server.ledger.records import Sampler
from dataproto_server.refusals import Refused
from dataproto_server.routes import gate
from helpers.fronts import Front, drive
from helpers.servers import call


def status_of(server, path: str, headers: dict[str, str], method: str = "GET") -> int:
    request = urllib.request.Request(server.url + path, headers=headers, method=method)
    try:
        return urllib.request.urlopen(request, timeout=60).status
    except urllib.error.HTTPError as error:
        return error.code


@pytest.mark.slow
@pytest.mark.parametrize("line", ["POST /nowhere", "GET /api/v1/healthz", "POST /api/v1/create_session"])
def test_who_has_no_key_is_answered_before_a_body_comes(server, line):
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(f"{line} HTTP/1.1\r\nHost: x\r\nContent-Length: 60000000\r\n\r\n".encode())
        found = connection.recv(12).decode()
    assert found == ("HTTP/1.1 200" if "healthz" in line else "HTTP/1.1 401")


@pytest.mark.slow
def test_a_signature_in_other_letters_is_refused(server):
    assert status_of(server, "/files/r/external_weights/a/b?expires=9999999999&signature=%C3%A9", {}) == 403


def test_a_large_body_is_read_beside_the_event_loop(monkeypatch):
    threads = []

    def parse(body):
        threads.append(threading.get_ident())
        return {}

    monkeypatch.setattr(gate, "parse_json", parse)

    async def read(size: int):
        await gate.Call(None, None, "ann", bytes(size)).json()

    asyncio.run(read(100))
    asyncio.run(read(gate.LARGE_BODY + 1))
    assert [each == threading.get_ident() for each in threads] == [True, False]


def test_results_that_nobody_fetches_stay_within_the_bytes_of_their_key():
    futures = Futures(most_bytes=100)
    for name, sampler in (("r:1", None), ("k:1", "k"), ("k:2", "k"), ("k:3", "k")):
        futures.open(name, "ann", sampler)
    futures.open("other:1", "bob", "other")
    futures.resolve("other:1", Outcome(bytes(90)))
    for name in ("r:1", "k:1", "k:2"):
        futures.resolve(name, Outcome(bytes(30)))
    assert len(futures.pending) == 5
    futures.pending["k:2"].fetched = True
    futures.resolve("k:3", Outcome(bytes(20)))  # 110: the one on disk goes, then the fetched one
    assert set(futures.pending) == {"k:1", "k:3", "other:1"}
    futures.forget(float("inf"))
    assert futures.pending == {}


def test_the_bodies_of_samples_count_too(tmp_path):
    async def work(front: Front):
        values = {"base_model": "tiny/vector", "model_path": None, "directory": None, "digest": "", "created": 0.0}
        sampler = Sampler(id="k", session="s", owner="ann", run=None, own=0, **values)

        def take_in(number: int, size: int) -> None:
            request = SampleRequest(f"k:{number}", Snapshot("tiny/vector"), [EncodedTextChunk([3])], 1, Sampling(4))
            front.service.samples.take_in(request, sampler, size)

        take_in(1, 600_000)
        with pytest.raises(Refused, match="--max-queued-mb"):
            take_in(2, 600_000)
        take_in(3, 100_000)

    drive(work, tmp_path, max_queued_mb=1)


def done(server, name: str, **fields) -> dict:
    status, found = call(server, name, **fields)
    assert status == 200, found
    return call(server, "retrieve_future", request_id=found["request_id"])[1]


def exported(server) -> tuple[str, str]:
    """A run with an export, and the path of its addresses."""
    session = call(server, "create_session", tags=[], sdk_version="0.38.0")[1]["session_id"]
    model = {"session_id": session, "model_seq_id": 0, "base_model": "tiny/vector", "lora_config": {"rank": 4}}
    run = done(server, "create_model", **model)["model_id"]
    assert "path" in done(server, "save_weights_external", model_id=run, seq_id=1, path="out")
    return run, f"/api/v1/training_runs/{run}/checkpoints/external_weights/out"


@pytest.mark.slow
def test_addresses_of_files_are_those_of_a_proxy_on_this_machine(server):
    _, path = exported(server)
    for proxied, scheme in (({"X-Forwarded-Proto": "https"}, "https"), ({}, "http")):
        urls = urls_of(server, path, **proxied)
        assert urls
        assert all(each.startswith(f"{scheme}://127.0.0.1:") for each in urls.values()), urls


def urls_of(server, path: str, **headers: str) -> dict[str, str]:
    request = urllib.request.Request(
        f"{server.url}{path}/external_weights_urls", headers={"X-API-Key": server.key, **headers}
    )
    found: dict[str, str] = json.loads(urllib.request.urlopen(request, timeout=60).read())["urls"]
    return found


@pytest.mark.slow
def test_the_address_of_a_deleted_file_opens_no_later_one_of_its_name(server):
    run, path = exported(server)
    address = urls_of(server, path)["adapter_model.safetensors"].removeprefix(server.url)
    assert status_of(server, address, {}) == 200
    assert status_of(server, path, {"X-API-Key": server.key}, "DELETE") == 204
    assert "path" in done(server, "save_weights_external", model_id=run, seq_id=2, path="out")
    assert status_of(server, address, {}) == 403
    fresh = urls_of(server, path)["adapter_model.safetensors"].removeprefix(server.url)
    assert status_of(server, fresh, {}) == 200

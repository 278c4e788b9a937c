"""Frames between the processes, and calls of an engine over a real socket."""

import asyncio
import pickle
import socket
import threading

import numpy as np
import pytest

from dataproto.chunks import EncodedTextChunk, ImageChunk
from dataproto_server.backend import Datum, Failure, LoraSpec, Pass, SampleRequest, Sampling, Snapshot, SparseRows
from dataproto_server.engine_link import SIZE, CallFailed, EngineLink, EngineLost, packed
from dataproto_server.engine_process import NOT_SAMPLING, Calls, EngineProcess
from helpers.vector_backend import VectorBackend
from workers.model.model_config import AdamParams

PNG = b"\x89PNG\r\n\x1a\nx"


def test_a_pass_reaches_the_engine_as_it_was_sent():
    sparse = SparseRows(np.array([7]), np.array([0, 1]), np.array([2]), (1, 3))
    texts, inputs = EncodedTextChunk(np.array([1, 2])), {"a": np.ones((2, 2), np.float32), "b": sparse}
    given = Pass("m", [Datum([texts, ImageChunk(PNG, "png", 4)], inputs)], "ppo", {"beta": 0.5}, True)
    size, data = packed(given)
    assert SIZE.unpack(size) == (len(data),)
    read = pickle.loads(data)
    assert (read.model_id, read.loss, read.loss_config, read.forward_only) == ("m", "ppo", {"beta": 0.5}, True)
    assert read.data[0].chunks[1] == ImageChunk(PNG, "png", 4)
    assert read.data[0].chunks[0].ids().tolist() == [1, 2]
    assert read.data[0].inputs["a"].tolist() == [[1, 1], [1, 1]]
    assert read.data[0].inputs["b"].shape == (1, 3)


def test_calls_reach_a_backend_and_its_errors_come_back_with_a_category(tmp_path):
    engine = EngineProcess(VectorBackend(), tmp_path / "socket")
    threading.Thread(target=engine.run, daemon=True).start()
    finished = {}

    async def drive():
        link = EngineLink(tmp_path / "socket", finished.__setitem__)
        await link.connect()
        await link.call("create", model_id="m", base_model="tiny/vector", lora=LoraSpec(4))
        results = await link.call("passes", passes=[Pass("m", [Datum([EncodedTextChunk([1, 2])], {})], "nowhere")])
        assert results[0].category == "user"
        assert (await link.call("optim_step", model_id="m", adam=AdamParams()))["steps"] == 1
        with pytest.raises(CallFailed, match="rank of at most 32") as caught:
            await link.call("create", model_id="n", base_model="tiny/vector", lora=LoraSpec(99))
        assert caught.value.failure.category == "user"
        with pytest.raises(CallFailed, match="KeyError in the server, incident") as caught:
            await link.call("optim_step", model_id="nobody", adam=AdamParams())
        assert caught.value.failure.category == "server"
        for name, adapter in (("a", None), ("b", tmp_path / "nowhere")):
            request = SampleRequest(name, Snapshot("tiny/vector", adapter), [EncodedTextChunk([3])], 1, Sampling(4))
            await link.post("submit", request=request)
            while name not in finished:
                await asyncio.sleep(0.01)
        await link.close()

    asyncio.run(asyncio.wait_for(drive(), 60))
    assert len(finished["a"].samples[0].tokens) == 4
    assert (type(finished["b"]), finished["b"].category) == (Failure, "server")


def test_a_call_ends_when_the_engine_does(tmp_path):
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "socket"))
    listener.listen()
    lost = []

    def answer_reset_and_go():
        connection, _ = listener.accept()
        connection.recv(1 << 16)
        connection.sendall(b"".join(packed({"id": 0, "result": None})))
        connection.recv(1 << 16)
        connection.close()

    threading.Thread(target=answer_reset_and_go, daemon=True).start()

    async def drive():
        link = EngineLink(tmp_path / "socket", lambda request, result: None)
        link.on_lost = lambda: lost.append(True)
        await link.connect()
        with pytest.raises(EngineLost):
            await link.call("describe")
        with pytest.raises(EngineLost):
            await link.call("describe")

    asyncio.run(asyncio.wait_for(drive(), 60))
    assert lost == [True]


class SlowDisk(VectorBackend):
    """Writes files when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.told = threading.Event()

    def export(self, model_id, directory, *, sampled=False, later) -> None:
        def write() -> None:
            assert self.told.wait(30)
            (directory / "weights").write_text(model_id)

        later(write)


def test_calls_go_on_while_files_are_written_and_a_file_that_cannot_be_written_fails_its_call(tmp_path):
    backend = SlowDisk()
    engine = EngineProcess(backend, tmp_path / "socket")
    threading.Thread(target=engine.run, daemon=True).start()

    async def drive():
        link = EngineLink(tmp_path / "socket", lambda *_: None)
        await link.connect()
        await link.call("create", model_id="m", base_model="tiny/vector", lora=LoraSpec(4))
        writing = [
            asyncio.create_task(link.call("export", model_id="m", directory=tmp_path / name))
            for name in (".", "absent")
        ]
        assert (await link.call("optim_step", model_id="m", adam=AdamParams()))["steps"] == 1
        assert not any(each.done() for each in writing)
        backend.told.set()
        assert await writing[0] is None
        assert (tmp_path / "weights").read_text() == "m"
        with pytest.raises(CallFailed, match="FileNotFoundError in the server, incident"):
            await writing[1]
        await link.close()

    asyncio.run(asyncio.wait_for(drive(), 60))


def test_an_adapter_is_written_before_what_trains_and_before_all_that_a_run_has():
    calls = Calls()
    for method in ("passes", "save", "export", "optim_step", "export"):
        calls.put((None, {"method": method}))
    assert calls.training_waits()
    taken = [calls.take("export")[1]["method"]]
    while (call := calls.take(*NOT_SAMPLING)) is not None:
        taken.append(call[1]["method"])
    assert taken == ["export", "export", "save", "passes", "optim_step"]
    assert not calls.training_waits()
    for method in ("export", "passes", "submit", "reset"):
        calls.put((None, {"method": method}))
    assert calls.take(*NOT_SAMPLING)[1]["method"] == "reset"
    assert (calls.take(*NOT_SAMPLING), calls.take("sampling")) == (None, None)

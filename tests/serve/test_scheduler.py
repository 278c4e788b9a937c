"""Order, grouping and replay, with the engine's process as a thread."""

import asyncio
import json
import threading
from pathlib import Path

import numpy as np
import pytest

from dataproto.chunks import EncodedTextChunk
from helpers.vector_backend import VectorBackend
from recipes.serve.backend import SampleRequest, Sampling
from recipes.serve.front import Service
from recipes.serve.front.sample_queue import engine_key
from recipes.serve.ledger import Run, Sampler, Session
from recipes.serve.link.engine_process import EngineProcess
from recipes.serve.refusals import Refused
from recipes.serve.serve_config import ServeConfig
from recipes.serve.wire import SampleCall
from recipes.serve.wire.protobuf_messages import ForwardBackwardOutput, ForwardBackwardRequest

LORA = json.dumps({"rank": 4, "seed": 1})


class Recording(VectorBackend):
    """Notes the models of each call of passes; the calls wait while the gate is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.groups: list[list[str]] = []
        self.entered, self.gate = threading.Event(), threading.Event()
        self.gate.set()

    def passes(self, passes):
        self.entered.set()
        self.gate.wait()
        self.groups.append([each.model_id for each in passes])
        return super().passes(passes)


class Front:
    """A front without HTTP, and an engine that can be lost."""

    def __init__(self, state: Path, **options) -> None:
        self.state, self.socket = state, state / "socket"
        self.backend = self.start_engine()
        settings = {"snapshot_steps": 1, "gap_seconds": 0.05} | options
        self.service = Service(ServeConfig(state=state, **settings), self.socket)

    def start_engine(self) -> Recording:
        backend = Recording()
        self.engine = EngineProcess(backend, self.socket)
        threading.Thread(target=self.engine.run, daemon=True).start()
        return backend

    async def lose_engine(self) -> Recording:
        """Another engine takes the place of this one."""
        self.engine.listener.close()
        self.backend.gate.set()
        self.backend = self.start_engine()
        await self.service.link.close()
        return self.backend

    async def new_run(self, name: str) -> Run:
        if "s" not in self.service.catalogue.sessions:
            session = Session(id="s", owner="ann", created=0.0)
            self.service.catalogue.sessions["s"] = session
            await self.service.catalogue.write(session)
        run = Run(
            id=name,
            number=self.service.catalogue.next_number(),
            session="s",
            owner="ann",
            base_model="tiny/vector",
            lora=LORA,
            metadata="{}",
            created=0.0,
            last_request=0.0,
        )
        self.service.catalogue.runs[name] = run
        await self.service.catalogue.write(run)
        body = {"session_id": "s", "model_seq_id": 0, "base_model": "tiny/vector", "lora_config": json.loads(LORA)}
        await self.result(await self.service.scheduler.accept(run, 0, "create", json.dumps(body).encode()))
        return run

    async def submit(self, run: Run, seq: int, token: int | None) -> str:
        """A pass over a token, or an update."""
        if token is None:
            body = json.dumps({"model_id": run.id, "seq_id": seq, "adam_params": {"learning_rate": 0.1}}).encode()
            return await self.service.scheduler.accept(run, seq, "optim_step", body)
        message = ForwardBackwardRequest(model_id=run.id, seq_id=seq, loss_fn="cross_entropy")
        message.data.add().model_input.add().encoded_text.tokens = np.array([token], np.int32).tobytes()
        return await self.service.scheduler.accept(run, seq, "pass", message.SerializeToString())

    async def result(self, request: str) -> dict:
        outcome = await self.service.futures.wait(request, 60)
        assert outcome is not None, request
        if outcome.media == "application/json":
            return json.loads(outcome.result)
        return dict(ForwardBackwardOutput.FromString(outcome.result).metrics)


def drive(work, state: Path, **options) -> Front:
    front = Front(state, **options)

    async def run():
        front.service.start()
        try:
            await asyncio.wait_for(work(front), 100)
        finally:
            await front.service.stop()

    asyncio.run(run())
    return front


def test_requests_are_carried_out_by_their_numbers_in_whatever_order_they_come(tmp_path):
    async def work(front: Front):
        run = await front.new_run("r")
        later = [await front.submit(run, seq, token) for seq, token in ((4, None), (3, 8), (2, None))]
        first = await front.submit(run, 1, 7)
        assert (await front.result(first))["rows:sum"] == 1
        assert [(await front.result(each)).get("metrics", {}).get("steps") for each in later] == [2, None, 1]
        assert await front.submit(run, 1, 7) == first  # the same request again
        with pytest.raises(Refused, match="with another content"):
            await front.submit(run, 1, 9)

    drive(work, tmp_path)


def test_two_equal_requests_at_the_same_time_are_one(tmp_path):
    async def work(front: Front):
        run = await front.new_run("r")
        ids = await asyncio.gather(*(front.submit(run, 1, 7) for _ in range(5)))
        assert set(ids) == {"r:1"}
        assert (await front.result("r:1"))["rows:sum"] == 1

    assert drive(work, tmp_path).backend.groups == [["r"]]


def test_a_gap_fails_those_that_wait_for_it(tmp_path):
    async def work(front: Front):
        run = await front.new_run("r")
        waiting = await front.submit(run, 3, 7)
        found = await front.result(waiting)
        assert found["category"] == "user"
        assert "request 2 of r has not come" not in found["error"]
        assert "request 1 of r has not come within 0.05 s (--gap-seconds): request 3 waited for it" in found["error"]
        with pytest.raises(Refused, match="comes too late"):
            await front.submit(run, 1, 7)
        assert "loss:sum" in await front.result(await front.submit(run, 4, 7))

    drive(work, tmp_path)


def test_a_replay_keeps_the_groups_in_which_passes_were_computed(tmp_path):
    """The run a is further than b when the engine ends: another adapter takes its place, and b's result is the same."""

    async def work(front: Front):
        a, b = await front.new_run("a"), await front.new_run("b")
        front.backend.gate.clear()
        await front.submit(a, 1, 3)  # computed alone while the others gather behind it
        await asyncio.sleep(0.1)
        requests = [await front.submit(a, 2, 5), await front.submit(b, 1, 6), await front.submit(a, 3, None)]
        front.backend.gate.set()
        expected = [await front.result(each) for each in requests]
        assert front.backend.groups == [["a"], ["a", "b"]]  # b has no snapshot, a has one behind its update
        while a.snapshot is None:  # it is written behind the answer
            await asyncio.sleep(0.01)
        weights, gradient = front.backend.models["a"].weights, front.backend.models["b"].gradient
        fresh = await front.lose_engine()
        stepped = await front.result(await front.submit(b, 2, None))
        assert fresh.groups == [["a:stand-in", "b"]]
        assert (fresh.models["a"].weights == weights).all()
        assert stepped["metrics"]["grad_norm"] == float(np.linalg.norm(gradient))
        assert "a:stand-in" not in fresh.models
        assert expected[0]["rows:sum"] == 1

    drive(work, tmp_path)


def test_a_cancelled_request_for_samples_fails_and_never_reaches_a_busy_engine(tmp_path):
    async def work(front: Front):
        run = await front.new_run("r")
        front.backend.gate.clear()
        await front.submit(run, 1, 3)
        assert await asyncio.to_thread(front.backend.entered.wait, 60)
        sampler = Sampler(
            id="k",
            session="s",
            owner="ann",
            run=None,
            base_model="tiny/vector",
            model_path=None,
            directory=None,
            own=0,
            digest="",
            created=0.0,
        )
        request = SampleRequest("k:1", engine_key(sampler), [EncodedTextChunk([3])], 1, Sampling(4))
        front.service.samples.take_in(SampleCall(request), sampler)
        front.service.samples.cancel("k:1")
        assert (await front.result("k:1"))["error"] == "the client cancelled the request"
        front.backend.gate.set()
        await front.result("r:1")

    assert drive(work, tmp_path).backend.flying == {}


def test_a_front_that_starts_again_finds_results_and_continues(tmp_path):
    async def before(front: Front):
        run = await front.new_run("r")
        await front.result(await front.submit(run, 1, 7))
        front.backend.gate.clear()
        await front.submit(run, 2, 8)

    front = drive(before, tmp_path, snapshot_steps=100)
    front.engine.listener.close()

    async def after(front: Front):
        assert (await front.result("r:2"))["rows:sum"] == 1
        stepped = await front.result(await front.submit(front.service.catalogue.runs["r"], 3, None))
        assert stepped["metrics"]["steps"] == 1

    assert drive(after, tmp_path).backend.groups == [["r"], ["r"]]


def test_a_run_that_cannot_be_restored_fails_and_the_others_go_on(tmp_path):
    async def work(front: Front):
        a, b = await front.new_run("a"), await front.new_run("b")
        for run in (a, b):
            await front.submit(run, 1, 3)
            await front.result(await front.submit(run, 2, None))
            while run.snapshot is None:
                await asyncio.sleep(0.01)
        (Path(a.snapshot) / "adapter_model.safetensors").unlink()
        await front.lose_engine()
        assert "loss:sum" in await front.result(await front.submit(b, 3, 4))
        found = await front.result(await front.submit(a, 3, 4))
        assert "a" in found["error"]
        assert front.service.catalogue.runs["a"].state == "failed"

    drive(work, tmp_path)

"""A front process without HTTP, with the engine's process as a thread."""

import asyncio
import json
import threading
import time
from pathlib import Path

import numpy as np
from starlette.requests import Request

from dataproto.chunks import EncodedTextChunk
from dataproto_server.backend import SampleRequest, Sampling
from dataproto_server.codec import FLOAT32, ForwardBackwardOutput, ForwardBackwardRequest
from dataproto_server.config import LimitsConfig, ServeConfig
from dataproto_server.engine_process import EngineProcess
from dataproto_server.front.service import Service
from dataproto_server.ledger.records import Run, Sampler, Session
from dataproto_server.routes.gate import Call
from helpers.vector_backend import VectorBackend

LORA = json.dumps({"rank": 4, "seed": 1})


class Recording(VectorBackend):
    """Notes the models of each call of passes; the calls wait while the gate is closed, those ``in_parts`` at the end of one."""

    def __init__(self) -> None:
        super().__init__()
        self.groups: list[list[str]] = []
        self.submitted: list[str] = []
        self.entered, self.gate = threading.Event(), threading.Event()
        self.gate.set()
        self.in_parts = False

    def passes(self, passes, **options):
        self.entered.set()
        while not self.gate.wait(0.01 if self.in_parts else None):
            options["between"]()
        self.groups.append([each.model_id for each in passes])
        return super().passes(passes, **options)

    def submit(self, request):
        self.submitted.append(request.request_id)
        super().submit(request)


class Front:
    """A front without HTTP, and an engine that can be lost."""

    def __init__(self, state: Path, **options) -> None:
        self.state, self.socket = state, state / "socket"
        self.backend = self.start_engine()
        limits = LimitsConfig(**{name: options.pop(name) for name in list(options) if name.startswith("max_")})
        settings = {"snapshot_steps": 1, "gap_seconds": 60, "limits": limits} | options
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

    async def new_run(self, name: str, load: str | None = None, session: str = "s") -> Run:
        """A run with initial weights, or those of a checkpoint."""
        if session not in self.service.catalogue.sessions:
            made = Session(id=session, owner="ann", seen=time.monotonic())
            self.service.catalogue.sessions[session] = made
            await self.service.catalogue.write(made)
        run = Run(
            id=name,
            number=next(self.service.catalogue.numbers),
            session=session,
            owner="ann",
            base_model="tiny/vector",
            lora=LORA,
            metadata="{}",
        )
        self.service.catalogue.runs[name] = run
        await self.service.catalogue.write(run)
        if load is not None:
            body = {"session_id": "s", "model_seq_id": 1, "path": load, "optimizer": True}
            await self.result(await self.service.scheduler.accept(run, 0, "load", json.dumps(body).encode()))
            return run
        body = {"session_id": "s", "model_seq_id": 0, "base_model": "tiny/vector", "lora_config": json.loads(LORA)}
        await self.result(await self.service.scheduler.accept(run, 0, "create", json.dumps(body).encode()))
        return run

    async def submit(
        self,
        run: Run,
        seq: int,
        token: int | None,
        *,
        tokens: int = 1,
        rows: int = 1,
        loss: str = "cross_entropy",
        weight: float | None = None,
    ) -> str:
        """A pass over rows of a token, or an update. The pass counts as ``tokens``, and each token of it as ``weight``."""
        if token is None:
            body = json.dumps({"model_id": run.id, "seq_id": seq, "adam_params": {"learning_rate": 0.1}}).encode()
            return await self.service.scheduler.accept(run, seq, "optim_step", body)
        message = ForwardBackwardRequest(model_id=run.id, seq_id=seq, loss_fn=loss)
        for _ in range(rows):
            datum = message.data.add()
            datum.model_input.add().encoded_text.tokens = np.array([token], np.int32).tobytes()
            if weight is not None:
                given = datum.loss_fn_inputs["weights"]
                given.dense, given.dtype = np.array([weight], np.float32).tobytes(), FLOAT32
                given.shape.append(1)
        return await self.service.scheduler.accept(run, seq, "pass", message.SerializeToString(), tokens)

    async def request(self, run: Run, seq: int, kind: str, **fields) -> str:
        """A request in JSON."""
        body = json.dumps({"model_id": run.id, "seq_id": seq} | fields).encode()
        return await self.service.scheduler.accept(run, seq, kind, body)

    def call(self, **fields) -> Call:
        """A request of the key "ann" for a route."""
        return Call(self.service, Request({"type": "http", "headers": []}), "ann", json.dumps(fields).encode())

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


async def until(condition) -> None:
    """Waits; the test's own deadline ends it."""
    while not condition():
        await asyncio.sleep(0.01)


def take_in(front: Front, number: int = 1, directory: str | None = None) -> None:
    """A request for samples, ``k:1``, of the base or of an adapter."""
    sampler = Sampler(
        id="k",
        session="s",
        owner="ann",
        base_model="tiny/vector",
        directory=directory,
    )
    request = SampleRequest(
        f"k:{number}", front.service.samples.snapshot_of(sampler), [EncodedTextChunk([3])], 1, Sampling(4)
    )
    front.service.samples.take_in(request, sampler, 10)

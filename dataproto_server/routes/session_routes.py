"""Sessions and sampling sessions, requests for samples, and what a client asks before it has a session."""

import asyncio
import hashlib
import json
import time
import uuid
from contextlib import nullcontext
from typing import Literal

import msgspec

from dataproto.errors import CheckpointError, raised_as
from dataproto_server.codec import read_sample
from dataproto_server.front.futures import failed
from dataproto_server.json_requests import Body, Int, Metadata, SampleBody, read
from dataproto_server.ledger.directories import check_directory
from dataproto_server.ledger.records import Sampler, Session, join, text
from dataproto_server.refusals import InvalidRequest, NotFound, Refused
from dataproto_server.routes.gate import Answer, Call
from dataproto_server.routes.training_routes import identity_of

TESTED_SDK = "0.38.0"


async def healthz(call: Call) -> Answer:
    return {"status": "ok", "tested_sdk": TESTED_SDK, "engine": call.service.link.connected}


async def client_config(call: Call) -> Answer:
    return {
        "pjwt_auth_enabled": False,
        "parallel_fwdbwd_chunks": True,
        "proto_compress_fwdbwd": False,
        "sample_use_retrieve_futures": False,
        "custom_loss_server_side": False,
        "sample_join_sampling_session": True,
    }


async def dynamic_config(call: Call) -> Answer:
    return {"refresh_interval_sec": 300, "sample_cancel_enabled": True, "sample_cancel_max_batch_size": 64}


async def telemetry(call: Call) -> Answer:
    """Takes a client's events, and forgets them."""
    return {"status": "accepted"}


async def server_capabilities(call: Call) -> Answer:
    able = {"trainable": True, "sampleable": True}
    models = await call.service.models()
    found = [{"model_name": each.name, "max_context_length": each.max_context_length} | able for each in models]
    return {"supported_models": found}


class CreateSession(Body):
    tags: list[str]
    sdk_version: str
    user_metadata: Metadata | None = None
    project_id: str | None = None
    display_name: str | None = None


async def create_session(call: Call) -> Answer:
    asked = await call.read(CreateSession)
    session = Session(
        id=uuid.uuid4().hex,
        owner=call.owner,
        project=asked.project_id,
        display_name=asked.display_name,
        metadata=text(asked.user_metadata),
        tags=json.dumps(asked.tags),
        seen=time.monotonic(),
    )
    await call.service.catalogue.write(session)
    call.service.catalogue.sessions[session.id] = session
    call.notes["sdk"] = asked.sdk_version[:30]
    return {"type": "create_session", "session_id": session.id}


class SessionOnly(Body):
    session_id: str


async def heartbeat(call: Call) -> Answer:
    session = call.service.catalogue.live_session((await call.read(SessionOnly)).session_id, call.owner)
    session.seen = time.monotonic()
    return {"type": "session_heartbeat"}


class FinishReason(Body):
    type: Literal["success", "errored", "interrupted"] = "success"


class FinishSession(Body):
    reason: FinishReason = msgspec.field(default_factory=FinishReason)
    detail: str | None = None


async def finish_session(call: Call) -> Answer:
    asked = await call.read(FinishSession)
    session = call.service.catalogue.session(call.path("session"), call.owner)
    call.notes["reason"] = asked.reason.type
    await call.service.lifecycle.end_session(session, "finished")
    return {"status": "finished"}


async def list_sessions(call: Call) -> Answer:
    mine = [each for each in call.service.catalogue.sessions.values() if each.owner == call.owner]
    mine.sort(key=lambda each: -each.created)
    offset, limit = call.number("offset", 0), call.number("limit", 20)
    return {"sessions": [each.id for each in mine[offset : offset + limit]]}


async def get_session(call: Call) -> Answer:
    catalogue = call.service.catalogue
    session = catalogue.session(call.path("session"), call.owner)
    return {
        "training_run_ids": [run.id for run in catalogue.runs.values() if run.session == session.id],
        "sampler_ids": [each.id for each in catalogue.samplers.values() if each.session == session.id],
        "user_metadata": {key: str(value) for key, value in json.loads(session.metadata).items()},
        "display_name": session.display_name,
    }


async def not_here(call: Call) -> None:
    """Whatever else a client asks for."""
    await asyncio.sleep(0)
    if not call.owner:
        raise Refused(401, "the API key is missing or unknown")
    raise NotFound(f"this server has no {call.request.method} {call.request.url.path[:200]}")


class CreateSampler(Body):
    session_id: str
    sampling_session_seq_id: Int
    base_model: str | None = None
    model_path: str | None = None


async def create_sampling_session(call: Call) -> Answer:
    asked = await call.read(CreateSampler)
    catalogue = call.service.catalogue
    session = catalogue.live_session(asked.session_id, call.owner)
    sampler_id = f"{session.id}:sample:{asked.sampling_session_seq_id}"
    digest = hashlib.sha256(call.body).hexdigest()
    known = catalogue.samplers.get(sampler_id)
    if known is not None:
        if known.digest != digest:
            raise Refused(400, f"sampling session {asked.sampling_session_seq_id} exists with another content")
        return {"type": "create_sampling_session", "sampling_session_id": sampler_id}
    base, directory = await _weights(call, asked)
    sampler = Sampler(
        id=sampler_id,
        session=session.id,
        owner=call.owner,
        base_model=base,
        model_path=asked.model_path,
        directory=directory,
        digest=digest,
    )
    with nullcontext() if directory is None else call.service.samples.hold(directory):
        if directory is not None:
            with raised_as(InvalidRequest, str(asked.model_path), CheckpointError):
                await asyncio.to_thread(check_directory, catalogue.place(directory))
        await catalogue.write(sampler)
        catalogue.samplers[sampler_id] = sampler
    if session.state != "live":  # it has ended meanwhile, with the samplers that it had
        for each in await catalogue.drop_samplers(lambda other: other is sampler):
            call.service.samples.retire(each)
        catalogue.live_session(session.id, call.owner)
    return {"type": "create_sampling_session", "sampling_session_id": sampler_id}


async def _weights(call: Call, asked: CreateSampler) -> tuple[str, str | None]:
    """Base model and adapter of a new sampling session."""
    if asked.model_path is None:
        if asked.base_model is None:
            raise InvalidRequest("create_sampling_session needs a base_model or a model_path")
        return (await call.service.model(asked.base_model)).name, None
    checkpoint = call.service.catalogue.checkpoint(asked.model_path, call.owner)
    base = call.service.catalogue.runs[checkpoint.run].base_model
    if asked.base_model not in (None, base):
        raise InvalidRequest(f"{asked.model_path} is an adapter of {base}, not of {asked.base_model}")
    return base, checkpoint.directory


async def get_sampler(call: Call) -> Answer:
    sampler = call.service.catalogue.sampler(call.path("sampler"), call.owner)
    found = {"sampler_id": sampler.id, "base_model": sampler.base_model}
    return found if sampler.model_path is None else found | {"model_path": sampler.model_path}


class SamplerOnly(Body):
    sampling_session_id: str


async def join_sampling_session(call: Call) -> Answer:
    """A number for a client that shares a sampling session, so that its requests have numbers of their own."""
    catalogue, asked = call.service.catalogue, (await call.read(SamplerOnly)).sampling_session_id
    number = await catalogue.database.run(join(catalogue.sampler(asked, call.owner)))
    if number is None:
        raise Refused(404, f"sampling session {asked!r} has ended")
    return {"type": "join_sampling_session", "client_counter": number}


async def asample(call: Call) -> Answer:
    """Takes in a request for samples. A mistake in it fails its future; the same request again has the same future."""
    given = await call.json()
    sampler_id, seq = identity_of(given, "sampling_session_id", "seq_id")
    sampler = call.service.catalogue.sampler(sampler_id, call.owner)
    request_id = f"{sampler.id}:{seq}"
    call.notes |= {"sampler": sampler.id, "seq": seq}
    futures, digest = call.service.futures, hashlib.sha256(call.body).hexdigest()
    known = futures.pending.get(request_id)
    if known is not None and known.digest != digest:
        raise Refused(400, f"request {seq} of {sampler.id} has come before with another content")
    if known is None:
        try:
            body = read(SampleBody, given)
            arguments = (body, request_id, call.service.samples.snapshot_of(sampler), call.service.config.limits)
            sample = await asyncio.to_thread(read_sample, *arguments) if call.large else read_sample(*arguments)
            if request_id not in futures.pending:  # the same request may have come while this one was read
                call.service.samples.take_in(sample, sampler, len(call.body))
        except InvalidRequest as error:
            futures.open(request_id, call.owner, sampler.id)
            futures.resolve(request_id, failed(str(error), "user"))
        futures.pending[request_id].digest = digest
    ids = [f"{request_id}:{number}" for number in range(futures.pending[request_id].samples)]
    return {"request_id": request_id, "sample_sequence_ids": ids}

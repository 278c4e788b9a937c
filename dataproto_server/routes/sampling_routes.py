"""Sampling sessions, and requests for samples."""

import asyncio
import hashlib
import time
from contextlib import nullcontext

from starlette.responses import Response

from dataproto.errors import CheckpointError
from dataproto_server.front.futures import failed
from dataproto_server.front.sample_queue import engine_key
from dataproto_server.json_requests import CreateSampler, SampleBody, SamplerOnly, read
from dataproto_server.ledger.directories import check_directory
from dataproto_server.ledger.records import Sampler, join
from dataproto_server.refusals import InvalidRequest, Refused
from dataproto_server.routes.gate import Call, answer
from dataproto_server.routes.training_routes import identity_of
from dataproto_server.sample_codec import read_sample


async def create_sampling_session(call: Call) -> Response:
    asked = await call.read(CreateSampler)
    catalogue = call.service.catalogue
    session = catalogue.live_session(asked.session_id, call.owner)
    sampler_id = f"{session.id}:sample:{asked.sampling_session_seq_id}"
    digest = hashlib.sha256(call.body).hexdigest()
    known = catalogue.samplers.get(sampler_id)
    if known is not None:
        if known.digest != digest:
            raise Refused(400, f"sampling session {asked.sampling_session_seq_id} exists with another content")
        return answer({"type": "create_sampling_session", "sampling_session_id": sampler_id})
    base, directory = await _weights(call, asked)
    sampler = Sampler(
        id=sampler_id,
        session=session.id,
        owner=call.owner,
        run=None,
        base_model=base,
        model_path=asked.model_path,
        directory=directory,
        own=0,
        digest=digest,
        created=time.time(),
    )
    with nullcontext() if directory is None else call.service.samples.hold(directory):
        await _check(call, sampler)
        await catalogue.write(sampler)
        catalogue.samplers[sampler_id] = sampler
    if session.state != "live":  # it has ended meanwhile, with the samplers that it had
        for each in await catalogue.drop_samplers(lambda other: other is sampler):
            call.service.samples.retire(each)
        catalogue.live_session(session.id, call.owner)
    return answer({"type": "create_sampling_session", "sampling_session_id": sampler_id})


async def _weights(call: Call, asked: CreateSampler) -> tuple[str, str | None]:
    """Base model and adapter of a new sampling session."""
    if asked.model_path is None:
        if asked.base_model is None:
            raise InvalidRequest("create_sampling_session needs a base_model or a model_path")
        model = await call.service.model(asked.base_model)
        if not model.sampleable:
            raise InvalidRequest(f"model {model.name} cannot be sampled from")
        return model.name, None
    checkpoint = call.service.catalogue.checkpoint(asked.model_path, call.owner)
    base, _ = call.service.catalogue.spec_of(checkpoint)
    if asked.base_model not in (None, base):
        raise InvalidRequest(f"{asked.model_path} is an adapter of {base}, not of {asked.base_model}")
    return base, checkpoint.directory


async def _check(call: Call, sampler: Sampler) -> None:
    """Raises `InvalidRequest` if the files of a checkpoint have changed."""
    if sampler.directory is not None:
        try:
            await asyncio.to_thread(check_directory, call.service.catalogue.place(sampler.directory))
        except CheckpointError as error:
            raise InvalidRequest(f"{sampler.model_path}: {error}") from error


async def get_sampler(call: Call) -> Response:
    sampler = call.service.catalogue.sampler(call.path("sampler"), call.owner)
    found = {"sampler_id": sampler.id, "base_model": sampler.base_model}
    return answer(found if sampler.model_path is None else found | {"model_path": sampler.model_path})


async def join_sampling_session(call: Call) -> Response:
    """A number for a client that shares a sampling session, so that its requests have numbers of their own."""
    catalogue, asked = call.service.catalogue, (await call.read(SamplerOnly)).sampling_session_id
    number = await catalogue.database.run(join(catalogue.sampler(asked, call.owner)))
    if number is None:
        raise Refused(404, f"sampling session {asked!r} has ended")
    return answer({"type": "join_sampling_session", "client_counter": number})


async def asample(call: Call) -> Response:
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
    count = given.get("num_samples", 1)
    if known is None:
        try:
            body = read(SampleBody, given)
            arguments = (body, request_id, engine_key(sampler), call.service.config.limits)
            sample = await asyncio.to_thread(read_sample, *arguments) if call.large else read_sample(*arguments)
            count = body.num_samples
            if request_id not in futures.pending:  # the same request may have come while this one was read
                call.service.samples.take_in(sample, sampler, len(call.body))
        except InvalidRequest as error:
            futures.open(request_id, call.owner, sampler.id)
            futures.resolve(request_id, failed(str(error), "user"))
            count = 1
        futures.pending[request_id].digest = digest
        futures.pending[request_id].samples = count
    ids = [f"{request_id}:{number}" for number in range(futures.pending[request_id].samples)]
    return answer({"request_id": request_id, "sample_sequence_ids": ids})

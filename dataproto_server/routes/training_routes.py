"""Requests that train: each is taken into the journal, and answered with the id of its future."""

import asyncio
import time
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec
from starlette.responses import JSONResponse, Response

from dataproto_server.codec import read_header
from dataproto_server.front.futures import ACTIVE, PAUSED, PendingResult
from dataproto_server.front.service import Service
from dataproto_server.json_requests import Body, CreateModel, LoadWeights, read
from dataproto_server.ledger import journal
from dataproto_server.ledger.journal import Outcome
from dataproto_server.ledger.records import Run, drop, text
from dataproto_server.refusals import InvalidRequest, Refused
from dataproto_server.routes.gate import Answer, Call


async def create_model(call: Call) -> Answer:
    return await _new_run(call, "create", CreateModel)


async def load_weights(call: Call) -> Answer:
    if (await call.json()).get("session_id") is None:
        return await in_order("load", call)
    return await _new_run(call, "load", LoadWeights)


async def _new_run(call: Call, kind: str, form: type[CreateModel] | type[LoadWeights]) -> Answer:
    """Makes a run, and takes in its first request, number 0; one that is malformed fails in its turn."""
    given, catalogue = await call.json(), call.service.catalogue
    session_id, number = identity_of(given, "session_id", "model_seq_id")
    run_id = f"{catalogue.live_session(session_id, call.owner).id}:train:{number}"
    asked = None
    with suppress(InvalidRequest):
        asked = read(form, given)
    async with catalogue.making[call.owner]:  # the same request may come again while the run is being written
        if (run := catalogue.runs.get(run_id)) is None:
            run = Run(
                id=run_id,
                number=next(catalogue.numbers),
                session=session_id,
                owner=call.owner,
                base_model=asked.base_model or "" if asked else "",
                lora=text(msgspec.structs.asdict(lora)) if (lora := getattr(asked, "lora_config", None)) else None,
                metadata=text(asked.user_metadata if asked else None),
            )
            await catalogue.write(run)
            if catalogue.sessions[session_id].state != "live":  # it has ended meanwhile, with the runs that it had
                await catalogue.database.run(drop(run))
                catalogue.live_session(session_id, call.owner)
            catalogue.runs[run_id] = run
    return await _accepted(call, run, 0, kind)


async def forward_backward(call: Call) -> Answer:
    header = await asyncio.to_thread(read_header, call.body) if call.large else read_header(call.body)
    run = call.service.catalogue.run(header.model_id, call.owner)
    return await _accepted(call, run, _numbered(header.seq_id), "pass", header.tokens)


async def in_order(kind: str, call: Call) -> Answer:
    """Takes in a request with a place in the order of its run. It is read in its turn: one that is malformed fails then, so that
    no gap stays.
    """
    model, seq = identity_of(await call.json(), "model_id", "seq_id")
    return await _accepted(call, call.service.catalogue.run(model, call.owner), _numbered(seq), kind)


optim_step = partial(in_order, "optim_step")
save_weights = partial(in_order, "save")
save_weights_for_sampler = partial(in_order, "save_for_sampler")
save_weights_external = partial(in_order, "save_external")


def identity_of(given: dict[str, Any], name: str, number: str) -> tuple[str, int]:
    """The fields that say where a request belongs; without them it is refused at once."""
    found, seq = given.get(name), given.get(number)
    if not isinstance(found, str) or type(seq) is not int or not 0 <= seq < 1 << 62:
        raise Refused(400, f"{name} must be a text and {number} a whole number")
    return found, seq


def _numbered(seq: int) -> int:
    if seq < 1:
        raise Refused(400, f"seq_id={seq}: the requests of a run are numbered from 1")
    return seq


async def _accepted(call: Call, run: Run, seq: int, kind: str, tokens: int = 0) -> Answer:
    call.notes |= {"run": run.id, "seq": seq}
    request_id = await call.service.scheduler.accept(run, seq, kind, call.body, tokens)
    return {"request_id": request_id, "model_id": run.id}


# Results


class RetrieveFuture(Body):
    request_id: str
    allow_metadata_only: bool = False


async def retrieve_future(call: Call) -> Response:
    """Waits for a result: 408 with the state of the queue if it takes long, and 410 if the server does not know the request."""
    asked = await call.read(RetrieveFuture)
    call.notes["request"] = asked.request_id[:200]
    outcome = await _outcome(call.service, asked.request_id, call.owner)
    known = call.service.futures.pending.get(asked.request_id)  # none if it was answered and dropped a moment ago
    if outcome is None:
        return _not_yet(call.service, asked.request_id, known)
    if known is not None:
        known.fetched = True
    if known is None or known.sampler is None:
        call.service.database.later(journal.fetched(asked.request_id, time.time()))
    return Response(outcome.result, media_type=outcome.media)


async def _outcome(service: Service, request_id: str, owner: str) -> Outcome | None:
    known = service.futures.pending.get(request_id)
    if known is not None and known.owner == owner:
        return await service.futures.wait(request_id, service.config.poll_seconds)
    run = service.catalogue.runs.get(request_id.rpartition(":")[0])
    if known is None and run is not None and run.owner == owner:
        found = await service.database.run(journal.find(request_id))
        if found is not None and found[2] is not None:
            return found[2]
    raise Refused(410, f"request {request_id[:200]!r} is not known: send it again")


def _not_yet(service: Service, request_id: str, known: PendingResult | None) -> Response:
    lane = service.scheduler.lanes.get(request_id.rpartition(":")[0])
    state = ACTIVE if service.link.connected and not (lane and lane.resting) else PAUSED
    body = {"type": "try_again", "request_id": request_id, "queue_state": state}
    body["queue_state_reason"] = "" if known is None else known.reason()
    return JSONResponse(body, 408)


class RequestOnly(Body):
    request_id: str


async def cancel_future(call: Call) -> Answer:
    """Drops a request for samples; one that trains keeps its place, and nothing happens."""
    request = (await call.read(RequestOnly)).request_id
    known = call.service.futures.pending.get(request)
    if known is not None and known.owner == call.owner and known.sampler is not None:
        call.service.samples.cancel(request)
    return {}


class ModelOnly(Body):
    model_id: str


async def get_info(call: Call) -> Answer:
    run = call.service.catalogue.run((await call.read(ModelOnly)).model_id, call.owner)
    model = await call.service.model(run.base_model)
    data = {"model_name": model.name}
    if model.tokenizer:
        data["tokenizer_id"] = model.tokenizer
    return {
        "type": "get_info",
        "model_id": run.id,
        "model_name": model.name,
        "model_data": data,
        "is_lora": run.lora is not None,
        "lora_rank": run.spec.rank if run.spec else None,
        "optimizer_config": {"type": "adamw"},
    }

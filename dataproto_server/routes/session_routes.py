"""Sessions, and what a client asks before it has one."""

import asyncio
import json
import time
import uuid

from starlette.responses import Response

from dataproto_server.json_requests import CreateSession, FinishSession, SessionOnly
from dataproto_server.ledger.records import Session, text
from dataproto_server.refusals import NotFound, Refused
from dataproto_server.routes.gate import Call, answer

FLAGS = {
    "pjwt_auth_enabled": True,  # the client exchanges its key for a token, which tells `whoami` who it is
    "parallel_fwdbwd_chunks": True,
    "proto_compress_fwdbwd": False,
    "sample_use_retrieve_futures": False,
    "custom_loss_server_side": False,
    "sample_join_sampling_session": True,
}
DYNAMIC_FLAGS = {"refresh_interval_sec": 300, "sample_cancel_enabled": True, "sample_cancel_max_batch_size": 64}
TESTED_SDK = "0.38.0"


async def healthz(call: Call) -> Response:
    return answer({"status": "ok", "tested_sdk": TESTED_SDK, "engine": call.service.link.connected})


async def client_config(call: Call) -> Response:
    return answer(FLAGS)


async def dynamic_config(call: Call) -> Response:
    return answer(DYNAMIC_FLAGS)


async def auth_token(call: Call) -> Response:
    """Returns a token that is valid for one hour in place of the key. A token is exchanged for itself: it makes no later one."""
    key, keys = call.request.headers["x-api-key"], call.service.keys
    return answer({"jwt": key if keys.is_token(key) else keys.token(call.owner, time.time())})


async def telemetry(call: Call) -> Response:
    """Takes a client's events, and forgets them."""
    return answer({"status": "accepted"})


async def server_capabilities(call: Call) -> Response:
    models = (await call.service.capabilities()).models
    return answer(
        {
            "supported_models": [
                {
                    "model_name": model.name,
                    "max_context_length": model.max_context_length,
                    "trainable": model.trainable,
                    "sampleable": model.sampleable,
                }
                for model in models
            ]
        }
    )


async def create_session(call: Call) -> Response:
    asked = await call.read(CreateSession)
    session = Session(
        id=uuid.uuid4().hex,
        owner=call.owner,
        created=time.time(),
        project=asked.project_id,
        display_name=asked.display_name,
        metadata=text(asked.user_metadata),
        tags=json.dumps(asked.tags),
        seen=time.monotonic(),
    )
    await call.service.catalogue.write(session)
    call.service.catalogue.sessions[session.id] = session
    call.notes["sdk"] = asked.sdk_version[:30]
    return answer({"type": "create_session", "session_id": session.id})


async def heartbeat(call: Call) -> Response:
    session = call.service.catalogue.live_session((await call.read(SessionOnly)).session_id, call.owner)
    session.seen = time.monotonic()
    return answer({"type": "session_heartbeat"})


async def finish_session(call: Call) -> Response:
    asked = await call.read(FinishSession)
    session = call.service.catalogue.session(call.path("session"), call.owner)
    call.notes["reason"] = asked.reason.type
    await call.service.lifecycle.end_session(session, "finished")
    return answer({"status": "finished"})


async def list_sessions(call: Call) -> Response:
    mine = [each for each in call.service.catalogue.sessions.values() if each.owner == call.owner]
    mine.sort(key=lambda each: -each.created)
    offset, limit = call.number("offset", 0), call.number("limit", 20)
    return answer({"sessions": [each.id for each in mine[offset : offset + limit]]})


async def get_session(call: Call) -> Response:
    catalogue = call.service.catalogue
    session = catalogue.session(call.path("session"), call.owner)
    return answer(
        {
            "training_run_ids": [run.id for run in catalogue.runs.values() if run.session == session.id],
            "sampler_ids": [each.id for each in catalogue.samplers.values() if each.session == session.id],
            "user_metadata": {key: str(value) for key, value in json.loads(session.metadata).items()},
            "display_name": session.display_name,
        }
    )


async def not_here(call: Call) -> Response:
    """Whatever else a client asks for."""
    await asyncio.sleep(0)
    if not call.owner:
        raise Refused(401, "the API key is missing or unknown")
    raise NotFound(f"this server has no {call.request.method} {call.request.url.path[:200]}")

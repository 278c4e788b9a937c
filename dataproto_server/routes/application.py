"""The process that clients talk to: all routes of the server. It imports no torch."""

import logging
import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse, Response
from starlette.routing import BaseRoute

from dataproto_server.config import parse
from dataproto_server.engine_process import end_with_parent
from dataproto_server.front.service import Service
from dataproto_server.routes import checkpoint_routes as checkpoints
from dataproto_server.routes import session_routes as sessions
from dataproto_server.routes import training_routes as training
from dataproto_server.routes.gate import Call, Handler, gated


async def metrics(call: Call) -> Response:
    numbers = call.service.numbers()
    return PlainTextResponse("".join(f"dataproto_serve_{name} {value:g}\n" for name, value in numbers.items()))


API = "/api/v1"
CHECKPOINT = "/training_runs/{run}/checkpoints/{kind}/{name}"
ROUTES: dict[str, dict[str, Handler]] = {
    "POST": {  # they are compared with a path in this order: those that come most often first
        "/retrieve_future": training.retrieve_future,
        "/forward_backward": training.forward_backward,
        "/optim_step": training.optim_step,
        "/asample": sessions.asample,
        "/session_heartbeat": sessions.heartbeat,
        "/client/config": sessions.client_config,
        "/client/dynamic_config": sessions.dynamic_config,
        "/create_session": sessions.create_session,
        "/sessions/{session}/finish": sessions.finish_session,
        "/telemetry": sessions.telemetry,
        "/create_model": training.create_model,
        "/get_info": training.get_info,
        "/save_weights": training.save_weights,
        "/save_weights_for_sampler": training.save_weights_for_sampler,
        "/save_weights_external": training.save_weights_external,
        "/load_weights": training.load_weights,
        "/cancel_future": training.cancel_future,
        "/create_sampling_session": sessions.create_sampling_session,
        "/join_sampling_session": sessions.join_sampling_session,
        "/weights_info": checkpoints.weights_info,
        f"{CHECKPOINT}/publish": checkpoints.publish,
    },
    "GET": {
        "/get_server_capabilities": sessions.server_capabilities,
        "/sessions": sessions.list_sessions,
        "/sessions/{session}": sessions.get_session,
        "/samplers/{sampler}": sessions.get_sampler,
        "/training_runs": checkpoints.list_runs,
        "/training_runs/{run}": checkpoints.get_run,
        "/training_runs/{run}/checkpoints": checkpoints.list_run_checkpoints,
        "/checkpoints": checkpoints.list_checkpoints,
        f"{CHECKPOINT}/external_weights_urls": checkpoints.external_weights_urls,
    },
    "DELETE": {CHECKPOINT: checkpoints.delete_checkpoint, f"{CHECKPOINT}/publish": checkpoints.publish},
    "PUT": {f"{CHECKPOINT}/ttl": checkpoints.set_ttl},
}


def application(service: Service) -> Starlette:
    """The server of a service, which starts and stops with it."""
    routes: list[BaseRoute] = [
        *(gated(method, f"{API}{path}", each) for method, paths in ROUTES.items() for path, each in paths.items()),
        gated("GET", f"{API}/healthz", sessions.healthz, public=True),
        gated("GET", "/files/{run}/{kind}/{name}/{file}", checkpoints.download, public=True),
        gated("GET", "/metrics", metrics),
        *(gated(method, "/{rest:path}", sessions.not_here, public=True) for method in ROUTES),
    ]

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        service.start()
        yield
        await service.stop()

    app = Starlette(routes=routes, lifespan=lifespan)
    app.state.service = service
    return app


KEEP_ALIVE_SECONDS = 75
SWITCH_SECONDS = 0.0005
"""For which the event loop may keep other threads waiting: a commit takes the interpreter's lock many times. Python has 5 ms."""


def main(arguments: Sequence[str], engine_socket: str, listener: int, parent_pipe: int) -> None:
    """Serves on a socket that listens already, which the process that started this one holds open across restarts."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    end_with_parent(parent_pipe)
    sys.setswitchinterval(SWITCH_SECONDS)
    os.umask(0o077)
    uvicorn.run(
        application(Service(parse(arguments), Path(engine_socket))),
        fd=listener,
        access_log=False,
        log_level="warning",
        server_header=False,
        ws="none",
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=3,  # seconds
    )

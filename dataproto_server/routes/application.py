"""All routes of the server."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.routing import BaseRoute

from dataproto_server.front.service import Service
from dataproto_server.routes import checkpoint_routes as checkpoints
from dataproto_server.routes import run_page
from dataproto_server.routes import sampling_routes as sampling
from dataproto_server.routes import session_routes as sessions
from dataproto_server.routes import training_routes as training
from dataproto_server.routes.gate import Handler, gated

API = "/api/v1"
CHECKPOINT = "/training_runs/{run}/checkpoints/{kind}/{name}"
POSTS: dict[str, Handler] = {  # they are compared with a path in this order: those that come most often first
    "/retrieve_future": training.retrieve_future,
    "/forward_backward": training.forward_backward,
    "/optim_step": training.optim_step,
    "/asample": sampling.asample,
    "/session_heartbeat": sessions.heartbeat,
    "/client/config": sessions.client_config,
    "/client/dynamic_config": sessions.dynamic_config,
    "/auth/token": sessions.auth_token,
    "/create_session": sessions.create_session,
    "/sessions/{session}/finish": sessions.finish_session,
    "/telemetry": sessions.telemetry,
    "/create_custom_loss": training.create_custom_loss,
    "/create_model": training.create_model,
    "/get_info": training.get_info,
    "/save_weights": training.save_weights,
    "/save_weights_for_sampler": training.save_weights_for_sampler,
    "/save_weights_external": training.save_weights_external,
    "/load_weights": training.load_weights,
    "/retrieve_futures": training.retrieve_futures,
    "/cancel_future": training.cancel_future,
    "/create_sampling_session": sampling.create_sampling_session,
    "/join_sampling_session": sampling.join_sampling_session,
    "/weights_info": checkpoints.weights_info,
    "/copy_weights": checkpoints.copy_weights,
    f"{CHECKPOINT}/publish": checkpoints.publish,
}
GETS: dict[str, Handler] = {
    "/get_server_capabilities": sessions.server_capabilities,
    "/sessions": sessions.list_sessions,
    "/sessions/{session}": sessions.get_session,
    "/samplers/{sampler}": sampling.get_sampler,
    "/training_runs": checkpoints.list_runs,
    "/training_runs/{run}": checkpoints.get_run,
    "/training_runs/{run}/checkpoints": checkpoints.list_run_checkpoints,
    "/checkpoints": checkpoints.list_checkpoints,
    f"{CHECKPOINT}/external_weights_urls": checkpoints.external_weights_urls,
}
OTHERS: list[tuple[str, str, Handler]] = [
    ("DELETE", CHECKPOINT, checkpoints.delete_checkpoint),
    ("DELETE", f"{CHECKPOINT}/publish", checkpoints.unpublish),
    ("PUT", f"{CHECKPOINT}/ttl", checkpoints.set_ttl),
]


def application(service: Service) -> Starlette:
    """The server of a service, which starts and stops with it."""
    routes: list[BaseRoute] = [
        *(gated("POST", f"{API}{path}", handler) for path, handler in POSTS.items()),
        gated("GET", f"{API}/healthz", sessions.healthz, public=True),
        gated("GET", "/files/{run}/{kind}/{name}/{file}", checkpoints.download, public=True),
        gated("GET", "/metrics", run_page.metrics, page=True),
        gated("GET", "/", run_page.page, page=True),
        *(gated("GET", f"{API}{path}", handler) for path, handler in GETS.items()),
        *(gated(method, f"{API}{path}", handler) for method, path, handler in OTHERS),
        *(gated(method, "/{rest:path}", sessions.not_here, public=True) for method in ("GET", "POST", "PUT", "DELETE")),
    ]

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        service.start()
        yield
        await service.stop()

    app = Starlette(routes=routes, lifespan=lifespan)
    app.state.service = service
    return app

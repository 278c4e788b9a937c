"""The endpoint that agents talk to: HTTP on localhost, with a key for each episode, in a thread of its own.

It reads and writes wires. What the replies are is decided elsewhere: each request is put into an inbox with a future.
"""

import asyncio
import json
import secrets
import socket
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from hashlib import blake2b
from queue import SimpleQueue
from typing import Any

from dataproto.errors import InvalidConfig, raised_as
from dataproto.extras import require_extra
from rollout.agents.messages import Ask, Refused, Reply
from rollout.agents.wire_replies import WIRES, Body, Wire, anthropic_error, openai_error

HOST = "127.0.0.1"
START_SECONDS = 10.0
KEEP_ALIVE_SECONDS = 24 * 3600
"""An agent may send its next request on an old connection just as it is closed, so none is closed before the endpoint is."""


MOST_BYTES = 1 << 28
"""Of a request."""


def require_endpoint() -> None:
    """Raises `MissingPackage` if the extra ``agents`` is not installed."""
    require_extra("agents", "the endpoint of agents", "starlette", "uvicorn")


@dataclass(frozen=True)
class Asked:
    """A request of an episode. Its future gets one reply for each of ``ask.n``, or the `Refused` that is answered."""

    episode: int
    ask: Ask
    replies: "Future[list[Reply]]"


@dataclass
class _Door:
    """What a key opens."""

    episode: int
    open: bool = True
    asked: dict[bytes, "Future[list[Reply]]"] = field(default_factory=dict)  # by the digest of the body


class Endpoint:
    """A server that is up within its context.

    >>> from queue import SimpleQueue
    >>> with Endpoint(SimpleQueue(), "policy") as endpoint:
    ...     endpoint.url.startswith("http://127.0.0.1:")
    True
    """

    def __init__(self, inbox: "SimpleQueue[Any]", model: str) -> None:
        """``inbox`` gets an `Asked` for each request; ``model`` is the name that `/v1/models` tells.

        Raises:
            MissingPackage: the extra ``agents`` is not installed.
        """
        require_endpoint()
        self.inbox, self.model = inbox, model
        self._doors: dict[str, _Door] = {}
        self._lock = threading.Lock()

    def open(self, episode: int) -> str:
        """A new key, for the requests of an episode."""
        key = f"sk-{secrets.token_urlsafe(24)}"
        with self._lock:
            self._doors[key] = _Door(episode)
        return key

    def shut(self, key: str) -> None:
        """Refuses further requests with this key."""
        self._doors[key].open = False

    @property
    def url(self) -> str:
        """The address without ``/v1``, as Anthropic's clients take it."""
        return f"http://{HOST}:{self._socket.getsockname()[1]}"

    def __enter__(self) -> "Endpoint":
        import uvicorn

        self._socket = socket.create_server((HOST, 0), backlog=2048)
        settings: dict[str, Any] = {"log_config": None, "lifespan": "off", "timeout_graceful_shutdown": 1, "ws": "none"}
        settings["timeout_keep_alive"] = KEEP_ALIVE_SECONDS
        self.app = self._app()
        self._server = uvicorn.Server(uvicorn.Config(self.app, **settings))
        serve = {"sockets": [self._socket]}
        self._thread = threading.Thread(target=self._server.run, kwargs=serve, name="agent endpoint", daemon=True)
        self._thread.start()
        for _ in range(int(START_SECONDS / 0.002)):
            if self._server.started:
                return self
            self._thread.join(0.002)
        raise InvalidConfig(f"the endpoint of agents did not start on {HOST} within {START_SECONDS:g} seconds")

    def __exit__(self, *error: object) -> None:
        self._server.should_exit = True
        self._thread.join(START_SECONDS)
        self._socket.close()

    def _app(self) -> Any:
        from starlette.applications import Starlette
        from starlette.responses import JSONResponse
        from starlette.routing import Route

        def unknown(request: Any, error: Exception) -> JSONResponse:
            asked, known = request.url.path, ", ".join(WIRES)
            refused = Refused(f"there is no {request.method} {asked} here, only {known}", None, "not_found", 404)
            told = anthropic_error if asked.startswith("/v1/messages") else openai_error
            return JSONResponse(told(refused), 404)

        routes = [Route(path, self._answer_by(wire), methods=["POST"]) for path, wire in WIRES.items()]
        routes += [Route(path, self._models) for path in ("/v1/models", "/v1/models/{name:path}")]
        return Starlette(routes=routes, exception_handlers={404: unknown, 405: unknown})

    async def _models(self, request: Any) -> Any:
        from starlette.responses import JSONResponse

        model = {"id": self.model, "object": "model", "type": "model", "created": 0, "owned_by": "dataproto"}
        model |= {"display_name": self.model, "created_at": "1970-01-01T00:00:00Z"}
        if "name" in request.path_params:
            return JSONResponse(model)
        page = {"has_more": False, "first_id": self.model, "last_id": self.model}
        return JSONResponse({"object": "list", "data": [model], **page})

    def _answer_by(self, wire: Wire) -> Any:
        from starlette.responses import JSONResponse, Response, StreamingResponse

        async def answer(request: Any) -> Any:
            try:
                self._door(request.headers)  # before anything is read
                ask, future = self._asked(wire, request.headers, request.url.path, await _body(request))
                replies = await asyncio.shield(asyncio.wrap_future(future))
            except Refused as error:
                return JSONResponse(wire.error(error), error.status)
            if ask.stream:
                events = (event.encode() for event in wire.events(ask, replies))
                return StreamingResponse(events, media_type="text/event-stream")
            return Response(json.dumps(wire.body(ask, replies)), media_type="application/json")

        return answer

    def _asked(
        self, wire: Wire, headers: Mapping[str, str], path: str, content: bytes
    ) -> tuple[Ask, "Future[list[Reply]]"]:
        """The request, and the future of its replies. A repeated body that says so gets those of the first one."""
        door = self._door(headers)
        with raised_as(Refused, "the body is not JSON", ValueError, RecursionError):
            body: Body = json.loads(content)
        if not isinstance(body, dict):
            raise Refused("the body is not an object")
        with raised_as(Refused, "a field of the body is of another type than it should be", TypeError, UnicodeError):
            ask = wire.read(body)
        digest = blake2b(path.encode() + content, digest_size=16).digest()
        count = headers.get("x-stainless-retry-count", "0")
        earlier = door.asked.get(digest) if count.isdigit() and int(count) > 0 else None
        if earlier is not None and not (earlier.done() and earlier.exception()):
            return ask, earlier
        if not door.open:
            raise Refused("the episode of this key is over", None, "episode_over")
        future: Future[list[Reply]] = Future()
        door.asked[digest] = future
        self.inbox.put(Asked(door.episode, ask, future))
        return ask, future

    def _door(self, headers: Mapping[str, str]) -> _Door:
        key = headers.get("x-api-key") or headers.get("authorization", "").removeprefix("Bearer ").strip()
        door = self._doors.get(key)
        if door is None:
            raise Refused("the key is not that of an episode", None, "invalid_api_key", 401)
        return door


async def _body(request: Any) -> bytes:
    content = bytearray()
    async for part in request.stream():
        content += part
        if len(content) > MOST_BYTES:
            raise Refused(f"the body has more than {MOST_BYTES >> 20} MiB", None, "request_too_large", 413)
    return bytes(content)

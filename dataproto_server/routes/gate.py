"""What every request passes: the key, the limits of its body, the form of errors, a line in the log and a count."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from dataproto_server.front.service import Service
from dataproto_server.json_requests import Kind, parse_json, read
from dataproto_server.refusals import InvalidRequest, Refused, server_failure

log = logging.getLogger("dataproto.serve.requests")
ERROR_SECONDS = 5.0  # clients repeat a request at once after an error of the server
LARGE_BODY = 1 << 18  # bytes


@dataclass
class Call:
    """A request with its owner and its whole body."""

    service: Service
    request: Request
    owner: str
    body: bytes
    notes: dict[str, Any] = field(default_factory=dict)  # for the log

    async def json(self) -> dict[str, Any]:
        """The body, a large one read in another thread than the event loop's. Raises `InvalidRequest`."""
        return await asyncio.to_thread(parse_json, self.body) if self.large else parse_json(self.body)

    async def read(self, kind: type[Kind]) -> Kind:
        """The body as a dataclass. Raises `InvalidRequest`."""
        return read(kind, await self.json())

    @property
    def large(self) -> bool:
        """It would hold up the event loop to read the body there."""
        return len(self.body) > LARGE_BODY

    def path(self, name: str) -> str:
        return self.request.path_params[name]

    def number(self, name: str, default: int, most: int = 1_000_000_000) -> int:
        """A whole number of the query."""
        text = self.request.query_params.get(name, str(default))
        if not text.isascii() or not text.isdigit() or int(text) > most:
            raise InvalidRequest(f"{name}={text[:50]!r}: must be a whole number of at most {most}")
        return int(text)


Answer = dict[str, Any]
"""A JSON answer."""
Handler = Callable[[Call], Awaitable[Answer | Response | None]]
"""``None`` is an answer without a body, with status 204."""


def gated(method: str, path: str, handler: Handler, *, public: bool = False) -> Route:
    """A route to a handler. Only a public one needs no key."""

    async def endpoint(request: Request) -> Response:
        service: Service = request.app.state.service
        began, notes = time.monotonic(), dict[str, Any]()
        response, owner = await _answered(service, request, handler, public, notes)
        spent = time.monotonic() - began
        details = "".join(f" {name}={value}" for name, value in notes.items())
        line = f"{owner or '-'} {method} {request.scope['path']} {response.status_code} {1000 * spent:.0f} ms{details}"
        log.info("%s", line.encode("unicode_escape").decode())  # a client's text stays in its line
        route = path.removeprefix("/api/v1/")
        service.counters[f'http_requests_total{{route="{route}",status="{response.status_code}"}}'] += 1
        return response

    return Route(path, endpoint, methods=[method])


async def _answered(
    service: Service, request: Request, handler: Handler, public: bool, notes: dict[str, Any]
) -> tuple[Response, str | None]:
    owner = service.keys.owner(request.headers.get("x-api-key"))
    try:
        if owner is None and not public:
            return refusal(401, "the API key is missing or unknown: give it as X-API-Key (TINKER_API_KEY)"), owner
        body = b"" if owner is None else await read_body(request, service.config.limits.max_body_mb << 20)
        notes["bytes"] = len(body)
        found = await handler(Call(service, request, owner or "", body, notes))
        if isinstance(found, Response):
            return found, owner
        return Response(status_code=204) if found is None else JSONResponse(found), owner
    except (Refused, InvalidRequest) as error:
        return refusal(error.status, str(error)), owner
    except asyncio.CancelledError:  # the server stops: clients repeat what has this status
        return refusal(429, "the server is stopping"), owner
    except ClientDisconnect:
        return Response(status_code=499), owner
    except Exception as error:
        failure = server_failure(error)
        await asyncio.sleep(ERROR_SECONDS)
        return refusal(500, failure.message), owner


def refusal(status: int, message: str) -> Response:
    """An error as the SDK reads it."""
    return JSONResponse({"detail": message}, status)


async def read_body(request: Request, most: int) -> bytes:
    """The body. Raises `Refused` if it is larger than ``most`` bytes, or encoded."""
    too_large = Refused(413, f"the body is larger than {most >> 20} MB (--max-body-mb)")
    body, received = bytearray(), 0
    async for part in request.stream():
        received += len(part)
        if received > 8 * most:  # a smaller one is read to its end, so that its sender sees the refusal
            raise too_large
        if received <= most:
            body += part
    if received > most:
        raise too_large
    encoding = request.headers.get("content-encoding", "identity")
    if encoding != "identity":
        raise Refused(415, f"content encoding {encoding[:50]!r}: send the body as it is")
    return bytes(body)

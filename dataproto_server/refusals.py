"""What a client is told: of a request that is refused or cannot be carried out, and of an error of the server."""

import logging
import uuid
from collections.abc import Callable
from typing import Any, TypeVar

from dataproto.errors import DataProtoError, RankFailure, WorkerFailed
from dataproto_server.backend import Failure


class Refused(DataProtoError):
    """A request is refused at once, by an HTTP status of 400 to 499."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class InvalidRequest(DataProtoError, ValueError):
    """A request has its place in the order of its run, but cannot be carried out: its future fails with category ``user``."""

    status = 400


class NotFound(InvalidRequest):
    """What a request names does not exist, or belongs to another key."""

    status = 404


class CallFailed(DataProtoError):
    """A call of the engine failed."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


Result = TypeVar("Result")
log = logging.getLogger("dataproto.serve")


def failure_of(error: Exception) -> Failure:
    """What a client is told of an error. One of the server gets a number, under which the log has its traceback."""
    if isinstance(error, CallFailed):
        return error.failure
    if isinstance(error, DataProtoError) and not isinstance(error, RankFailure | WorkerFailed):
        return Failure(str(error), "user")
    return server_failure(error)


def server_failure(error: Exception) -> Failure:
    """What a client is told of an error of the server: its kind, and the number of its traceback in the log."""
    incident = uuid.uuid4().hex[:8]
    log.error("incident %s", incident, exc_info=error)
    return Failure(f"{type(error).__name__} in the server, incident {incident}: its log has more", "server")


def attempted(work: Callable[..., Result], *given: Any) -> Result | Failure:
    """What a function returns, or why it failed.

    >>> attempted(int, "7")
    7
    """
    try:
        return work(*given)
    except Exception as error:
        return failure_of(error)

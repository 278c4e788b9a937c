"""What the server answers to a request that it does not carry out."""

from dataproto.errors import DataProtoError


class Refused(DataProtoError):
    """A request is refused at once, by an HTTP status of 400 to 499."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class InvalidRequest(DataProtoError, ValueError):
    """A request has its place in the order of its run, but cannot be carried out: its future fails with category ``user``."""


class NotFound(InvalidRequest):
    """What a request names does not exist, or belongs to another key."""

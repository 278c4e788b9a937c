"""Answers that leave the process whole: uvicorn writes the head of an answer and its body with a system call each."""

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol


class JoinedWrites:
    """A transport that writes what it was given in one turn of the event loop together. All else it leaves to another one."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._parts: list[bytes] = []
        self._loop = asyncio.get_running_loop()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Writes some bytes before the event loop waits again."""
        if not self._parts:
            self._loop.call_soon(self._flush)
        if data:
            self._parts.append(data)

    def close(self) -> None:
        """Closes the connection behind what was written."""
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        parts, self._parts = self._parts, []
        if parts and not self._transport.is_closing():
            self._transport.writelines(parts)


class JoiningProtocol(HttpToolsProtocol):
    """uvicorn's HTTP on such a transport: a client reads an answer at once."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(JoinedWrites(transport))  # type: ignore[arg-type]

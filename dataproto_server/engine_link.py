"""The connection between the front process and the engine process, and the front process's end of it.

A message is its size (a little-endian uint64) and its pickle. Both ends are processes of this program, on a socket that only its
user can open: no byte of a client is unpickled.
"""

import asyncio
import itertools
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dataproto.errors import DataProtoError
from dataproto_server.backend import Failure
from dataproto_server.refusals import CallFailed

RETRY_SECONDS = 0.1
SIZE = struct.Struct("<Q")


def packed(message: Any) -> tuple[bytes, bytes]:
    """A message as the two parts that are written one after the other."""
    data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return SIZE.pack(len(data)), data


class EngineLost(DataProtoError, ConnectionError):
    """The engine process ended, or the connection to it broke; what it held in memory is gone."""


class EngineLink:
    """Calls methods of the engine's backend, and hands over finished samples."""

    def __init__(self, path: Path, on_sample: Callable[[str, Any], None]) -> None:
        """
        Args:
            path: of the Unix socket.
            on_sample: is called with the id and the `SampleResult` or `Failure` of each request.
        """
        self.path = path
        self.on_sample = on_sample
        self.on_lost: Callable[[], None] = lambda: None
        self._ids = itertools.count()
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._writer: asyncio.StreamWriter | None = None
        self._sending = asyncio.Lock()
        self._reading: asyncio.Task[None] | None = None

    @property
    def connected(self) -> bool:
        return self._writer is not None

    async def connect(self) -> None:
        """Connects as soon as there is an engine, and resets it: it may still hold the models of an earlier front process."""
        while self._writer is None:
            try:
                reader, self._writer = await asyncio.open_unix_connection(str(self.path))
            except OSError:
                await asyncio.sleep(RETRY_SECONDS)
        self._reading = asyncio.create_task(self._read(reader))
        await self.call("reset")

    async def call(self, method: str, **arguments: Any) -> Any:
        """The result of a method of the backend.

        Raises:
            CallFailed: it raised.
            EngineLost: the connection broke before the answer came.
        """
        number = next(self._ids)
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        try:
            await self._send({"id": number, "method": method, "arguments": arguments})
            result = await answer
        finally:
            del self._waiting[number]
            if answer.done() and not answer.cancelled():
                answer.exception()  # the error of a call that could not be sent is raised above
        if isinstance(result, Failure):
            raise CallFailed(result)
        return result

    async def post(self, method: str, **arguments: Any) -> None:
        """Calls a method whose result is not wanted. Raises `EngineLost`."""
        await self._send({"id": None, "method": method, "arguments": arguments})

    async def _send(self, message: Any) -> None:
        """Sends a message, in the order of the calls."""
        async with self._sending:
            if self._writer is None:
                raise EngineLost("there is no engine now")
            try:
                self._writer.writelines(packed(message))
                await self._writer.drain()
            except OSError as error:
                raise EngineLost("the engine process has gone") from error

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                (size,) = SIZE.unpack(await reader.readexactly(SIZE.size))
                message = pickle.loads(await reader.readexactly(size))
                if "sample" in message:
                    self.on_sample(message["sample"], message["result"])
                elif (answer := self._waiting.get(message["id"])) is not None and not answer.done():
                    answer.set_result(message["result"])
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            if self._writer is not None:
                self._writer.close()
            self._writer = None
            for answer in self._waiting.values():
                if not answer.done():
                    answer.set_exception(EngineLost("the engine process has gone"))
            self.on_lost()

    async def close(self) -> None:
        """Ends the connection, if there is one."""
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)

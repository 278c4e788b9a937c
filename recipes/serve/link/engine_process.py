"""The process that computes: it carries out the calls of the front process, one at a time, on a `Backend`.

Between two calls that take long it makes a decoding step of all samples in flight.
"""

import importlib
import logging
import os
import queue
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dataproto.errors import DataProtoError, InvalidConfig
from recipes.serve.backend import Backend, SampleRequest
from recipes.serve.link.frames import SIZES, frame_sizes, pack, unpack
from recipes.serve.link.incidents import failure_of

log = logging.getLogger("dataproto.serve.engine")
LONG = ("passes", "optim_step", "save", "load", "export", "create")
SHORT = ("describe", "release", "open_sampler", "close_sampler", "submit", "abort", "reset")
Incoming = tuple[socket.socket, dict[str, Any]]


class EngineProcess:
    """Serves one backend on a Unix socket, to one front process at a time."""

    def __init__(self, backend: Backend, path: Path) -> None:
        self.backend = backend
        self.calls: queue.Queue[Incoming] = queue.Queue()
        self._models: set[str] = set()
        self._samplers: set[str] = set()
        self._flying: dict[str, socket.socket] = {}
        path.unlink(missing_ok=True)
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listener.bind(str(path))
        self.listener.listen(1)
        threading.Thread(target=self._accept, daemon=True).start()

    def run(self) -> None:
        """Carries out calls for ever."""
        while True:
            self.step()

    def step(self) -> None:
        """Waits for a call unless samples are in flight, carries out the short calls and one long one, and decodes a step."""
        long_done = False
        while not long_done:
            try:
                connection, message = self.calls.get(block=not self._flying)
            except queue.Empty:
                break
            long_done = message["method"] in LONG
            self._carry_out(connection, message)
            if self.calls.empty():
                break
        if self._flying:
            self._decode()

    def reset(self) -> None:
        """Forgets all models, samplers and samples in flight."""
        self.backend.abort(list(self._flying))
        self._flying.clear()
        for sampler in sorted(self._samplers):
            self.backend.close_sampler(sampler)
        for model in sorted(self._models):
            self.backend.release(model)
        self._models.clear()
        self._samplers.clear()

    def _carry_out(self, connection: socket.socket, message: dict[str, Any]) -> None:
        try:
            result = self._called(connection, message["method"], message["arguments"])
        except Exception as error:
            result = failure_of(error)
        if message["id"] is not None:
            self._send(connection, {"id": message["id"], "result": result})

    def _called(self, connection: socket.socket, method: str, arguments: dict[str, Any]) -> Any:
        if method == "reset":
            return self.reset()
        if method not in LONG + SHORT:
            raise InvalidConfig(f"there is no method {method!r}")
        if method == "submit":
            return self._submit(connection, arguments["request"])
        result = getattr(self.backend, method)(**arguments)
        if method == "create":
            self._models.add(arguments["model_id"])
        if method == "open_sampler":
            self._samplers.add(arguments["sampler_id"])
        if method == "abort":
            for request in arguments["request_ids"]:
                self._flying.pop(request, None)
        return result

    def _submit(self, connection: socket.socket, request: SampleRequest) -> None:
        self._flying[request.request_id] = connection
        try:
            self.backend.submit(request)
        except Exception as error:
            self._finish(request.request_id, failure_of(error))

    def _decode(self) -> None:
        try:
            done = self.backend.poll()
        except Exception as error:
            failure = failure_of(error)
            self.backend.abort(list(self._flying))
            for request in list(self._flying):
                self._finish(request, failure)
            return
        for result in done:
            request, value = result if isinstance(result, tuple) else (result.request_id, result)
            self._finish(request, value)

    def _finish(self, request: str, value: Any) -> None:
        connection = self._flying.pop(request, None)
        if connection is not None:
            self._send(connection, {"sample": request, "result": value})

    def _send(self, connection: socket.socket, message: Any) -> None:
        try:
            connection.sendall(b"".join(pack(message)))
        except OSError:
            log.info("the front process has gone before it got an answer")

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:  # the listener is closed
                return
            read_frames(connection, lambda message, to=connection: self.calls.put((to, message)))  # type: ignore[misc]


def read_frames(connection: socket.socket, receive: Callable[[Any], None]) -> None:
    """Hands over messages until the connection ends."""
    try:
        with connection.makefile("rb") as file:
            while len(prefix := file.read(SIZES.size)) == SIZES.size:
                header, body = frame_sizes(prefix)
                parts = file.read(header), file.read(body)
                if (len(parts[0]), len(parts[1])) != (header, body):
                    return
                receive(unpack(*parts))
    except (OSError, DataProtoError):
        log.exception("the connection to the front process broke")


def end_with_parent(parent_pipe: int) -> None:
    """Ends this process when the other end of a pipe closes, which happens when the process that started this one ends."""

    def watch() -> None:
        os.read(parent_pipe, 1)
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()


def main(factory: str, options: str, path: str, parent_pipe: int) -> None:
    """Serves the backend that ``module:function`` makes of its options, a text."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s engine %(levelname)s %(message)s")
    end_with_parent(parent_pipe)
    module, _, name = factory.partition(":")
    backend = getattr(importlib.import_module(module), name)(options)
    EngineProcess(backend, Path(path)).run()

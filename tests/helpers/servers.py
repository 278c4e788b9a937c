"""Servers on a state directory, with the backend in NumPy or the real engine: of two processes, or of two threads."""

import hashlib
import json
import os
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import uvicorn

from dataproto_server.command import Supervisor, listening
from dataproto_server.config import parse
from dataproto_server.engine_process import EngineProcess
from dataproto_server.front.service import Service
from dataproto_server.routes.application import application

BACKEND = "helpers.vector_backend:open_backend"
ENGINE = "dataproto_server.engine:engine_from_json"
TESTS = Path(__file__).parents[1]
KEY, OTHER_KEY = "tml-ann", "tml-bob"


class Served:
    """What a client needs of a server."""

    def __init__(self, port: int) -> None:
        self.port, self.url, self.key = port, f"http://127.0.0.1:{port}", KEY


def arguments_of(state: Path, options: Sequence[str]) -> list[str]:
    """The command line of a server with two keys."""
    state.mkdir(parents=True, exist_ok=True)
    keys = state / "keys"
    digests = {name: hashlib.sha256(key.encode()).hexdigest() for name, key in (("ann", KEY), ("bob", OTHER_KEY))}
    keys.write_text("".join(f"{name}: {digest}\n" for name, digest in digests.items()))
    return ["--state", str(state), "--api-keys", str(keys), "--session-seconds", "600", *options]


class Server(Served):
    """A running server of two processes."""

    def __init__(
        self, state: Path, *options: str, options_of_engine: str = "0", factory: str = BACKEND, port: int = 0
    ) -> None:
        path = os.pathsep.join([str(TESTS.parent), str(TESTS), os.environ.get("PYTHONPATH", "")])
        arguments = arguments_of(state, options)
        environment = os.environ | {"PYTHONPATH": path}
        self.supervisor = Supervisor(
            state, "127.0.0.1", port, arguments, factory, options_of_engine, environment=environment
        )
        super().__init__(self.supervisor.port)
        self._stopped = threading.Event()
        self._watch = threading.Thread(target=self.supervisor.run, args=(self._stopped.is_set,), daemon=True)
        self._watch.start()

    def kill(self, *names: str) -> None:
        """``kill -9`` of the front process, the engine process, or both."""
        for name in names:
            getattr(self.supervisor, name).process.kill()

    def close(self) -> None:
        self._stopped.set()
        self._watch.join()
        self.supervisor.close()


@contextmanager
def serving(state: Path, *options: str, **settings) -> Iterator[Server]:
    server = Server(state, *options, **settings)
    try:
        yield server
    finally:
        server.close()


@contextmanager
def serving_in_threads(state: Path, backend: object, *options: str) -> Iterator[Served]:
    """The same server without its supervisor and without processes of its own, which take long to start."""
    engine = EngineProcess(backend, state / "engine")
    threading.Thread(target=engine.run, daemon=True).start()
    listener = listening("127.0.0.1", 0)
    app = application(Service(parse(arguments_of(state, options)), state / "engine"))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", ws="none", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    try:
        yield Served(listener.getsockname()[1])
    finally:
        server.should_exit = True
        thread.join()
        engine.listener.close()


def send(server: Served, path: str, body: bytes, key: str | None = None, **headers: str) -> tuple[int, bytes]:
    given = {"X-API-Key": key or server.key, "Content-Type": "application/json"} | {
        k.replace("_", "-"): v for k, v in headers.items()
    }
    request = urllib.request.Request(server.url + path, body, given, method="POST")
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def call(server: Served, name: str, key: str | None = None, **fields) -> tuple[int, dict]:
    status, body = send(server, f"/api/v1/{name}", json.dumps(fields).encode(), key)
    return status, json.loads(body)

"""A real server of two processes, on a state directory, with the backend in NumPy."""

import hashlib
import json
import os
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dataproto_server.supervisor import Supervisor

BACKEND = "helpers.vector_backend:open_backend"
ENGINE = "dataproto_server.engine:engine_from_json"
TESTS = Path(__file__).parents[1]
KEY, OTHER_KEY = "tml-ann", "tml-bob"


class Server:
    """A running server; ``url`` and ``key`` are what a client needs."""

    def __init__(
        self, state: Path, *options: str, options_of_engine: str = "0", factory: str = BACKEND, port: int = 0
    ) -> None:
        state.mkdir(parents=True, exist_ok=True)
        keys = state / "keys"
        keys.write_text(
            "".join(
                f"{name}: {hashlib.sha256(key.encode()).hexdigest()}\n"
                for name, key in (("ann", KEY), ("bob", OTHER_KEY))
            )
        )
        path = os.pathsep.join([str(TESTS.parent), str(TESTS), os.environ.get("PYTHONPATH", "")])
        arguments = ["--state", str(state), "--api-keys", str(keys), "--session-seconds", "600", *options]
        environment = os.environ | {"PYTHONPATH": path}
        self.supervisor = Supervisor(
            state, "127.0.0.1", port, arguments, factory, options_of_engine, environment=environment
        )
        self.url = f"http://127.0.0.1:{self.supervisor.port}"
        self.key = KEY
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


def send(server: Server, path: str, body: bytes, key: str | None = None, **headers: str) -> tuple[int, bytes]:
    given = {"X-API-Key": key or server.key, "Content-Type": "application/json"} | {
        k.replace("_", "-"): v for k, v in headers.items()
    }
    request = urllib.request.Request(server.url + path, body, given, method="POST")
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def call(server: Server, name: str, key: str | None = None, **fields) -> tuple[int, dict]:
    status, body = send(server, f"/api/v1/{name}", json.dumps(fields).encode(), key)
    return status, json.loads(body)

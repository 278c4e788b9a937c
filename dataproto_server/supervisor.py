"""Starts the two processes of the server, and starts each again when it ends."""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

from dataproto.errors import InvalidConfig, end_after, ending
from recipes.directory_lock import locked

FRONT = "from dataproto_server.routes.application import main; main({arguments!r}, {engine!r}, {listener}, {pipe})"
ENGINE = "from dataproto_server.engine_process import main; main({factory!r}, {options!r}, {engine!r}, {pipe})"
LOOK_SECONDS = 0.1
SHORT_LIFE_SECONDS = 10.0  # a process without a mark that ends sooner than this after its start has failed to start
MOST_FAILURES = 5  # in a row
STOP_SECONDS = 10.0


class Child:
    """A process that is started again when it ends."""

    def __init__(
        self, name: str, code: str, passed: Sequence[int], environment: Mapping[str, str], mark: Path | None = None
    ) -> None:
        """
        Args:
            passed: file descriptors that it inherits.
            mark: a file that it makes when its start is over; a process that ends without it has failed to start.
        """
        self.name, self.code, self.passed, self.environment, self.mark = name, code, passed, environment, mark
        self.failures = 0
        self.start()

    def start(self) -> None:
        """``-P`` keeps the working directory out of the places from which modules are imported."""
        self.began = time.monotonic()
        command = [sys.executable, "-P", "-c", self.code]
        self.process = subprocess.Popen(
            command,
            pass_fds=self.passed,
            env=self.environment,
            start_new_session=True,  # Ctrl-C is for the parent
        )

    def look(self) -> None:
        """Starts the process again if it has ended.

        Raises:
            InvalidConfig: it has failed to start too often.
        """
        if self.process.poll() is None:
            return
        started = self.mark is not None and self.mark.exists()
        short = time.monotonic() - self.began < SHORT_LIFE_SECONDS if self.mark is None else not started
        self.failures = self.failures + 1 if short else 0
        code = self.process.returncode
        if started:
            self.mark.unlink()  # type: ignore[union-attr]
        if short and code > 0 and self.failures >= MOST_FAILURES:
            raise InvalidConfig(f"the {self.name} process cannot start (exit status {code}): see its messages above")
        print(f"the {self.name} process ended ({code}) and starts again", file=sys.stderr, flush=True)
        if short:
            time.sleep(min(2.0**self.failures, 10.0) / 10)
        self.start()

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Supervisor:
    """The listening socket, the lock of the state directory, and both processes.

    The processes end when this one does, by whatever cause: they watch a pipe from it. The socket stays open while the front
    process starts again, so that clients wait and are not refused.
    """

    def __init__(
        self,
        state: Path,
        host: str,
        port: int,
        front_arguments: Sequence[str],
        factory: str,
        options: str,
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        """
        Args:
            front_arguments: the command line of the front process.
            factory: ``module:function`` that makes the engine's backend of ``options``.
            environment: of both processes.

        Raises:
            InvalidConfig: the port is taken, or another server uses the state directory.
        """
        self._stack = ExitStack()
        self._stack.enter_context(locked(state, "give another --state"))
        self.listener = listening(host, port)
        self._stack.callback(self.listener.close)
        self.port: int = self.listener.getsockname()[1]
        self.directory = Path(tempfile.mkdtemp(prefix="dataproto-serve-"))  # of mode 0700, with a short path
        self._stack.callback(shutil.rmtree, self.directory, ignore_errors=True)
        read, write = os.pipe()
        self._stack.callback(os.close, read)
        self._stack.callback(os.close, write)
        engine, listener = str(self.directory / "engine"), self.listener.fileno()
        front = FRONT.format(arguments=list(front_arguments), engine=engine, listener=listener, pipe=read)
        self.front = Child("front", front, [listener, read], environment)
        self._stack.enter_context(ending(self.front.stop))
        code = ENGINE.format(factory=factory, options=options, engine=engine, pipe=read)
        self.engine = Child("engine", code, [read], environment, self.directory / "engine")
        self._stack.enter_context(ending(self.engine.stop))

    def run(self, until: Callable[[], bool] = lambda: False) -> None:
        """Watches both processes. Raises `InvalidConfig` if one cannot start."""
        while not until():
            self.front.look()
            self.engine.look()
            time.sleep(LOOK_SECONDS)

    def close(self) -> None:
        """Ends both processes."""
        self._stack.close()

    def __enter__(self) -> "Supervisor":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        end_after(error, self.close)


def listening(host: str, port: int) -> socket.socket:
    """A socket that listens. Raises `InvalidConfig` if it cannot."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        dual = family == socket.AF_INET6
        found = socket.create_server((host, port), family=family, backlog=2048, dualstack_ipv6=dual)
    except OSError as error:
        raise InvalidConfig(f"{host}:{port} cannot be used ({error}): give another --port or --host") from error
    # Connections inherit it. Without it the body of an answer, written after the head, waits 40 ms for the client's ACK.
    found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return found

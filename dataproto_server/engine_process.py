"""The process that computes: it carries out the calls of the front process, one at a time, on an `InProcessEngine`.

Threads write the files of weights while it carries out other calls: a call that writes some is answered when they are there.

While both have work, training and sampling have the same time: a call that trains, or a part of a joint pass, is followed by
samples that are taken in, and by decoding steps, until these have taken as long.
"""

import faulthandler
import gc
import importlib
import logging
import os
import pickle
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from dataproto_server.backend import Failure, SampleRequest
from dataproto_server.engine_link import SIZE, packed
from dataproto_server.refusals import attempted
from recipes.options import exit_status

log = logging.getLogger("dataproto.serve.engine")
SAMPLING = ("forget", "submit", "abort")
WRITING = ("export", "save")  # in the order in which they are carried out
NOT_SAMPLING = (*WRITING, "training")
"""The kinds of calls that are not for samples, in the order in which they are taken."""
WRITERS = 8  # threads that write files
Incoming = tuple[socket.socket, dict[str, Any]]


class Calls:
    """Calls that wait: those for samples, those that write files, and the others; each kind in its order.

    What writes files comes before the others, and an adapter alone, from which a client may want to sample, before all that a run
    has. Such a call overtakes others. So the front process sends no later call for the same model before it: after a client's
    save it waits for the answer, after a snapshot of a run only until that is sent.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, deque[Incoming]] = {kind: deque() for kind in ("sampling", *NOT_SAMPLING)}
        self._news = threading.Condition()

    def put(self, call: Incoming) -> None:
        """Adds a call. Those before a ``reset`` are dropped: they are of a front process that has gone."""
        method = call[1]["method"]
        kind = method if method in WRITING else "sampling" if method in SAMPLING else "training"
        with self._news:
            if method == "reset":
                for queue in self._waiting.values():
                    queue.clear()
            self._waiting[kind].append(call)
            self._news.notify()

    def wait(self) -> None:
        """Returns when there is a call."""
        with self._news:
            self._news.wait_for(lambda: any(self._waiting.values()))

    def take(self, *kinds: str) -> Incoming | None:
        """Takes out the next call of the first of some kinds of which one waits, or ``None``."""
        with self._news:
            return next((self._waiting[kind].popleft() for kind in kinds if self._waiting[kind]), None)

    def training_waits(self) -> bool:
        """Whether a call that trains, or writes files, waits."""
        with self._news:
            return any(self._waiting[kind] for kind in NOT_SAMPLING)


class EngineProcess:
    """Serves one backend on a Unix socket, to one front process at a time."""

    def __init__(self, backend: Any, path: Path, clock: Callable[[], float] = time.perf_counter) -> None:
        """
        Args:
            clock: seconds, in which training and sampling have equal shares.
        """
        self.backend, self.clock = backend, clock
        self.calls = Calls()
        self._lead = 0.0  # seconds that training has had more than sampling, while both had work
        self._mark = 0.0  # when the current part of a joint pass began
        self._models: set[str] = set()
        self._flying: dict[str, socket.socket] = {}
        self._writers = ThreadPoolExecutor(WRITERS, "writer")
        self._writing: set[Future[None]] = set()
        self._sending = threading.Lock()
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
        """Waits for a call unless samples are in flight, carries out calls until samples have their turn, and decodes a step.

        All adapters that are to be written come first: so the first samples of several come into the same steps.
        """
        if not self._flying:
            self._lead = 0.0
            self.calls.wait()
        self._write_files("export")
        self._take_samples_in()
        while self._lead <= 0 and (call := self.calls.take(*NOT_SAMPLING)) is not None:
            self._mark = self.clock()
            self._carry_out(*call)
            self._lead += self.clock() - self._mark
            self._take_samples_in()
            if not self._flying:
                return
        if self._lead <= 0:  # nothing that trains waits: its share is not saved up
            self._lead = 0.0
        self._decode()

    def _write_files(self, *methods: str) -> None:
        while (call := self.calls.take(*methods)) is not None:
            began = self.clock()
            self._carry_out(*call)
            self._lead += self.clock() - began

    def _between_parts(self) -> None:
        """Writes files, and lets samples have their share, in the midst of a joint pass."""
        self._lead += self.clock() - self._mark
        self._write_files(*WRITING)
        self._take_samples_in(in_a_pass=True)
        while self._flying and self._lead > 0:
            self._decode()
            self._take_samples_in(in_a_pass=True)
        if not self._flying:
            self._lead = 0.0
        self._mark = self.clock()

    def _take_samples_in(self, in_a_pass: bool = False) -> None:
        """Carries out calls for samples, but no more than sampling's share while training waits."""
        while not (waits := in_a_pass or self.calls.training_waits()) or self._lead >= 0:
            if (call := self.calls.take("sampling")) is None:
                return
            began = self.clock()
            self._carry_out(*call)
            if waits:
                self._lead -= self.clock() - began

    def reset(self) -> None:
        """Forgets all models, snapshots and samples in flight, when all files are written."""
        wait(list(self._writing))
        self.backend.abort(list(self._flying))
        self._flying.clear()
        self.backend.forget()
        for model in sorted(self._models):
            self.backend.release(model)
        self._models.clear()

    def _carry_out(self, connection: socket.socket, message: dict[str, Any]) -> None:
        """Carries out a call, and answers it when its files are written, if it writes some."""
        writes: list[Callable[[], None]] = []
        result = attempted(self._called, connection, message["method"], message["arguments"], writes)

        def answer(result: Any) -> None:
            if message["id"] is not None:
                self._send(connection, {"id": message["id"], "result": result})

        if not writes or isinstance(result, Failure):
            answer(result)
            return
        (write,) = writes
        writing = self._writers.submit(lambda: answer(attempted(write)))
        self._writing.add(writing)
        writing.add_done_callback(self._writing.discard)

    def _called(
        self, connection: socket.socket, method: str, arguments: dict[str, Any], writes: list[Callable[[], None]]
    ) -> Any:
        """What a method returns. It may add to ``writes`` what is left of its work, for a thread."""
        if method == "reset":
            return self.reset()
        if method == "submit":
            return self._submit(connection, **arguments)
        if method == "passes":
            return self.backend.passes(**arguments, between=self._between_parts)
        if method in WRITING:
            arguments = arguments | {"later": writes.append}
        result = getattr(self.backend, method)(**arguments)
        if method == "create":
            self._models.add(arguments["model_id"])
        if method == "abort":
            for request in arguments["request_ids"]:
                self._flying.pop(request, None)
        return result

    def _submit(self, connection: socket.socket, request: SampleRequest) -> None:
        """Takes a request in."""
        self._flying[request.request_id] = connection
        if (failure := attempted(self.backend.submit, request)) is not None:
            self._finish(request.request_id, failure)

    def _decode(self) -> None:
        """A decoding step of all samples in flight, if there are any."""
        if not self._flying:
            return
        began = self.clock()
        done = attempted(self.backend.poll)
        if isinstance(done, Failure):
            self.backend.abort(list(self._flying))
            done = dict.fromkeys(self._flying, done)
        self._lead -= self.clock() - began
        for request, value in done.items():
            self._finish(request, value)

    def _finish(self, request: str, value: Any) -> None:
        connection = self._flying.pop(request, None)
        if connection is not None:
            self._send(connection, {"sample": request, "result": value})

    def _send(self, connection: socket.socket, message: Any) -> None:
        try:
            with self._sending:
                connection.sendall(b"".join(packed(message)))
        except OSError:
            log.info("the front process has gone before it got an answer")

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:  # the listener is closed
                return
            read_messages(connection, lambda message, to=connection: self.calls.put((to, message)))  # type: ignore[misc]


def read_messages(connection: socket.socket, receive: Callable[[Any], None]) -> None:
    """Hands over messages until the connection ends."""
    try:
        with connection.makefile("rb") as file:
            while file.read(SIZE.size):
                receive(pickle.load(file))
    except (OSError, EOFError, pickle.UnpicklingError):  # in the midst of a message
        log.exception("the connection to the front process broke")


def end_with_parent(parent_pipe: int) -> None:
    """Ends this process when the other end of a pipe closes, which happens when the process that started this one ends."""

    def watch() -> None:
        os.read(parent_pipe, 1)
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()


def main(factory: str, options: str, path: str, parent_pipe: int, arguments: Sequence[str] = ()) -> None:
    """Serves the backend that ``module:function`` makes of its options, a text. It prints its stacks at ``SIGUSR1``.

    A user's mistake that keeps it from starting is one line on stderr, after the traceback with ``--traceback`` among the
    ``arguments`` of the command, and the exit status 2.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s engine %(levelname)s %(message)s")
    faulthandler.register(signal.SIGUSR1)
    end_with_parent(parent_pipe)
    began = time.perf_counter()
    module, _, name = factory.partition(":")
    with exit_status(arguments, resumes=False) as status:
        backend = getattr(importlib.import_module(module), name)(options)
        backend.start()
    if status.code:
        sys.exit(status.code)
    gc.collect()
    gc.freeze()  # the collector would stop the engine for 0.1 s or more to look through all that is loaded
    log.info("the engine has started in %.1f s", time.perf_counter() - began)
    EngineProcess(backend, Path(path)).run()

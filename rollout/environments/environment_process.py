"""An environment in a process of its own, whose memory is bounded (Linux).

What is bounded is the address space of the process, beyond what it begins with: all that the environment allocates or maps.
Each process that the environment starts has the same bound for itself. Memory of a GPU is not bounded.
"""

import asyncio
import contextlib
import ctypes
import inspect
import multiprocessing
import numbers
import os
import pickle
import pickletools
import resource
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np

from dataproto.errors import InvalidConfig, raised_as
from dataproto.extras import unimportable_modules
from rollout.environments.environment import (
    EnvironmentFailed,
    Failure,
    MakeEnvironment,
    Observation,
    awaited,
    check_observation,
    raised,
)

CLOSING_S = 2.0
"""Seconds that an environment gets to close, and a process to end."""
GIB = 1 << 30
DIE_WITH_PARENT = 1
"""PR_SET_PDEATHSIG of prctl(2)."""

KEPT = numbers.Number | str | np.generic
"""What is kept of ``info``; other values may not be fit for sending."""
Answer = Observation | tuple[Failure, str]
"""Of a call: an observation, or the reason and the message of a failure."""

starting = threading.Lock()
"""Held while a process starts and while an exit status is read: both read exit statuses, and each can be read once."""


def in_process(make_environment: MakeEnvironment, memory_gib: float) -> MakeEnvironment:
    """Makes each environment in a process of its own, with at most ``memory_gib`` for what it allocates there.

    An environment that gets no memory ends its episode as "memory". One that crashes, such as a library that aborts for want of
    memory, ends it as "error". Calls wait without a limit, until the process ends. Processes are forked from a small server, so
    that each starts in milliseconds. As with `multiprocessing`, a script needs ``if __name__ == "__main__":``.

    Raises:
        InvalidConfig: the system is not Linux, or ``make_environment`` cannot be sent to another process.
    """
    if sys.platform != "linux":
        raise InvalidConfig(f"memory_gib={memory_gib}: the memory of environments can be bounded on Linux only")
    what = f"memory_gib={memory_gib} needs an environment that can be sent to another process"
    with raised_as(InvalidConfig, what, Exception):
        pickled = pickled_for_process(make_environment)
    preload(__name__, pickled)
    return lambda: ProcessEnvironment(pickled, round(memory_gib * GIB))


def pickled_for_process(user_object: Any) -> bytes:
    """A user's object as another process can get it. Raises what its pickling raises."""
    for module in unimportable_modules():
        cloudpickle.register_pickle_by_value(module)
    return cloudpickle.dumps(user_object)


def preload(module: str, pickled: bytes) -> None:
    """Lets the server of processes import once what they all need, unless it has begun."""
    named = {value for _, value, _ in pickletools.genops(pickled) if isinstance(value, str) and value in sys.modules}
    named -= {"__main__", *(each.__name__ for each in unimportable_modules())}
    multiprocessing.get_context("forkserver").set_forkserver_preload(["__main__", module, *sorted(named)])


def started(serve: Callable[..., None], *arguments: Any, daemon: bool = False) -> tuple[Connection, Any]:
    """Our end of a connection, and the process that calls ``serve`` with the other end and ``arguments``."""
    context = multiprocessing.get_context("forkserver")
    connection, far = context.Pipe()
    with starting:
        process = context.Process(target=serve, args=(far, *arguments), daemon=daemon)
        process.start()
    far.close()
    return connection, process


class ProcessEnvironment:
    """The near end of an environment in another process."""

    def __init__(self, make_environment: bytes, memory: int) -> None:
        self.memory = memory
        self.connection, self.process = started(_serve, make_environment, memory, daemon=True)

    def reset(self, row: Mapping[str, Any], seed: int) -> Observation:
        """Passes the row on."""
        return self._call("reset", dict(row), seed)

    def step(self, action: str) -> Observation:
        """Passes the action on."""
        return self._call("step", action)

    def close(self) -> None:
        """Closes the environment, and ends its process."""
        with contextlib.suppress(OSError):
            self.connection.send(("close", ()))
        self._end()

    def kill(self) -> None:
        """Ends its process at once, from any thread; a call that waits for it fails."""
        self.process.kill()

    def _call(self, method: str, *arguments: Any) -> Observation:
        try:
            self.connection.send((method, arguments))
            answer: Answer = self.connection.recv()
        except (EOFError, OSError) as error:
            raise EnvironmentFailed("error", f"{method}: {self._end()}") from error
        if isinstance(answer, Observation):
            return answer
        raise EnvironmentFailed(*answer)

    def _end(self) -> str:
        """Waits for the end of the process, or kills it; returns how it ended."""
        return f"its process, which may have {self.memory / GIB:g} GiB, was ended {how_ended(self.process)}"


def how_ended(process: Any) -> str:
    """Waits for the end of a process, or kills it; returns how it ended, such as "with exit status 1"."""
    wait([process.sentinel], CLOSING_S)
    with starting:  # an exit status can be read once, and `start` of another process reads all that there are
        if process.is_alive():
            process.kill()
        process.join(CLOSING_S)
        code = process.exitcode or 0
    return f"by {signal.Signals(-code).name}" if code < 0 else f"with exit status {code}"


# In the other process


def die_with_parent() -> None:
    """The end of the process that forked this one is its end too, on Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(DIE_WITH_PARENT, signal.SIGKILL)


def _serve(connection: Connection, make_environment: bytes, memory: int) -> None:
    """Makes an environment and answers calls until it is closed."""
    die_with_parent()
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    bound, loop = mapped + memory, asyncio.new_event_loop()  # besides its address space so far
    environment: Any = None
    with contextlib.suppress(EOFError):
        while (message := connection.recv())[0] != "close":
            method, arguments = message
            answer: Answer
            _limit(bound)
            try:
                if environment is None:
                    environment = pickle.loads(make_environment)()
                seen = check_observation(_result(loop, environment, method, arguments), method)
                kept = {name: value for name, value in seen.info.items() if isinstance(value, KEPT)}
                answer = replace(seen, info=kept)
            except EnvironmentFailed as failure:
                answer = failure.reason, str(failure)
            except MemoryError:
                answer = "memory", f"{method} needs more than the {memory / GIB:g} GiB that its process may have"
            except BaseException as error:  # also SystemExit
                answer = "error", raised(method, error, environment)
            _limit(None)  # the answer needs some memory too
            connection.send(answer)
        _limit(bound)
        if hasattr(environment, "close"):
            _result(loop, environment, "close", ())


def _result(loop: asyncio.AbstractEventLoop, environment: Any, method: str, arguments: tuple[Any, ...]) -> Any:
    """What a method returns, or its coroutine."""
    found = getattr(environment, method)(*arguments)
    return loop.run_until_complete(awaited(found)) if inspect.isawaitable(found) else found


def _limit(address_space: int | None) -> None:
    """Bounds the address space of this process; ``None``: as far as it may."""
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    bound = most if address_space is None else address_space if most < 0 else min(address_space, most)
    resource.setrlimit(resource.RLIMIT_AS, (bound, most))

"""Agents and their endpoint in a process of their own, where they leave the interpreter to the engine."""

import atexit
import io
import itertools
import multiprocessing
import pickle
import signal
import threading
from collections import defaultdict, deque
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any
from weakref import WeakValueDictionary

import cloudpickle

from dataproto.errors import InvalidConfig, UserFunctionFailed, describe
from rollout.agents.agent import Agent, AgentTask
from rollout.agents.agent_host import AgentHost, Ended, Event, Given
from rollout.agents.endpoint import Asked, require_endpoint
from rollout.agents.messages import Decoded
from rollout.environments.environment_process import die_with_parent, how_ended, pickled_for_process, preload, started

CLOSING_S = 2.0
"""Seconds that agents get to end when a rollout has ended."""
CLOSED = b"closed"
"""What a process says when it can play: when it has begun, and when the agents of the rollout before have ended."""


@dataclass(frozen=True)
class AgentApart:
    """An agent that is called in another process, see `in_process`."""

    pickled: bytes
    at_once: int | None


def in_process(agent: Any) -> AgentApart:
    """The agent in a process of its own, one for each engine, which plays all episodes and has the endpoint.

    An agent that ends its process, as a crash does, ends all episodes that it plays as "error", and further ones get a new
    process. Processes are forked from a small server and kept for later rollouts. As with `multiprocessing`, a script needs
    ``if __name__ == "__main__":``.

    Raises:
        InvalidConfig: the agent cannot be sent to another process, as with an open client in a variable of its file.
    """
    try:
        return AgentApart(pickled_for_process(agent), getattr(agent, "at_once", None))
    except Exception as error:
        raise InvalidConfig(
            f"the agent cannot be sent to a process of its own: {error}. Make what cannot be sent, such as a client, when the "
            "agent is called"
        ) from error


class _Process:
    """A process that plays one rollout at a time. A thread sends messages, so that one that does not read holds up nobody."""

    def __init__(self, agent: bytes) -> None:
        preload(__name__, agent)
        self.connection, self.process = started(_serve, agent, multiprocessing.get_start_method())
        try:
            self.connection.recv_bytes()  # once it has imported what the agent needs, however long that takes
        except (OSError, EOFError):
            how = how_ended(self.process)
            raise UserFunctionFailed(
                f"the process of the agent was ended {how} as it began: standard error says why; a script needs "
                "if __name__ == '__main__'"
            ) from None
        self._outbox: SimpleQueue[bytes | None] = SimpleQueue()
        threading.Thread(target=self._deliver, name="agents", daemon=True).start()
        self._closing = False
        atexit.register(self.end)  # else the end of the program waits for it

    def send(self, *message: Any) -> None:
        """Queues a message. Raises what pickling it raises."""
        self._outbox.put(cloudpickle.dumps(message) if message[0] == "begin" else pickle.dumps(message))

    def _deliver(self) -> None:
        with suppress(OSError):  # the process has ended; `next` tells it
            while (message := self._outbox.get()) is not None:
                self.connection.send_bytes(message)

    def close(self) -> None:
        """Tells it to cancel the agents that still run, and does not wait for it."""
        self.send("close")
        self._closing = True

    def waits(self) -> bool:
        """Waits until its agents have ended. False: one does not give way, or the process has ended."""
        with suppress(OSError, EOFError):
            while self._closing and self.connection.poll(CLOSING_S):
                self._closing = self.connection.recv_bytes() != CLOSED
            return not self._closing
        return False

    def end(self) -> str:
        """Waits for the end of its agents and of itself, then kills it if it has not ended. Returns how it ended."""
        atexit.unregister(self.end)
        self.waits()
        self._outbox.put(None)
        self.connection.close()
        return how_ended(self.process)


_waiting: dict[bytes, list[_Process]] = {}
"""Processes of the last agent, which have imported what it needs."""


class AgentsApart:
    """As `AgentHost`, in another process."""

    def __init__(self, agent: AgentApart) -> None:
        require_endpoint()
        self.agent, self.at_once = agent.pickled, agent.at_once
        self._running, self._failed = set[int](), deque[Ended]()
        self._media: dict[int, dict[bytes, Decoded]] = {}  # that the process has sent, by episode

    def __enter__(self) -> "AgentsApart":
        waiting = _waiting.get(self.agent)
        self._process = waiting.pop() if waiting else _Process(self.agent)
        if not self._process.waits():
            self._process.end()
            self._process = _Process(self.agent)
        self._process.send("open")
        return self

    def __exit__(self, *error: object) -> None:
        """Cancels the agents that still run. The process waits for a later rollout, in the place of those of other agents."""
        self._process.close()
        kept = [*_waiting.pop(self.agent, ()), self._process]
        for other in [process for processes in _waiting.values() for process in processes]:
            other.end()
        _waiting.clear()
        _waiting[self.agent] = kept

    def begin(self, episode: int, given: Given) -> None:
        """See `AgentHost.begin`."""
        self._running.add(episode)
        self._media[episode] = {}
        try:
            self._process.send("begin", episode, given)
        except Exception as error:  # of the row, which is the user's
            self._failed.append(Ended(episode, None, f"its row cannot be sent to the process of the agent: {error}"))

    def end(self, episode: int) -> None:
        """See `AgentHost.end`."""
        self._running.discard(episode)
        self._media.pop(episode, None)
        self._process.send("end", episode)

    def next(self, seconds: float) -> Event | None:
        """See `AgentHost.next`."""
        if self._failed:
            return self._failed.popleft()
        try:
            return self._receive() if self._process.connection.poll(seconds) else None
        except (OSError, EOFError):
            how = self._process.end()
            for episode in self._running:
                self._failed.append(Ended(episode, None, f"the process of the agent was ended {how}"))
            self._running.clear()
            self.__enter__()
            return self._failed.popleft() if self._failed else None

    def _receive(self) -> Event | None:
        number, episode, event = _Unpickler(self._process.connection.recv_bytes(), self._media).load()
        if number is None:
            try:
                return pickle.loads(event)
            except Exception as error:  # raised by the user's classes
                return Ended(episode, None, f"what the agent gave cannot be read by another process: {describe(error)}")
        replies: Future[Any] = Future()
        replies.add_done_callback(partial(_answer, self._process, number))
        return Asked(episode, event, replies)


def _answer(process: _Process, number: int, replies: "Future[Any]") -> None:
    process.send("answer", number, replies.exception() or replies.result())


_contents: WeakValueDictionary[bytes, Decoded] = WeakValueDictionary()
"""Media of all episodes, by their digests."""


class _Unpickler(pickle.Unpickler):
    """Reads an event, with the media that came with earlier ones of its episode."""

    def __init__(self, data: bytes, media: dict[int, dict[bytes, Decoded]]) -> None:
        super().__init__(io.BytesIO(data))
        self.media = media

    def persistent_load(self, pid: Any) -> Any:
        """The medium."""
        episode, digest, content = pid
        known = self.media.get(episode, {})
        if content is not None:
            known[digest] = _contents.setdefault(digest, Decoded(digest, content))
        return known.get(digest)  # none for an episode that has ended


# In the other process


class _Pickler(cloudpickle.Pickler):
    """Writes an event, with the content of media that its episode has not sent."""

    def __init__(self, file: io.BytesIO, episode: int, sent: dict[bytes, Decoded]) -> None:
        super().__init__(file)
        self.episode, self.sent = episode, sent

    def persistent_id(self, obj: Any) -> Any:
        """The episode, digest and content of a medium."""
        if not isinstance(obj, Decoded):
            return None
        content = None if obj.digest in self.sent else obj.content
        self.sent[obj.digest] = obj  # as long as somebody holds it, it is not decoded again
        return self.episode, obj.digest, content


def _serve(connection: Any, pickled: bytes, start_method: str) -> None:
    """Plays one rollout after another. To the agent the process is like any other."""
    die_with_parent()
    multiprocessing.set_start_method(start_method, force=True)
    signal.signal(signal.SIGINT, lambda *_: None)  # the engine's process ends this one
    try:
        agent = pickle.loads(pickled)
    except Exception as error:
        agent = partial(_raise, error)
    stuck = False
    with suppress(EOFError, OSError):
        connection.send_bytes(CLOSED)
        while not stuck:
            if pickle.loads(connection.recv_bytes()) == ("open",):  # other messages are of a rollout that is over
                stuck = _play(connection, agent)
    atexit._run_exitfuncs()  # of the agent's file


def _raise(error: Exception, task: AgentTask) -> None:
    raise error


def _play(connection: Any, agent: Agent) -> bool:
    """One rollout. Returns whether an agent has not given way at its end."""
    asked, over = dict[int, Future[Any]](), threading.Event()
    sent = defaultdict[int, dict[bytes, Decoded]](dict)  # media by their digests, by episode

    def tell() -> None:
        """Sends what agents do, and numbers their requests."""
        numbers = itertools.count()
        while not over.is_set():
            if (event := host.next(0.1)) is None:
                continue
            episode, file = event.episode, io.BytesIO()
            if isinstance(event, Asked):
                number = next(numbers)
                asked[number] = event.replies
                _Pickler(file, episode, sent[episode]).dump((number, episode, event.ask))
            else:
                try:
                    told = cloudpickle.dumps(event)
                except Exception as error:
                    told = pickle.dumps(Ended(episode, None, f"what the agent gave cannot be sent: {describe(error)}"))
                pickle.dump((None, episode, told), file)
            with suppress(OSError):  # the engine's process has ended
                connection.send_bytes(file.getvalue())

    with AgentHost(agent) as host:
        teller = threading.Thread(target=tell, name="events", daemon=True)
        teller.start()
        while (message := pickle.loads(connection.recv_bytes())) != ("close",):
            what, number, *given = message
            if what == "begin":
                host.begin(number, *given)
            elif what == "end":
                host.end(number)
                sent.pop(number, None)
            elif isinstance(given[0], BaseException):
                asked.pop(number).set_exception(given[0])
            else:
                asked.pop(number).set_result(given[0])
    over.set()
    teller.join()
    if not host.stuck:
        connection.send_bytes(CLOSED)
    return host.stuck

"""One engine on several ranks, driven by the first of them.

The ranks of a tensor-parallel engine compute each step together, so they have to make the same calls in the same order. What
depends on time, such as environments that answer while the engine decodes, runs on the first rank, and its calls are repeated on
the others.
"""

import io
import pickle
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from PIL import Image
from torch import Tensor, distributed
from torch.distributed import ProcessGroup

from dataproto.errors import DataProtoError, RankFailure, end_after, not_hiding
from rollout.engine import Completion, Request, RequestEngine, SamplingParams

T = TypeVar("T")


def drive(engine: RequestEngine, group: ProcessGroup | None, play: Callable[[RequestEngine], T]) -> T:
    """The result of ``play(engine)``, which the first rank of the group computes and all return.

    Args:
        group: the ranks of the engine, over gloo; ``None`` if it has one rank.

    Raises:
        RankFailure: ``play`` raised on the first rank. That rank raises the error itself.
    """
    if group is None:
        return play(engine)
    if distributed.get_rank(group):
        return _follow(engine, group)
    leader = _LeadingEngine(engine, group)
    try:
        result = play(leader)
    except BaseException as error:
        end_after(error, partial(leader.send, (False, f"{type(error).__name__}: {error}")))
        raise
    leader.send((True, result))
    return result


def _follow(engine: RequestEngine, group: ProcessGroup) -> Any:
    """Repeats the calls of the first rank, until it sends its result."""
    channel = _Channel(group)
    failure: Exception | None = None
    while True:
        with not_hiding(failure):
            calls, end = channel.broadcast(None)
        for name, arguments in calls:
            with suppress(DataProtoError):  # which the first rank raises as well
                getattr(engine, name)(*arguments)
        if end is not None:
            break
        try:
            engine.poll()
        except Exception as error:
            failure = failure or error
    done, result = end
    if not done:
        raise RankFailure(f"the first rank of the engine failed: {result}")
    if failure is not None:
        raise failure
    return result


class _LeadingEngine:
    """The engine of the first rank. The others learn of calls with the next poll."""

    def __init__(self, engine: RequestEngine, group: ProcessGroup) -> None:
        self._engine, self._channel = engine, _Channel(group)
        self._calls: list[tuple[str, tuple[Any, ...]]] = []

    def submit(self, request: Request, sampling: SamplingParams, keep: bool = False) -> int:
        self._calls.append(("submit", (request, sampling, keep)))
        return self._engine.submit(request, sampling, keep)

    def fork(self, number: int, request: Request, sampling: SamplingParams, keep: bool = False) -> int:
        self._calls.append(("fork", (number, request, sampling, keep)))
        return self._engine.fork(number, request, sampling, keep)

    def abort(self, number: int) -> Completion | None:
        self._calls.append(("abort", (number,)))
        return self._engine.abort(number)

    def poll(self) -> list[Completion]:
        self.send(None)
        return self._engine.poll()

    @property
    def unfinished(self) -> int:
        return self._engine.unfinished

    def send(self, end: tuple[bool, Any] | None) -> None:
        """Sends the calls since the last time and, at the end, the result."""
        calls, self._calls = self._calls, []
        self._channel.broadcast((calls, end))


class _Channel:
    """Messages from the first rank of a group to the others. Each image and tensor object is sent once."""

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group
        self.first = distributed.get_process_group_ranks(group)[0]
        self.sent: dict[int, tuple[int, Any]] = {}  # by identity: its number, and the object, which stays alive
        self.received: list[Any] = []

    def broadcast(self, message: Any) -> Any:
        """The first rank's message, on all ranks."""
        boxes = [self._pack(message) if distributed.get_rank(self.group) == 0 else None]
        distributed.broadcast_object_list(boxes, src=self.first, group=self.group)
        return message if message is not None else self._unpack(boxes[0])

    def _pack(self, message: Any) -> tuple[list[Any], bytes]:
        new: list[Any] = []

        def number_of(value: Any) -> int | None:
            if not isinstance(value, Tensor | Image.Image):
                return None
            if id(value) not in self.sent:
                self.sent[id(value)] = len(self.sent), value
                new.append(value)
            return self.sent[id(value)][0]

        buffer = io.BytesIO()
        pickler = pickle.Pickler(buffer, pickle.HIGHEST_PROTOCOL)
        pickler.persistent_id = number_of  # type: ignore[method-assign]
        pickler.dump(message)
        return new, buffer.getvalue()

    def _unpack(self, packed: Any) -> Any:
        new, data = packed
        self.received += new
        unpickler = pickle.Unpickler(io.BytesIO(data))
        unpickler.persistent_load = self.received.__getitem__  # type: ignore[method-assign]
        return unpickler.load()

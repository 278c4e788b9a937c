"""Batches across the ranks of a process group.

The ranks compare their columns and tell the sizes of their messages before anything is sent. A message is the pickle of a batch
and its buffers (see `dataproto.serialization.wire`), so it has each distinct image, tensor and array once. It is sent as one
tensor ``(n,)`` uint8, which every backend supports, from host memory where the backend can. Gradients are not sent.

Ranks may hold different numbers of rows. An error on one rank, before or after anything is sent, is raised on all. Ranks are
those within the group; ``None`` is the default group. As for all collectives of NCCL, call ``torch.cuda.set_device`` first.
"""

import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor

from dataproto.errors import ColumnConflict, InvalidColumn, InvalidIndex, RankFailure, not_hiding
from dataproto.grouping import grouped_by
from dataproto.ragged import RaggedTensor
from dataproto.transfer import all_gather_equal

MOST_PADDING = 2  # An all-gather may move this many times the bytes of the messages, to be one collective,
LITTLE = 1 << 26  # or this many bytes on each rank.

Batch = TypeVar("Batch")
Result = TypeVar("Result")
_ALIGNMENT = 64
_WITHOUT_DTYPE = {"O": "objects", "U": "strings", "S": "byte strings"}  # by the kind of an array's dtype


def all_gather(data: Batch, group: Any = None, with_facts: bool = True) -> Batch:
    """Returns the rows of all ranks, in rank order, on each of them, on the devices of its own columns.

    ``meta_info`` is merged as by ``concat``: ``metrics`` are collected, ``timing`` keeps the slowest, everything else must agree;
    without ``with_facts`` it is left out. A batch without columns adds no rows.

    Raises:
        ColumnConflict: ranks hold different columns, dtypes or shapes; on all ranks.
        RankFailure: a rank failed, or ``meta_info`` disagrees; on all ranks.
    """
    ranks = GroupRanks.of(group)
    (sent, packed), told = ranks.together(lambda: _prepare(data, with_facts))
    check_alike([forms for forms, _ in told])
    totals, carrier = [sum(map(_padded, sizes)) for _, sizes in told], ranks.carrier()
    received, padded = ranks.agreed(
        lambda: [
            torch.empty(size, dtype=torch.uint8, device=carrier) for size in (sum(totals), ranks.padded_bytes(totals))
        ]
    )
    ranks.gather_bytes(packed.to(carrier), totals, received, padded)

    def joined() -> Any:
        arrived = zip(received.cpu().split(totals), told)
        parts = [
            sent if rank == ranks.rank else _unpickled(part.numpy(), sizes)  # of this rank its own objects
            for rank, (part, (_, sizes)) in enumerate(arrived)
        ]
        return _on_devices_of(data, type(sent).concat(parts))

    return ranks.agreed(joined)  # type: ignore[no-any-return]


def _on_devices_of(data: Any, whole: Any) -> Any:
    for name in data.names():
        if not isinstance(data[name], np.ndarray):
            whole[name] = whole[name].to(data[name].device)
    if data.batch is not None:
        whole.batch = whole.batch.to(data.batch.device) if data.batch.device is not None else whole.batch
    return whole


# A batch as bytes, and back


def _prepare(data: Any, with_facts: bool) -> tuple[tuple[Any, Tensor], tuple[dict[str, str], list[int]]]:
    """The batch on the host without gradients, and its bytes; and what the other ranks are told: forms of columns, and sizes."""
    if not hasattr(data, "check_consistency"):
        raise InvalidColumn(f"a rank sends a DataProto, not a {type(data).__name__}")
    data.check_consistency()
    columns = {name: data[name] for name in data.names()}
    here = {name: each if isinstance(each, np.ndarray) else each.detach().to("cpu") for name, each in columns.items()}
    tensors = {name: each for name, each in here.items() if name not in data.non_tensor_batch}
    batch = None if data.batch is None else TensorDict(tensors, batch_size=data.batch.batch_size)
    arrays = {name: here[name] for name in data.non_tensor_batch}
    sent = type(data)(batch, arrays, dict(data.meta_info) if with_facts else {})
    packed, sizes = _pickled(sent)
    return (sent, packed), ({name: form_of(column) for name, column in columns.items()}, sizes)


def form_of(column: Any) -> str:
    """What ranks must agree on: the kind of a column, its dtype, and the shape of a row or token.

    >>> form_of(torch.zeros(3, 4)), form_of(np.array(["a", None], dtype=object))
    ('tensor torch.float32 (B, 4)', 'objects')
    """
    if isinstance(column, np.ndarray) and (kind := _WITHOUT_DTYPE.get(column.dtype.kind)):
        return kind
    if isinstance(column, Tensor) and (column.is_nested or column.layout != torch.strided):
        return "nested"
    ragged = isinstance(column, RaggedTensor)
    tail = map(str, column.tail if isinstance(column, RaggedTensor) else column.shape[1:])
    kind = "array" if isinstance(column, np.ndarray) else "ragged" if ragged else "tensor"
    return f"{kind} {column.dtype} ({', '.join(['B, n' if ragged else 'B', *tail])})"


def check_alike(told: Sequence[Mapping[str, str]]) -> None:
    """Raises ColumnConflict if the columns of a rank, unless it has none, differ from those of others."""
    holders = {rank: forms for rank, forms in enumerate(told) if forms}
    differing = []
    for name in sorted({name for forms in holders.values() for name in forms}):
        found = {rank: forms.get(name, "absent") for rank, forms in holders.items()}
        if len(set(found.values())) > 1:
            differing.append(f"column {name!r} is {grouped(found)}")
    if differing:
        raise ColumnConflict(f"ranks hold different columns: {'; '.join(differing)}")


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _pickled(value: Any) -> tuple[Tensor, list[int]]:
    """A pickle and its out-of-band buffers in one tensor ``(n,)`` uint8, each aligned; and their sizes."""
    buffers: list[pickle.PickleBuffer] = []
    stream = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    views = [memoryview(stream), *(buffer.raw() for buffer in buffers)]
    sizes = [view.nbytes for view in views]
    packed = torch.zeros(sum(map(_padded, sizes)), dtype=torch.uint8)
    memory, place = packed.numpy(), 0
    for view, size in zip(views, sizes):
        memory[place : place + size] = np.frombuffer(view, dtype=np.uint8) if size else 0
        place += _padded(size)
    return packed, sizes


def _unpickled(memory: np.ndarray, sizes: Sequence[int]) -> Any:
    """The inverse of :func:`_pickled`, over ``memory``."""
    ends = np.cumsum(list(map(_padded, sizes))).tolist()
    views = [memory[end - _padded(size) :][:size] for end, size in zip(ends, sizes)]
    return pickle.loads(views[0].tobytes(), buffers=views[1:])


# The exchange


@dataclass(frozen=True)
class GroupRanks:
    """A process group as this rank sees it.

    Raises:
        InvalidIndex: this process is not in the group.
    """

    group: Any
    rank: int
    size: int

    @classmethod
    def of(cls, group: Any) -> "GroupRanks":
        rank = dist.get_rank(group)
        if rank < 0:
            raise InvalidIndex("this process is not a rank of the group")
        return cls(group, rank, dist.get_world_size(group))

    def together(self, act: Callable[[], tuple[Result, Any]]) -> tuple[Result, list[Any]]:
        """Runs ``act`` on all ranks; returns its result here, and the second value that it returned on each rank.

        Raises:
            RankFailure: it failed on a rank; raised on all ranks, names rank and reason.
        """
        outcome, problem = attempted(act)
        heard = self._heard(None if outcome is None else outcome[1], problem)
        assert outcome is not None
        return outcome[0], heard

    def agreed(self, act: Callable[[], Result]) -> Result:
        """Runs ``act`` on all ranks and returns its result here. Costs one number of traffic unless a rank fails.

        Raises:
            RankFailure: it failed on a rank; raised on all ranks, names rank and reason.
        """
        outcome, problem = attempted(lambda: (act(),))
        failed = torch.tensor([int(problem is not None)], dtype=torch.int32, device=self.carrier())
        with not_hiding(problem):
            dist.all_reduce(failed, dist.ReduceOp.MAX, group=self.group)
        if failed.item():
            self._heard(None, problem)
        assert outcome is not None
        return outcome[0]

    def _heard(self, value: Any, problem: Exception | None) -> list[Any]:
        """The value of each rank; raises `RankFailure` on all if one has a problem."""
        failure = None if problem is None else f"{type(problem).__name__}: {problem}"
        heard: list[Any] = [None] * self.size
        with not_hiding(problem):
            dist.all_gather_object(heard, (failure, value), group=self.group)
        if failures := {rank: message for rank, (message, _) in enumerate(heard) if message is not None}:
            raise RankFailure(f"no batch was exchanged: {grouped(failures)}") from problem
        return [each for _, each in heard]

    def carrier(self) -> torch.device:
        """The device to send bytes from and to: the host, if the backend of the group supports it."""
        # The form is cpu:gloo,cuda:nccl.
        kinds = [part.split(":")[0] for part in str(dist.get_backend_config(self.group)).split(",")]
        return (
            torch.device("cpu") if "cpu" in kinds else torch.device(kinds[0], torch.accelerator.current_device_index())
        )

    def padded_bytes(self, sizes: Sequence[int]) -> int:
        """The working memory of `gather_bytes`: all-gathers of little, or of about equal messages, fill them up to one length and
        join them at once.
        """
        longest = max(sizes, default=0)
        if len(set(sizes)) == 1 or self.size * longest > max(MOST_PADDING * sum(sizes), LITTLE):
            return 0
        return (self.size + 1) * longest

    def gather_bytes(self, sent: Tensor, sizes: Sequence[int], received: Tensor, padded: Tensor) -> None:
        """Fills ``received`` with every message, in rank order.

        Args:
            sent: the bytes of this rank.
            sizes: the number of bytes of every rank.
            padded: at least `padded_bytes` of working memory.
        """
        if not any(sizes):
            return
        if len(set(sizes)) == 1:
            all_gather_equal(received, sent, group=self.group)
        elif needed := self.padded_bytes(sizes):
            self._gather_padded(sent, sizes, received, padded[:needed])
        else:
            for rank, place in enumerate(received.split(list(sizes))):
                if rank == self.rank:
                    place.copy_(sent)
                if len(place):
                    dist.broadcast(place, group_src=rank, group=self.group)

    def _gather_padded(self, sent: Tensor, sizes: Sequence[int], received: Tensor, padded: Tensor) -> None:
        mine, everybody = padded.split([max(sizes), self.size * max(sizes)])
        mine[: len(sent)].copy_(sent)
        all_gather_equal(everybody, mine, group=self.group)
        for place, part, size in zip(received.split(list(sizes)), everybody.view(self.size, -1), sizes):
            place.copy_(part[:size])


def attempted(act: Callable[[], Result]) -> tuple[Result | None, Exception | None]:
    """The result of ``act``, or what it raised."""
    try:
        return act(), None
    except Exception as error:  # It may be any error: the other ranks must not wait for this one.
        return None, error


def grouped(found: Mapping[int, str]) -> str:
    """A phrase that names each value and the ranks that have it, for error messages.

    >>> grouped({0: "torch.int64", 1: "absent", 2: "torch.int64"})
    'torch.int64 on ranks 0, 2 and absent on rank 1'
    """
    holders = grouped_by(found, lambda rank: found[rank])
    return " and ".join(
        f"{value} on rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}" for value, ranks in holders.items()
    )

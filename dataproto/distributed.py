"""Batches across the ranks of a process group.

Each tensor is sent by a tensor collective, on a device that the backend of the group supports, and arrives on the device it was
on. Ragged columns send their starts and lengths, and each distinct row once. Everything else is sent in one buffer a batch, which
has each distinct image, tensor and array once. Gradients are not sent.

A batch is sent as sections of bytes, and an outline tells the other ranks what to expect. Tensors, and the places and values of
ragged columns, are a section each. Everything else is one pickle (see `dataproto.serialization.wire`). Bytes are tensors ``(n,)``
uint8, which every backend supports.

Ranks may hold different numbers of rows. They compare their columns before anything is sent, and an error on one rank, before or
after, is raised on all. Ranks are those within the group; ``None`` is the default group. As for all collectives of NCCL, call
``torch.cuda.set_device`` first.
"""

import math
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from tensordict import TensorDict

from dataproto.column_ops import concat, concat_meta_info
from dataproto.errors import ColumnConflict, InvalidColumn, InvalidIndex, RankFailure, not_hiding
from dataproto.ragged import RaggedTensor
from dataproto.serialization.leaves import tensor_bytes, tensor_of
from dataproto.serialization.wire import Fields
from dataproto.transfer import all_gather_equal

MOST_PADDING = 2  # An all-gather may move this many times the bytes of the messages, to be one collective,
LITTLE = 1 << 26  # or this many bytes on each rank.

Batch = TypeVar("Batch")
Result = TypeVar("Result")
# A column and a part of it; ("", "objects") stands for everything that is pickled.
Section: TypeAlias = tuple[str, str]
_ALIGNMENT = 64
_ON_DEVICE = {"tensor", "ragged", "nested"}


def all_gather(data: Batch, group: Any = None) -> Batch:
    """Returns the rows of all ranks, in rank order, on each of them.

    ``meta_info`` is merged as by ``concat``: ``metrics`` are collected, ``timing`` keeps the slowest, everything else must agree.
    A batch without columns adds no rows.

    Raises:
        ColumnConflict: ranks hold different columns, dtypes or shapes; on all ranks.
        RankFailure: a rank failed, or ``meta_info`` disagrees; on all ranks.
    """
    gathered = gathered_fields(data, group)
    return type(data)(gathered.batch, gathered.non_tensor_batch, gathered.meta_info)  # type: ignore[call-arg]


def gathered_fields(data: Any, group: Any, with_facts: bool = True) -> Fields:
    """The fields of `all_gather`. The ranks compare, allocate, send and assemble."""
    ranks = GroupRanks.of(group)
    message, outlines = ranks.together(lambda: _prepare(data, with_facts))
    form = common_form(outlines)
    carriers = {section: ranks.carrier(form.kind_of_device(section)) for section in form.sections()}
    sizes = {section: [outline.size(section) for outline in outlines] for section in carriers}

    def allocate() -> tuple[dict[Section, tuple[torch.Tensor, torch.Tensor]], dict[torch.device, torch.Tensor]]:
        room, most = {}, dict.fromkeys(carriers.values(), 0)
        for section, carrier in carriers.items():
            expected = torch.empty(sum(sizes[section]), dtype=torch.uint8, device=carrier)
            room[section] = message.bytes_of(section, carrier), expected
            most[carrier] = max(most[carrier], ranks.padded_bytes(sizes[section]))
        return room, {carrier: torch.empty(size, dtype=torch.uint8, device=carrier) for carrier, size in most.items()}

    room, padded = ranks.agreed(allocate)
    for section, (sent, received) in room.items():
        ranks.gather_bytes(sent, sizes[section], received, padded[carriers[section]])
    arrived = {section: received for section, (_, received) in room.items()}
    return ranks.agreed(lambda: assemble(form, outlines, arrived, ranks.rank, message))


def _prepare(data: Any, with_facts: bool) -> "tuple[Message, Outline]":
    if not hasattr(data, "check_consistency"):
        raise InvalidColumn(f"a rank sends a DataProto, not a {type(data).__name__}")
    data.check_consistency()
    message = Message.of(Fields(data.batch, data.non_tensor_batch, data.meta_info if with_facts else {}))
    return message, message.outline


# A batch as bytes, and back


@dataclass(frozen=True)
class Form:
    """The properties of a column that ranks must agree on: its kind, dtype, and the shape of a row or token."""

    kind: str  # "tensor" and "ragged" are sections; all others are pickled.
    dtype: Any = None
    tail: tuple[int, ...] = ()

    def __str__(self) -> str:
        if self.dtype is None:
            return self.kind
        rows = "B, n" if self.kind == "ragged" else "B"
        return f"{self.kind} {self.dtype} ({', '.join([rows, *map(str, self.tail)])})"

    @property
    def token_bytes(self) -> int:
        return int(self.dtype.itemsize) * math.prod(self.tail)

    @classmethod
    def of(cls, column: Any) -> "Form":
        if isinstance(column, RaggedTensor):
            return cls("ragged", column.dtype, tuple(column.tail))
        if isinstance(column, np.ndarray):
            kind = {"O": "objects", "U": "strings", "S": "byte strings"}.get(column.dtype.kind)
            return cls("array", column.dtype, column.shape[1:]) if kind is None else cls(kind)
        if not isinstance(column, torch.Tensor) or column.is_nested or column.layout != torch.strided:
            return cls("nested")
        return cls("tensor", column.dtype, tuple(column.shape[1:]))


@dataclass(frozen=True)
class Outline:
    """The columns of a batch and the sizes of its sections."""

    rows: int
    forms: Mapping[str, Form]  # By column; a batch without columns agrees with all others.
    devices: Mapping[str, str]  # The kind of device of each column.
    has_batch: bool
    batch_device: str | None
    values: Mapping[str, int]  # The number of stored tokens of each ragged column.
    pickled: Sequence[int]  # The bytes of the pickle and of each of its buffers.

    def sections(self) -> Iterator[Section]:
        """All sections, in the order in which they are sent."""
        for name, form in sorted(self.forms.items()):
            if form.kind == "tensor":
                yield name, "rows"
            if form.kind == "ragged":
                yield from ((name, "places"), (name, "values"))
        yield "", "objects"

    def size(self, section: Section) -> int:
        """The number of bytes of a section."""
        name, part = section
        if part == "objects":
            return sum(map(_padded, self.pickled))
        if name not in self.forms:
            return 0
        if part == "places":
            return 16 * self.rows
        return (self.rows if part == "rows" else self.values[name]) * self.forms[name].token_bytes

    def kind_of_device(self, section: Section) -> str:
        """The kind of device that a section is on."""
        return "cpu" if section[1] in ("places", "objects") else self.devices[section[0]]


def common_form(outlines: Sequence[Outline]) -> Outline:
    """The outline of a batch with columns; raises ColumnConflict if columns differ between batches."""
    holders = {number: outline for number, outline in enumerate(outlines) if outline.forms or outline.has_batch}
    if not holders:
        return outlines[0]
    differing = []
    for name in sorted({name for outline in holders.values() for name in outline.forms}):
        found = {number: str(outline.forms.get(name, "absent")) for number, outline in holders.items()}
        if len(set(found.values())) > 1:
            differing.append(f"column {name!r} is {grouped(found)}")
    if differing:
        raise ColumnConflict(f"ranks hold different columns: {'; '.join(differing)}")
    return next(iter(holders.values()))


@dataclass(frozen=True)
class Message:
    """A batch to be sent."""

    batch: Fields
    outline: Outline
    ragged: Mapping[str, RaggedTensor]
    pickled: torch.Tensor

    @classmethod
    def of(cls, batch: Fields) -> "Message":
        columns = batch.columns()
        rows = batch.rows() or 0
        forms = {name: Form.of(column) for name, column in columns.items()}
        ragged = {name: columns[name].detach().distinct() for name, form in forms.items() if form.kind == "ragged"}
        tensors = {name for name, form in forms.items() if form.kind == "tensor"}
        nested = {name: columns[name] for name, form in forms.items() if form.kind == "nested"}
        rest = Fields(
            batch=TensorDict(nested, batch_size=[rows]) if nested else None,
            non_tensor_batch={name: array for name, array in batch.non_tensor_batch.items() if name not in ragged},
            meta_info=batch.meta_info,
        )
        is_empty = not (nested or rest.non_tensor_batch or rest.meta_info)
        pickled, sizes = (torch.empty(0, dtype=torch.uint8), []) if is_empty else _pickled(rest)
        outline = Outline(
            rows=rows,
            forms=forms,
            devices={name: columns[name].device.type for name in (*tensors, *ragged)},
            has_batch=batch.batch is not None,
            batch_device=None if batch.batch is None or batch.batch.device is None else batch.batch.device.type,
            values={name: len(column.storage) for name, column in ragged.items()},
            pickled=sizes,
        )
        return cls(batch, outline, ragged, pickled)

    def bytes_of(self, section: Section, device: torch.device) -> torch.Tensor:
        """The bytes of a section ``(n,)`` uint8 on a device; no copy if they are there already."""
        name, part = section
        if part == "objects":
            return self.pickled.to(device)
        if name not in self.outline.forms:
            return torch.empty(0, dtype=torch.uint8, device=device)
        if part == "places":
            tensor = torch.stack([self.ragged[name].starts, self.ragged[name].lengths])
        else:
            tensor = self.batch.columns()[name] if part == "rows" else self.ragged[name].storage
        return tensor_bytes(tensor, device)


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _pickled(value: Any) -> tuple[torch.Tensor, list[int]]:
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


def assemble(
    form: Outline, outlines: Sequence[Outline], arrived: Mapping[Section, torch.Tensor], own: int, mine: Message
) -> Fields:
    """The rows of all messages that arrived. ``mine`` is this rank's own message, number ``own`` of them."""
    rests = _unpickled_rests(outlines, arrived["", "objects"], own, mine)
    ordered = mine.outline.forms or form.forms
    columns: dict[str, Any] = {}
    for name in ordered:
        device = local_device(form.devices[name]) if name in form.devices else None
        if name in mine.outline.forms and form.forms[name].kind in _ON_DEVICE:
            device = mine.batch.columns()[name].device
        columns[name] = _column(name, form.forms[name], outlines, arrived, rests, device)
    in_batch = {name: column for name, column in columns.items() if form.forms[name].kind in ("tensor", "nested")}
    batch = None
    if any(outline.has_batch for outline in outlines):
        device = None if form.batch_device is None else local_device(form.batch_device)
        if mine.batch.batch is not None:
            device = mine.batch.batch.device
        batch = TensorDict(in_batch, batch_size=[sum(outline.rows for outline in outlines)], device=device)
    return Fields(
        batch=batch,
        non_tensor_batch={name: column for name, column in columns.items() if name not in in_batch},
        meta_info=concat_meta_info([rest.meta_info for rest in rests if rest is not None]),
    )


def _unpickled_rests(outlines: Sequence[Outline], arrived: torch.Tensor, own: int, mine: Message) -> list[Any]:
    """The pickled part of each message; for this rank's own message its objects themselves."""
    rests: list[Any] = []
    for number, part in enumerate(arrived.cpu().split([outline.size(("", "objects")) for outline in outlines])):
        if number == own:
            rests.append(mine.batch)
        else:
            rests.append(_unpickled(part.numpy(), outlines[number].pickled) if len(part) else None)
    return rests


def _column(
    name: str,
    form: Form,
    outlines: Sequence[Outline],
    arrived: Mapping[Section, torch.Tensor],
    rests: Sequence[Any],
    device: torch.device | None,
) -> Any:
    if form.kind == "tensor":
        return _tensor(arrived[name, "rows"], form, sum(outline.rows for outline in outlines), device)
    if form.kind == "ragged":
        stored = [outline.values.get(name, 0) for outline in outlines]
        values = _tensor(arrived[name, "values"], form, sum(stored), device)
        counts = [outline.rows if name in outline.forms else 0 for outline in outlines]
        flat = arrived[name, "places"].cpu().view(torch.int64).split([2 * count for count in counts])
        places = [part.view(2, count) for part, count in zip(flat, counts)]
        before = np.cumsum(stored) - stored
        starts = torch.cat([part[0] + int(shift) for part, shift in zip(places, before)])
        return RaggedTensor.windows(values, starts, torch.cat([part[1] for part in places]))
    parts = [rest.columns()[name] for rest, outline in zip(rests, outlines) if name in outline.forms]
    return concat([part.to(device) for part in parts] if device is not None else parts, name)


def _tensor(data: torch.Tensor, form: Form, rows: int, device: torch.device | None) -> torch.Tensor:
    return tensor_of(data, form.dtype, (rows, *form.tail)).to(device)


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
        failed = torch.tensor([int(problem is not None)], dtype=torch.int32, device=self.carrier("cpu"))
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

    def carrier(self, wanted: str) -> torch.device:
        """The device to send bytes from and to: of the wanted kind if the backend of the group supports it.

        Gloo claims to support GPU memory, but point-to-point operations on it end the process.
        """
        config = str(dist.get_backend_config(self.group))  # The form is cpu:gloo,cuda:nccl.
        backends = dict(part.split(":") for part in config.split(","))
        kinds = [kind for kind, backend in backends.items() if kind == "cpu" or backend != "gloo"]
        return local_device(wanted if wanted in kinds else kinds[0])

    def padded_bytes(self, sizes: Sequence[int]) -> int:
        """The working memory of `gather_bytes`: all-gathers of little, or of about equal messages, fill them up to one length and
        join them at once.
        """
        longest = max(sizes, default=0)
        if len(set(sizes)) == 1 or self.size * longest > max(MOST_PADDING * sum(sizes), LITTLE):
            return 0
        return (self.size + 1) * longest

    def gather_bytes(
        self, sent: torch.Tensor, sizes: Sequence[int], received: torch.Tensor, padded: torch.Tensor
    ) -> None:
        """Fills ``received`` with one section of every message, in rank order.

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

    def _gather_padded(
        self, sent: torch.Tensor, sizes: Sequence[int], received: torch.Tensor, padded: torch.Tensor
    ) -> None:
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


def local_device(kind: str) -> torch.device:
    """The current device of a kind, or the CPU if this process has none of that kind."""
    here = torch.accelerator.current_accelerator()
    if kind == "cpu" or here is None or here.type != kind:
        return torch.device("cpu")
    return torch.device(kind, torch.accelerator.current_device_index())


def grouped(found: Mapping[int, str]) -> str:
    """A phrase that names each value and the ranks that have it, for error messages.

    >>> grouped({0: "torch.int64", 1: "absent", 2: "torch.int64"})
    'torch.int64 on ranks 0, 2 and absent on rank 1'
    """
    holders: dict[str, list[int]] = {}
    for rank, value in found.items():
        holders.setdefault(value, []).append(rank)
    return " and ".join(
        f"{value} on rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}" for value, ranks in holders.items()
    )

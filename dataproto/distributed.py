"""Batches across the ranks of a process group.

Tensors travel one by one by tensor collectives, on the kind of device that the group's backend takes, and come back to the device
they were on. Ragged columns send their places first and then each distinct row once; everything else travels in one buffer for
each batch, in which each distinct image, tensor and array stands once. Gradients do not travel.

Ranks (always counted within the group) may hold different numbers of rows. Before anything is sent they compare what they hold;
whatever goes wrong on one of them before or after, all raise the same error. ``src`` and ``dst`` are ranks of the group, ``None``
is the default group. With NCCL, as for all its collectives, ``torch.cuda.set_device`` comes first.
"""

import math
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from tensordict import TensorDict

from dataproto._exchange import Call, Ranks, grouped, local_device
from dataproto._ops.column_ops import join
from dataproto._ops.merging import concat_meta_info
from dataproto.errors import ColumnConflict, InvalidColumn, InvalidIndex, RankFailure
from dataproto.ragged import RaggedTensor

if TYPE_CHECKING:
    from dataproto.protocol import DataProto

Section: TypeAlias = tuple[str, str]  # a column, and which part of it; ("", "objects") for all that is pickled
_ALIGNMENT = 64
_ON_DEVICE = {"tensor", "ragged", "nested"}


def all_gather(data: "DataProto", group: Any = None) -> "DataProto":
    """The rows of all ranks, in rank order, on each of them.

    ``meta_info`` is merged as by ``concat``: ``metrics`` are collected, ``timing`` keeps the slowest, everything else must agree.
    A rank whose batch has no column at all adds no rows.

    Raises:
        ColumnConflict: ranks hold different columns, dtypes or shapes; on all ranks.
        RankFailure: a rank could not take its part, or facts disagree; on all ranks.
    """
    gathered = _exchange(Call("all_gather"), lambda _: [data], group)
    assert gathered is not None
    return gathered


def all_gather_data_proto(data: "DataProto", process_group: Any) -> None:
    """:func:`all_gather` in place, as verl has it: ``meta_info`` stays each rank's own. On an error no batch is changed."""
    gathered = _exchange(Call("all_gather"), lambda _: [data.select(meta_info_keys=[])], process_group)
    assert gathered is not None
    data._adopt(gathered)


def gather(data: "DataProto", dst: int = 0, group: Any = None) -> "DataProto | None":
    """The rows of all ranks, in rank order, on rank ``dst``; ``None`` on the others. Otherwise as :func:`all_gather`."""
    return _exchange(Call("gather", dst), lambda _: [data], group)


def broadcast(data: "DataProto | None", src: int = 0, group: Any = None) -> "DataProto":
    """The batch of rank ``src``, with its ``meta_info``, on every rank; what the others pass is not looked at.

    Tensors arrive on the kind of device that they are on at the source, or on the CPU where a rank has none of that kind.

    Raises:
        RankFailure: a rank could not take its part; on all ranks.
    """
    received = _exchange(Call("broadcast", src), lambda _: [data], group)
    assert received is not None
    return received


def scatter(data: "DataProto | Sequence[DataProto] | None", src: int = 0, group: Any = None) -> "DataProto":
    """A part of rank ``src``'s rows for every rank, on devices as by :func:`broadcast`; what the others pass is not looked at.

    Args:
        data: on ``src``, a batch whose rows divide equally, or a list of one batch a rank, of any numbers of rows.

    Raises:
        ColumnConflict: parts hold different columns, dtypes or shapes; on all ranks.
        RankFailure: a rank could not take its part, or the rows do not divide; on all ranks.
    """
    received = _exchange(Call("scatter", src), lambda size: _parts(data, size), group)
    assert received is not None
    return received


def _parts(data: Any, size: int) -> list[Any]:
    parts = list(data) if isinstance(data, list | tuple) else data.chunk(size) if hasattr(data, "chunk") else [data]
    if len(parts) != size:
        raise InvalidIndex(f"{size} ranks need as many parts, not {len(parts)}")
    return parts


def _exchange(call: Call, batches: Callable[[int], list[Any]], group: Any) -> "DataProto | None":
    """The one way of all collectives: compare, make room, send, put together; ``batches`` are what this rank sends."""
    ranks = Ranks.of(group)
    messages, told = ranks.together(lambda: _prepare(call, batches, ranks))
    if len({other for other, _ in told}) > 1:
        calls = grouped("rank", {rank: str(other) for rank, (other, _) in enumerate(told)})
        raise RankFailure(f"ranks do not make the same call, but {calls}")
    outlines = [outline for _, sent in told for outline in sent]
    incoming = call.receives(ranks.rank, len(outlines))
    form = _common_form("part" if call.kind == "scatter" else "rank", outlines)
    carriers = {section: ranks.carrier(form.kind_of_device(section)) for section in form.sections()}

    def make_room() -> tuple[dict[Section, tuple[list[torch.Tensor], torch.Tensor]], None]:
        room = {}
        for section, carrier in carriers.items():
            sent = [message.bytes_of(section, carrier) for message in messages]
            expected = sum(outlines[number].size(section) for number in incoming)
            room[section] = sent, torch.empty(expected, dtype=torch.uint8, device=carrier)
        return room, None

    room, _ = ranks.together(make_room)
    for section, (sent, received) in room.items():
        ranks.move(call, sent, [outline.size(section) for outline in outlines], received)

    def put_together() -> tuple["DataProto | None", None]:
        if call.kind in ("broadcast", "scatter") and ranks.rank == call.root:
            return messages[0 if call.kind == "broadcast" else ranks.rank].batch.select(), None
        if not incoming:
            return None, None
        arrived = {section: received for section, (_, received) in room.items()}
        mine = messages[0] if messages else None
        return _assemble(form, [outlines[number] for number in incoming], arrived, ranks.rank, mine), None

    result, _ = ranks.together(put_together)
    return result


def _prepare(call: Call, batches: Callable[[int], list[Any]], ranks: Ranks) -> tuple[list["_Message"], Any]:
    if not 0 <= call.root < ranks.size:
        raise InvalidIndex(f"there is no rank {call.root} among {ranks.size}")
    messages = [_Message.of(batch) for batch in batches(ranks.size)] if call.sends(ranks.rank) else []
    return messages, (call, [message.outline for message in messages])


# What is known of a batch before it is sent


@dataclass(frozen=True)
class _Form:
    """What ranks must agree on in a column: its kind, dtype, and the shape of a row or token."""

    kind: str  # "tensor" and "ragged" travel as such, all others pickled
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
    def of(cls, column: Any) -> "_Form":
        if isinstance(column, RaggedTensor):
            return cls("ragged", column.dtype, tuple(column.tail))
        if isinstance(column, np.ndarray):
            kind = {"O": "objects", "U": "strings", "S": "byte strings"}.get(column.dtype.kind)
            return cls("array", column.dtype, column.shape[1:]) if kind is None else cls(kind)
        if not isinstance(column, torch.Tensor) or column.is_nested or column.layout != torch.strided:
            return cls("nested")
        return cls("tensor", column.dtype, tuple(column.shape[1:]))


@dataclass(frozen=True)
class _Outline:
    """What a batch is made of, and how much there is of it."""

    rows: int
    forms: Mapping[str, _Form]  # no columns: fits all others
    devices: Mapping[str, str]  # kinds of device, by column
    has_batch: bool
    batch_device: str | None
    values: Mapping[str, int]  # tokens that a ragged column stores
    pickled: Sequence[int]  # bytes of a pickle and its buffers

    def sections(self) -> Iterator[Section]:
        """In the order in which they travel."""
        for name, form in sorted(self.forms.items()):
            if form.kind == "tensor":
                yield name, "rows"
            if form.kind == "ragged":
                yield from ((name, "places"), (name, "values"))
        yield "", "objects"

    def size(self, section: Section) -> int:
        """Bytes of a section."""
        name, part = section
        if part == "objects":
            return sum(map(_padded, self.pickled))
        if name not in self.forms:
            return 0
        if part == "places":
            return 16 * self.rows
        return (self.rows if part == "rows" else self.values[name]) * self.forms[name].token_bytes

    def kind_of_device(self, section: Section) -> str:
        """Where a section would best travel."""
        return "cpu" if section[1] in ("places", "objects") else self.devices[section[0]]


def _common_form(what: str, outlines: Sequence[_Outline]) -> _Outline:
    """An outline whose columns are everybody's; ColumnConflict where they differ."""
    holders = {number: outline for number, outline in enumerate(outlines) if outline.forms or outline.has_batch}
    if not holders:
        return outlines[0]
    differing = []
    for name in sorted({name for outline in holders.values() for name in outline.forms}):
        found = {number: str(outline.forms.get(name, "absent")) for number, outline in holders.items()}
        if len(set(found.values())) > 1:
            differing.append(f"column {name!r} is {grouped(what, found)}")
    if differing:
        raise ColumnConflict(f"{what}s hold different columns: {'; '.join(differing)}")
    return next(iter(holders.values()))


# Batches to bytes and back


@dataclass(frozen=True)
class _Message:
    """A batch to be sent."""

    batch: "DataProto"
    outline: _Outline
    ragged: Mapping[str, RaggedTensor]
    pickled: torch.Tensor

    @classmethod
    def of(cls, batch: Any) -> "_Message":
        from dataproto.protocol import DataProto

        if not isinstance(batch, DataProto):
            raise InvalidColumn(f"a rank sends a DataProto, not a {type(batch).__name__}")
        batch.check_consistency()
        columns = {name: batch[name] for name in batch.names()}
        forms = {name: _Form.of(column) for name, column in columns.items()}
        ragged = {name: columns[name].detach().distinct() for name, form in forms.items() if form.kind == "ragged"}
        tensors = {name for name, form in forms.items() if form.kind == "tensor"}
        nested = {name: columns[name] for name, form in forms.items() if form.kind == "nested"}
        rest = DataProto(
            batch=TensorDict(nested, batch_size=[len(batch)]) if nested else None,
            non_tensor_batch={name: array for name, array in batch.non_tensor_batch.items() if name not in ragged},
            meta_info=batch.meta_info,
        )
        pickled, sizes = _pickled(rest) if rest.names() or rest.meta_info else (torch.empty(0, dtype=torch.uint8), [])
        outline = _Outline(
            rows=len(batch),
            forms=forms,
            devices={name: columns[name].device.type for name in (*tensors, *ragged)},
            has_batch=batch.batch is not None,
            batch_device=None if batch.batch is None or batch.batch.device is None else batch.batch.device.type,
            values={name: len(column.storage) for name, column in ragged.items()},
            pickled=sizes,
        )
        return cls(batch, outline, ragged, pickled)

    def bytes_of(self, section: Section, device: torch.device) -> torch.Tensor:
        """A section ``(n,)`` uint8 on a device; no copy where it lies there already."""
        name, part = section
        if part == "objects":
            return self.pickled.to(device)
        if name not in self.outline.forms:
            return torch.empty(0, dtype=torch.uint8, device=device)
        if part == "places":
            tensor = torch.stack([self.ragged[name].starts, self.ragged[name].lengths])
        else:
            tensor = self.batch[name] if part == "rows" else self.ragged[name].storage
        plain = tensor.detach().resolve_conj().resolve_neg().to(device).contiguous().reshape(-1)
        return plain.view(torch.uint8) if plain.numel() else torch.empty(0, dtype=torch.uint8, device=device)


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _pickled(value: Any) -> tuple[torch.Tensor, list[int]]:
    """A pickle and its out-of-band buffers, each at an aligned place of one tensor ``(n,)`` uint8, and their sizes."""
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
    """The inverse of :func:`_pickled`; what comes out lies in ``memory``."""
    ends = np.cumsum(list(map(_padded, sizes))).tolist()
    views = [memory[end - _padded(size) :][:size] for end, size in zip(ends, sizes)]
    return pickle.loads(views[0].tobytes(), buffers=views[1:])


def _assemble(
    form: _Outline,
    outlines: Sequence[_Outline],
    arrived: Mapping[Section, torch.Tensor],
    own: int,
    mine: _Message | None,
) -> "DataProto":
    """The rows of all messages that arrived; ``mine``, where this rank sent one of them, is the one at place ``own``."""
    from dataproto.protocol import DataProto

    rests = _unpickled_rests(outlines, arrived["", "objects"], own, mine)
    ordered = mine.outline.forms if mine is not None and mine.outline.forms else form.forms
    columns: dict[str, Any] = {}
    for name in ordered:
        device = local_device(form.devices[name]) if name in form.devices else None
        if mine is not None and name in mine.outline.forms and form.forms[name].kind in _ON_DEVICE:
            device = mine.batch[name].device
        columns[name] = _column(name, form.forms[name], outlines, arrived, rests, device)
    in_batch = {name: column for name, column in columns.items() if form.forms[name].kind in ("tensor", "nested")}
    batch = None
    if any(outline.has_batch for outline in outlines):
        device = None if form.batch_device is None else local_device(form.batch_device)
        if mine is not None and mine.batch.batch is not None:
            device = mine.batch.batch.device
        batch = TensorDict(in_batch, batch_size=[sum(outline.rows for outline in outlines)], device=device)
    return DataProto(
        batch=batch,
        non_tensor_batch={name: column for name, column in columns.items() if name not in in_batch},
        meta_info=concat_meta_info([rest.meta_info for rest in rests if rest is not None]),
    )


def _unpickled_rests(outlines: Sequence[_Outline], arrived: torch.Tensor, own: int, mine: _Message | None) -> list[Any]:
    """What each message holds beside tensors and ragged columns; this rank's own objects as they are."""
    rests: list[Any] = []
    for number, part in enumerate(arrived.cpu().split([outline.size(("", "objects")) for outline in outlines])):
        if mine is not None and number == own:
            rests.append(mine.batch)
        else:
            rests.append(_unpickled(part.numpy(), outlines[number].pickled) if len(part) else None)
    return rests


def _column(
    name: str,
    form: _Form,
    outlines: Sequence[_Outline],
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
    parts = [rest[name] for rest, outline in zip(rests, outlines) if name in outline.forms]
    return join([part.to(device) for part in parts] if device is not None else parts, name)


def _tensor(data: torch.Tensor, form: _Form, rows: int, device: torch.device | None) -> torch.Tensor:
    if not len(data):
        return torch.empty((rows, *form.tail), dtype=form.dtype, device=device)
    return data.view(form.dtype).view(rows, *form.tail).to(device)

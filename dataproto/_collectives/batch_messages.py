"""A batch as sections of bytes that ranks exchange, and an outline that tells the others what to expect.

Tensors, and the places and values of ragged columns, are a section each. Everything else is one pickle (see
`dataproto.serialization.wire`), in which each distinct image, tensor and array occurs once.
"""

import math
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from tensordict import TensorDict

from dataproto._collectives.byte_exchange import Call, GroupRanks, grouped, local_device
from dataproto._ops.column_ops import concat
from dataproto._ops.merging import concat_meta_info
from dataproto.errors import ColumnConflict, InvalidIndex, RankFailure
from dataproto.ragged import RaggedTensor
from dataproto.serialization.leaves import tensor_bytes, tensor_of
from dataproto.serialization.wire import Fields

Section: TypeAlias = tuple[str, str]  # a column and a part of it; ("", "objects") for everything that is pickled
_ALIGNMENT = 64
_ON_DEVICE = {"tensor", "ragged", "nested"}


@dataclass(frozen=True)
class Form:
    """The properties of a column that ranks must agree on: its kind, dtype, and the shape of a row or token."""

    kind: str  # "tensor" and "ragged" are sections, all others are pickled
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
    forms: Mapping[str, Form]  # by column; a batch without columns agrees with all others
    devices: Mapping[str, str]  # by column: kind of device
    has_batch: bool
    batch_device: str | None
    values: Mapping[str, int]  # by ragged column: stored tokens
    pickled: Sequence[int]  # bytes of the pickle and of each of its buffers

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


def common_form(what: str, outlines: Sequence[Outline]) -> Outline:
    """The outline of a batch with columns; raises ColumnConflict if columns differ between batches."""
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
    form: Outline,
    outlines: Sequence[Outline],
    arrived: Mapping[Section, torch.Tensor],
    own: int,
    mine: Message | None,
) -> Fields:
    """The rows of all messages that arrived. ``mine`` is this rank's own message, if it sent one, and number ``own`` of them."""
    rests = _unpickled_rests(outlines, arrived["", "objects"], own, mine)
    ordered = mine.outline.forms if mine is not None and mine.outline.forms else form.forms
    columns: dict[str, Any] = {}
    for name in ordered:
        device = local_device(form.devices[name]) if name in form.devices else None
        if mine is not None and name in mine.outline.forms and form.forms[name].kind in _ON_DEVICE:
            device = mine.batch.columns()[name].device
        columns[name] = _column(name, form.forms[name], outlines, arrived, rests, device)
    in_batch = {name: column for name, column in columns.items() if form.forms[name].kind in ("tensor", "nested")}
    batch = None
    if any(outline.has_batch for outline in outlines):
        device = None if form.batch_device is None else local_device(form.batch_device)
        if mine is not None and mine.batch.batch is not None:
            device = mine.batch.batch.device
        batch = TensorDict(in_batch, batch_size=[sum(outline.rows for outline in outlines)], device=device)
    return Fields(
        batch=batch,
        non_tensor_batch={name: column for name, column in columns.items() if name not in in_batch},
        meta_info=concat_meta_info([rest.meta_info for rest in rests if rest is not None]),
    )


def _unpickled_rests(outlines: Sequence[Outline], arrived: torch.Tensor, own: int, mine: Message | None) -> list[Any]:
    """The pickled part of each message; for this rank's own message its objects themselves."""
    rests: list[Any] = []
    for number, part in enumerate(arrived.cpu().split([outline.size(("", "objects")) for outline in outlines])):
        if mine is not None and number == own:
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


def exchange_batches(call: Call, batches: Callable[[int], list[Fields]], group: Any) -> Fields | None:
    """The steps of every collective: compare, allocate, send, assemble.

    Args:
        batches: given the number of ranks, what this rank sends; what it raises, all ranks raise.
    """
    ranks = GroupRanks.of(group)
    messages, told = ranks.together(lambda: _prepare(call, batches, ranks))
    if len({other for other, _ in told}) > 1:
        calls = grouped("rank", {rank: str(other) for rank, (other, _) in enumerate(told)})
        raise RankFailure(f"ranks do not make the same call, but {calls}")
    outlines = [outline for _, sent in told for outline in sent]
    incoming = call.receives(ranks.rank, len(outlines))
    form = common_form("part" if call.kind == "scatter" else "rank", outlines)
    carriers = {section: ranks.carrier(form.kind_of_device(section)) for section in form.sections()}

    sizes = {section: [outline.size(section) for outline in outlines] for section in carriers}

    def allocate() -> tuple[dict[Section, tuple[list[torch.Tensor], torch.Tensor]], dict[torch.device, torch.Tensor]]:
        room, most = {}, dict.fromkeys(carriers.values(), 0)
        for section, carrier in carriers.items():
            sent = [message.bytes_of(section, carrier) for message in messages]
            expected = sum(sizes[section][number] for number in incoming)
            room[section] = sent, torch.empty(expected, dtype=torch.uint8, device=carrier)
            most[carrier] = max(most[carrier], ranks.padded_bytes(call, sizes[section]))
        return room, {carrier: torch.empty(size, dtype=torch.uint8, device=carrier) for carrier, size in most.items()}

    room, padded = ranks.agreed(allocate)
    for section, (sent, received) in room.items():
        ranks.move(call, sent, sizes[section], received, padded[carriers[section]])

    def assemble_here() -> Fields | None:
        if call.kind in ("broadcast", "scatter") and ranks.rank == call.root:
            return messages[0 if call.kind == "broadcast" else ranks.rank].batch
        if not incoming:
            return None
        arrived = {section: received for section, (_, received) in room.items()}
        mine = messages[0] if messages else None
        return assemble(form, [outlines[number] for number in incoming], arrived, ranks.rank, mine)

    return ranks.agreed(assemble_here)


def _prepare(call: Call, batches: Callable[[int], list[Any]], ranks: GroupRanks) -> tuple[list[Message], Any]:
    if not 0 <= call.root < ranks.size:
        raise InvalidIndex(f"there is no rank {call.root} among {ranks.size}")
    messages = [Message.of(batch) for batch in batches(ranks.size)] if call.sends(ranks.rank) else []
    return messages, (call, [message.outline for message in messages])

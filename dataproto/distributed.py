"""Batches across the ranks of a process group.

Tensors travel one by one by tensor collectives, on the kind of device that the group's backend takes, and come back to the device
they were on. Ragged columns send their places first and then each distinct row once; everything else travels in one buffer for
each batch, in which each distinct image, tensor and array stands once. Gradients do not travel.

Ranks (always counted within the group) may hold different numbers of rows. Before anything is sent they compare what they hold;
whatever goes wrong on one of them before or after, all raise the same error. ``src`` and ``dst`` are ranks of the group, ``None``
is the default group. With NCCL, as for all its collectives, ``torch.cuda.set_device`` comes first.
"""

from collections.abc import Sequence
from typing import Any

from dataproto._exchange import Call
from dataproto._messages import exchange
from dataproto.errors import InvalidColumn, InvalidIndex
from dataproto.protocol import DataProto
from dataproto.serialization.wire import Fields


def all_gather(data: DataProto, group: Any = None) -> DataProto:
    """The rows of all ranks, in rank order, on each of them.

    ``meta_info`` is merged as by ``concat``: ``metrics`` are collected, ``timing`` keeps the slowest, everything else must agree.
    A rank whose batch has no column at all adds no rows.

    Raises:
        ColumnConflict: ranks hold different columns, dtypes or shapes; on all ranks.
        RankFailure: a rank could not take its part, or facts disagree; on all ranks.
    """
    return _batch(exchange(Call("all_gather"), lambda _: [_fields(data)], group))


def gather(data: DataProto, dst: int = 0, group: Any = None) -> DataProto | None:
    """The rows of all ranks, in rank order, on rank ``dst``; ``None`` on the others. Otherwise as :func:`all_gather`."""
    gathered = exchange(Call("gather", dst), lambda _: [_fields(data)], group)
    return None if gathered is None else _batch(gathered)


def broadcast(data: DataProto | None, src: int = 0, group: Any = None) -> DataProto:
    """The batch of rank ``src``, with its ``meta_info``, on every rank; what the others pass is not looked at.

    Tensors arrive on the kind of device that they are on at the source, or on the CPU where a rank has none of that kind.

    Raises:
        RankFailure: a rank could not take its part; on all ranks.
    """
    return _batch(exchange(Call("broadcast", src), lambda _: [_fields(data)], group))


def scatter(data: DataProto | Sequence[DataProto] | None, src: int = 0, group: Any = None) -> DataProto:
    """A part of rank ``src``'s rows for every rank, on devices as by :func:`broadcast`; what the others pass is not looked at.

    Args:
        data: on ``src``, a batch whose rows divide equally, or a list of one batch a rank, of any numbers of rows.

    Raises:
        ColumnConflict: parts hold different columns, dtypes or shapes; on all ranks.
        RankFailure: a rank could not take its part, or the rows do not divide; on all ranks.
    """
    return _batch(exchange(Call("scatter", src), lambda size: [_fields(part) for part in _parts(data, size)], group))


def _parts(data: Any, size: int) -> list[Any]:
    parts = list(data) if isinstance(data, list | tuple) else data.chunk(size) if hasattr(data, "chunk") else [data]
    if len(parts) != size:
        raise InvalidIndex(f"{size} ranks need as many parts, not {len(parts)}")
    return parts


def _fields(batch: Any) -> Fields:
    if not isinstance(batch, DataProto):
        raise InvalidColumn(f"a rank sends a DataProto, not a {type(batch).__name__}")
    batch.check_consistency()
    return Fields(batch.batch, batch.non_tensor_batch, batch.meta_info)


def _batch(fields: Fields | None) -> DataProto:
    """A batch with containers of its own; the columns of what this rank sent to itself are shared."""
    assert fields is not None
    batch = None if fields.batch is None else fields.batch.copy()
    return DataProto(batch, dict(fields.non_tensor_batch), dict(fields.meta_info))

"""Batches across the ranks of a process group.

Each tensor is sent by a tensor collective, on a device that the backend of the group supports, and arrives on the device it was
on. Ragged columns send their starts and lengths, and each distinct row once. Everything else is sent in one buffer a batch, which
has each distinct image, tensor and array once. Gradients are not sent.

Ranks may hold different numbers of rows. They compare their columns before anything is sent, and an error on one rank, before or
after, is raised on all. ``src`` and ``dst`` are ranks within the group; ``None`` is the default group. As for all collectives of
NCCL, call ``torch.cuda.set_device`` first.
"""

from collections.abc import Sequence
from typing import Any

from dataproto._collectives.batch_messages import exchange_batches
from dataproto._collectives.byte_exchange import Call
from dataproto.errors import InvalidColumn, InvalidIndex
from dataproto.protocol import DataProto
from dataproto.serialization.wire import Fields


def all_gather(data: DataProto, group: Any = None) -> DataProto:
    """Returns the rows of all ranks, in rank order, on each of them.

    ``meta_info`` is merged as by ``concat``: ``metrics`` are collected, ``timing`` keeps the slowest, everything else must agree.
    A batch without columns adds no rows.

    Raises:
        ColumnConflict: ranks hold different columns, dtypes or shapes; on all ranks.
        RankFailure: a rank failed, or ``meta_info`` disagrees; on all ranks.
    """
    return _batch(exchange_batches(Call("all_gather"), lambda _: [_fields(data)], group))


def gather(data: DataProto, dst: int = 0, group: Any = None) -> DataProto | None:
    """Returns the rows of all ranks, in rank order, on rank ``dst`` and ``None`` on the others; else as :func:`all_gather`."""
    gathered = exchange_batches(Call("gather", dst), lambda _: [_fields(data)], group)
    return None if gathered is None else _batch(gathered)


def broadcast(data: DataProto | None, src: int = 0, group: Any = None) -> DataProto:
    """Returns the batch of rank ``src``, with its ``meta_info``, on every rank; the argument of the others is ignored.

    Tensors arrive on the kind of device that they are on at the source, or on the CPU if a rank has none of that kind.

    Raises:
        RankFailure: a rank failed; on all ranks.
    """
    return _batch(exchange_batches(Call("broadcast", src), lambda _: [_fields(data)], group))


def scatter(data: DataProto | Sequence[DataProto] | None, src: int = 0, group: Any = None) -> DataProto:
    """Splits the rows of rank ``src`` among all ranks, on devices as by :func:`broadcast`; the argument of the others is ignored.

    Args:
        data: on ``src``, a batch whose rows divide equally, or a list of one batch a rank, of any numbers of rows.

    Raises:
        ColumnConflict: the batches of a list hold different columns, dtypes or shapes; on all ranks.
        RankFailure: a rank failed, or the rows do not divide; on all ranks.
    """
    return _batch(
        exchange_batches(Call("scatter", src), lambda size: [_fields(part) for part in _parts(data, size)], group)
    )


def _parts(data: Any, size: int) -> list[Any]:
    parts = list(data) if isinstance(data, list | tuple) else data.chunk(size) if hasattr(data, "chunk") else [data]
    if len(parts) != size:
        raise InvalidIndex(f"{size} ranks need one part each, not {len(parts)}")
    return parts


def _fields(batch: Any) -> Fields:
    if not isinstance(batch, DataProto):
        raise InvalidColumn(f"a rank sends a DataProto, not a {type(batch).__name__}")
    batch.check_consistency()
    return Fields(batch.batch, batch.non_tensor_batch, batch.meta_info)


def _batch(fields: Fields | None) -> DataProto:
    """A batch of these fields in new containers: on the sending rank the columns are those of its argument."""
    assert fields is not None
    batch = None if fields.batch is None else fields.batch.copy()
    return DataProto(batch, dict(fields.non_tensor_batch), dict(fields.meta_info))

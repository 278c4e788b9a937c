"""``DataProto``: the batch that the workers pass to each other, and its verbs.

>>> data = DataProto.from_dict({"prompts": torch.arange(6).view(2, 3)}, {"uid": ["a", "b"]})  # (B, P), and one object a row
>>> data = data.repeat(2)  # aabb; rows share their objects, such as images
>>> data["score"] = torch.tensor([1.0, 0.0, 0.5, 0.5])  # adds a column
>>> [split["uid"].tolist() for split in data[data["score"] > 0].split(2)]  # selects rows by a mask, and splits them
[['a', 'b'], ['b']]
>>> data |= DataProto.from_dict({"advantages": data["score"] - data["score"].mean()})  # adds the columns of another batch
>>> data.pop(["prompts"]).names(), data.names()
(['prompts'], ['score', 'advantages', 'uid'])

Names, arguments and results are those of ``verl.protocol`` (0.9); where this class is stricter, docstrings say so under Raises.

The order of the class: construction, invariants, columns, rows, splitting and joining, moving and copying, saving and sending.
verl's functions follow.
"""

import copy
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from itertools import accumulate
from typing import Any, Self, TypeVar, overload

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase
from torch.utils.data import DataLoader

from dataproto import column_ops as columnwise
from dataproto._verl import (
    BatchData,
    DataProtoFuture,
    EncodedTensorDict,
    _padding_size_key,
    deserialize_single_tensor,
    deserialize_tensordict,
    serialize_single_tensor,
    serialize_tensordict,
)
from dataproto.column_ops import Column, concat_meta_info, union_meta_info, union_numpy_dict, union_tensor_dict
from dataproto.columns import missing_message
from dataproto.distributed import all_gather
from dataproto.errors import (
    ColumnConflict,
    IndivisibleBatch,
    InvalidColumn,
    InvalidIndex,
    MissingColumn,
    RowCountMismatch,
)
from dataproto.packing import MAX_TOKENS, equally_wide
from dataproto.ragged import RaggedTensor
from dataproto.serialization import file as disk
from dataproto.serialization.wire import copied, plain_batch, reduce_batch
from dataproto.tensordict_utils import Index, as_positions, as_row, as_slice, get_tensordict, repeats, stack_objects

__all__ = [
    "BatchData",
    "DataProto",
    "DataProtoConfig",
    "DataProtoFuture",
    "DataProtoItem",
    "_padding_size_key",
    "all_gather_data_proto",
    "collate_fn",
    "deserialize_single_tensor",
    "deserialize_tensordict",
    "fold_batch_dim",
    "pad_dataproto_to_divisor",
    "serialize_single_tensor",
    "serialize_tensordict",
    "unfold_batch_dim",
    "union_numpy_dict",
    "union_tensor_dict",
    "unpad_dataproto",
]

logger = logging.getLogger(__name__)


@dataclass
class DataProtoItem:
    """One row: its tensors without the batch dimension, its objects, and a copy of the batch's ``meta_info``."""

    batch: TensorDict | None = None
    non_tensor_batch: dict[str, Any] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return reduce_batch(self, protocol)


@dataclass(eq=False, repr=False)
class DataProto:
    """Columns of ``len(data)`` rows, and facts about the batch as a whole.

    Args:
        batch: tensors ``(B, ...)`` in a ``TensorDict`` of batch size ``[B]``, or ``None``.
        non_tensor_batch: arrays ``(B, ...)``, mostly of dtype object with one Python object a row, and ragged tensors of B rows.
        meta_info: facts about the whole batch. What belongs to a row is a column.

    Raises:
        InvalidColumn: a column is not a tensor or array with rows.
        RowCountMismatch: columns have different numbers of rows.
        ColumnConflict: both fields have a column of the same name.

    Batches made from one another share their columns by reference, but never the containers of columns.

    >>> data = DataProto.from_dict({"ids": torch.tensor([[1, 2], [3, 4], [5, 6]])}, {"uid": ["a", "b", "c"]})
    >>> len(data), data["uid"].tolist(), data[1:]["ids"].tolist()
    (3, ['a', 'b', 'c'], [[3, 4], [5, 6]])
    >>> data["score"] = torch.tensor([0.5, 1.0, 0.0])
    >>> data[data["score"] > 0].repeat(2)["uid"].tolist()
    ['a', 'a', 'b', 'b']
    """

    batch: TensorDict | None = None
    non_tensor_batch: dict[str, np.ndarray | RaggedTensor] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)

    # ---- Construction

    def __post_init__(self) -> None:
        self.non_tensor_batch = {} if self.non_tensor_batch is None else self.non_tensor_batch
        self.meta_info = {} if self.meta_info is None else self.meta_info
        self.check_consistency()

    @classmethod
    def from_dict(
        cls,
        tensors: Mapping[str, torch.Tensor | RaggedTensor] | None = None,
        non_tensors: Mapping[str, Any] | None = None,
        meta_info: Mapping[str, Any] | None = None,
        num_batch_dims: int = 1,
        auto_padding: bool = False,
    ) -> Self:
        """Makes a batch of tensors ``(B, ...)`` and of lists or arrays of B rows.

        A list becomes an array with one object a row; rows that are lists of plain scalars of one length become a 2-D array.
        Ragged tensors may be in either argument; they go to ``non_tensor_batch``.

        Args:
            num_batch_dims: dimensions that all tensors share; more than 1 only without ``non_tensors``.
            auto_padding: allows :meth:`chunk` to make splits of different sizes.

        Raises:
            InvalidColumn, RowCountMismatch, ColumnConflict: see the class.
        """
        ragged = {name: column for name, column in (tensors or {}).items() if isinstance(column, RaggedTensor)}
        tensors = {name: tensor for name, tensor in (tensors or {}).items() if name not in ragged}
        if clash := sorted(ragged.keys() & (non_tensors or {}).keys()):
            raise ColumnConflict(f"columns {clash} are in tensors and in non_tensors")
        non_tensors = {**(non_tensors or {}), **ragged} or None
        if num_batch_dims < 1 or (num_batch_dims > 1 and non_tensors is not None):
            raise InvalidColumn(f"num_batch_dims={num_batch_dims}: rows are one dimension")
        rows = {name: _batch_shape(name, tensor, num_batch_dims) for name, tensor in tensors.items()}
        if len(set(rows.values())) > 1:
            raise RowCountMismatch(f"tensors have different numbers of rows: {rows}")
        batch = TensorDict(dict(tensors), batch_size=next(iter(rows.values()))) if tensors else None
        arrays = {name: columnwise.as_array(values, name) for name, values in (non_tensors or {}).items()}
        facts = dict(meta_info or {})
        if auto_padding:
            facts[DataProtoConfig.auto_padding_key] = True
        return cls(batch=batch, non_tensor_batch=arrays, meta_info=facts)

    @classmethod
    def from_single_dict(
        cls,
        data: Mapping[str, torch.Tensor | np.ndarray | RaggedTensor],
        meta_info: Mapping[str, Any] | None = None,
        auto_padding: bool = False,
    ) -> Self:
        """Makes a batch of tensors, ragged tensors and arrays, which it tells apart by their type.

        Raises:
            InvalidColumn: a value is of another type.
        """
        for name, value in data.items():
            if not isinstance(value, torch.Tensor | np.ndarray | RaggedTensor):
                raise InvalidColumn(f"column {name!r} is a {type(value).__name__}, not a tensor or numpy array")
        tensors = {name: value for name, value in data.items() if isinstance(value, torch.Tensor)}
        arrays = {name: value for name, value in data.items() if not isinstance(value, torch.Tensor)}
        return cls.from_dict(tensors=tensors, non_tensors=arrays, meta_info=meta_info, auto_padding=auto_padding)

    @classmethod
    def from_tensordict(
        cls, tensor_dict: TensorDict, meta_info: Mapping[str, Any] | None = None, num_batch_dims: int = 1
    ) -> Self:
        """Makes a batch of a ``TensorDict``.

        ``NonTensorStack`` columns become arrays of objects, and ``NonTensorData`` goes to ``meta_info``, except that a numpy
        array of strings or objects with one element a row is a column. Nested tensors whose rows vary in their first dimension
        become ragged columns over the same values.
        """
        tensors: dict[str, Any] = {}
        arrays: dict[str, Any] = {}
        facts = dict(meta_info or {})
        for name, value in tensor_dict.items():
            if isinstance(value, NonTensorStack):
                arrays[name] = [row.data for row in value]
            elif isinstance(value, NonTensorData) and _is_column(value.data, tensor_dict.batch_size):
                arrays[name] = value.data
            elif isinstance(value, NonTensorData):
                facts[name] = value.data
            elif RaggedTensor.holds(value):
                arrays[name] = RaggedTensor.from_nested(value)
            else:
                tensors[name] = value
        return cls.from_dict(tensors, arrays or None, facts, num_batch_dims)

    def to_tensordict(self) -> TensorDict:
        """Returns columns and ``meta_info`` as one ``TensorDict``, ragged columns as nested tensors.

        Raises:
            ColumnConflict: a name is in both.
        """
        columns = self._tensors()
        for name, array in self.non_tensor_batch.items():
            columns[name] = array.to_nested() if isinstance(array, RaggedTensor) else stack_objects(array)
        return get_tensordict(columns, self.meta_info)

    # ---- Invariants

    def __len__(self) -> int:
        return self._rows() or 0

    def _rows(self) -> int | None:
        """The number of rows, or ``None`` if there is no column."""
        if self.batch is not None:
            return int(self.batch.batch_size[0])
        return next((len(array) for array in self.non_tensor_batch.values()), None)

    def names(self) -> list[str]:
        """The names of all columns, tensors first."""
        return [*self._tensors(), *self.non_tensor_batch]

    def _tensors(self) -> dict[str, Any]:
        return {} if self.batch is None else dict(self.batch.items())

    def _columns(self) -> dict[str, Any]:
        return {**self._tensors(), **self.non_tensor_batch}

    def __contains__(self, name: object) -> bool:
        return name in self.names()

    def __repr__(self) -> str:
        return f"{type(self).__name__} of {len(self)} rows\n{self.get_data_info()}"

    def get_data_info(self) -> str:
        """Describes the columns and ``meta_info``, one a line: name, shape, dtype, device or type."""
        return columnwise.data_info(self.batch, self.non_tensor_batch, self.meta_info)

    def print_size(self, prefix: str = "") -> None:
        """Prints the size of tensors and arrays in GB."""
        print(columnwise.size_info(self.batch, self.non_tensor_batch, prefix))

    def check_consistency(self) -> None:
        """Checks that columns have the same number of rows and different names; raises what the class lists."""
        if self.batch is not None and (not isinstance(self.batch, TensorDictBase) or len(self.batch.batch_size) != 1):
            found = getattr(self.batch, "batch_size", type(self.batch).__name__)
            raise InvalidColumn(f"batch is a TensorDict with one batch dimension, not {found}")
        if not self.non_tensor_batch:
            return
        tensors = () if self.batch is None else self.batch.keys()
        rows = self._rows()
        for name, array in self.non_tensor_batch.items():
            if not isinstance(array, np.ndarray | RaggedTensor):
                raise InvalidColumn(
                    f"column {name!r} of non_tensor_batch is a {type(array).__name__}, not a numpy array"
                )
            if columnwise.row_count(array, name) != rows:
                raise RowCountMismatch(f"column {name!r} has {len(array)} rows, the batch has {rows}")
            if name in tensors:
                raise ColumnConflict(f"column {name!r} is in batch and in non_tensor_batch")

    # ---- Columns

    @overload
    def __getitem__(self, item: str) -> Any: ...
    @overload
    def __getitem__(self, item: int | np.integer[Any]) -> DataProtoItem: ...
    @overload
    def __getitem__(self, item: Index) -> Self: ...
    def __getitem__(self, item: Any) -> Any:
        """A column by its name, a row by its number, or rows by a slice, list, array, tensor or mask.

        Raises:
            MissingColumn: no column has that name.
            InvalidIndex: the index is out of range, or of a type that does not select rows.
        """
        if isinstance(item, str):
            return self._column(item)
        if isinstance(item, slice):
            return self.slice(item.start, item.stop, item.step)
        if isinstance(item, list | range | np.ndarray | torch.Tensor) and getattr(item, "ndim", 1) > 0:
            return self.select_idxs(item)
        row = as_row(item, len(self))
        return DataProtoItem(
            batch=None if self.batch is None else self.batch[row],
            non_tensor_batch={name: array[row] for name, array in self.non_tensor_batch.items()},
            meta_info=dict(self.meta_info),
        )

    def __setitem__(self, name: str, column: torch.Tensor | RaggedTensor | np.ndarray | Sequence[Any]) -> None:
        """Adds or replaces a column: tensors go to ``batch``, ragged tensors, arrays and lists to ``non_tensor_batch``.

        Raises:
            RowCountMismatch: the column has another number of rows than the batch.
            InvalidColumn: the value is not a column.
        """
        if not isinstance(name, str):
            raise InvalidColumn(f"columns are named by strings, not {name!r}")
        value = column if isinstance(column, torch.Tensor | TensorDictBase) else columnwise.as_array(column, name)
        found, rows = columnwise.row_count(value, name), self._rows()
        if rows is not None and found != rows:
            raise RowCountMismatch(f"column {name!r} has {found} rows, the batch has {rows}")
        batch = self._unlocked_batch()
        if isinstance(value, np.ndarray | RaggedTensor):
            self.non_tensor_batch[name] = value
            if batch is not None and name in self._tensors():
                del batch[name]
        else:
            self.batch = TensorDict({}, batch_size=[found]) if batch is None else batch
            self.batch.set(name, value)
            self.non_tensor_batch.pop(name, None)

    def _column(self, name: str) -> Any:
        columns = self._columns()
        if name not in columns:
            raise MissingColumn(missing_message([name], list(columns)))
        return columns[name]

    def _unlocked_batch(self) -> TensorDict | None:
        if self.batch is not None and self.batch.is_locked:
            self.batch = self.batch.copy()
        return self.batch

    def select(
        self,
        batch_keys: Iterable[str] | None = None,
        non_tensor_batch_keys: Iterable[str] | None = None,
        meta_info_keys: Iterable[str] | None = None,
        deepcopy: bool = False,
    ) -> Self:
        """Returns some of the columns and of ``meta_info``; ``None`` selects all of a field.

        Columns are shared, or copied with ``deepcopy``.

        Raises:
            MissingColumn: a name in ``batch_keys`` is absent. Absent names in the other two are ignored, as in verl.
        """
        if batch_keys is None:
            batch = None if self.batch is None else self.batch.copy()
        else:
            names, present = _name_list(batch_keys), list(self._tensors())
            if absent := [name for name in names if name not in present]:
                raise MissingColumn(missing_message(absent, present))
            batch = None if self.batch is None else self.batch.select(*names)
        arrays = _pick(self.non_tensor_batch, non_tensor_batch_keys)
        facts = _pick(self.meta_info, meta_info_keys)
        if deepcopy:
            batch = None if batch is None else batch.clone()
            arrays, facts = copy.deepcopy(arrays), copy.deepcopy(facts)
        return type(self)(batch=batch, non_tensor_batch=arrays, meta_info=facts)

    def pop(
        self,
        batch_keys: Iterable[str] | None = None,
        non_tensor_batch_keys: Iterable[str] | None = None,
        meta_info_keys: Iterable[str] | None = None,
    ) -> Self:
        """Removes columns and keys of ``meta_info``, in place, and returns them as a batch; on an error nothing is removed.

        Raises:
            MissingColumn: a name is absent, or occurs twice.
        """
        self.check_consistency()
        batch = self._unlocked_batch()
        tensors, arrays, facts = map(_name_list, (batch_keys, non_tensor_batch_keys, meta_info_keys))
        self._check_present(tensors, self._tensors())
        self._check_present(arrays, self.non_tensor_batch)
        self._check_present(facts, self.meta_info)
        popped = {name: batch.pop(name) for name in tensors} if batch is not None else {}
        return type(self)(
            batch=TensorDict(popped, batch_size=[batch.batch_size[0]], device=batch.device)
            if batch is not None and popped
            else None,
            non_tensor_batch={name: self.non_tensor_batch.pop(name) for name in arrays},
            meta_info={name: self.meta_info.pop(name) for name in facts},
        )

    def rename(self, old_keys: str | Sequence[str], new_keys: str | Sequence[str]) -> Self:
        """Renames columns in place, all at once, so that two may swap names; on an error none is renamed.

        Raises:
            MissingColumn: an old name is absent.
            ColumnConflict: a new name is taken, or the numbers of old and new names differ.
        """
        for keys in (old_keys, new_keys):
            if not isinstance(keys, str | list | tuple):
                raise InvalidColumn(f"names are a string or a list of strings, not a {type(keys).__name__}")
        self.check_consistency()
        old, new = _name_list(old_keys), _name_list(new_keys)
        if len(old) != len(new):
            raise ColumnConflict(f"{len(old)} columns cannot take {len(new)} new names: {old} and {new}")
        self._check_present(old, self.names())
        kept = [name for name in self.names() if name not in old]
        if taken := sorted({name for name in new if name in kept or new.count(name) > 1}):
            raise ColumnConflict(f"names {taken} are taken: columns are {self.names()}")
        batch = self._unlocked_batch()
        columns = {to: self._column(name) for name, to in zip(old, new)}
        for name in old:
            if self.non_tensor_batch.pop(name, None) is None and batch is not None:
                del batch[name]
        for name, column in columns.items():
            self[name] = column
        return self

    def _check_present(self, names: list[str], present: Iterable[str]) -> None:
        present = list(present)
        if absent := [name for name in names if name not in present or names.count(name) > 1]:
            raise MissingColumn(missing_message(absent, present))

    def union(self, other: "DataProto") -> Self:
        """Adds the columns and ``meta_info`` of ``other``, in place; on an error nothing is added.

        Columns and facts that both batches have must be equal.

        Raises:
            RowCountMismatch: the batches have different numbers of rows.
            ColumnConflict: a name has two values, or is a tensor in one batch and an array in the other.
        """
        if not isinstance(other, DataProto):
            raise InvalidColumn(f"union takes a DataProto, not a {type(other).__name__}")
        self.check_consistency()
        other.check_consistency()
        if None not in (self._rows(), other._rows()) and len(self) != len(other):
            raise RowCountMismatch(f"union of {len(self)} rows with {len(other)} rows")
        for left, right in ((self, other), (other, self)):
            if crossing := sorted(left._tensors().keys() & right.non_tensor_batch.keys()):
                raise ColumnConflict(f"columns {crossing} are tensors on one side and arrays or ragged on the other")
        meta_info = union_meta_info(self.meta_info, other.meta_info)
        arrays = union_numpy_dict(dict(self.non_tensor_batch), other.non_tensor_batch)
        batch = self._unlocked_batch()
        if batch is None:
            self.batch = None if other.batch is None else other.batch.copy()
        elif other.batch is not None:
            union_tensor_dict(batch, other.batch)
        self.non_tensor_batch.update(arrays)
        self.meta_info.update(meta_info)
        return self

    def __or__(self, other: "DataProto") -> Self:
        return self.select().union(other) if isinstance(other, DataProto) else NotImplemented

    def __ior__(self, other: "DataProto") -> Self:
        return self.union(other) if isinstance(other, DataProto) else NotImplemented

    # ---- Rows

    def select_idxs(self, idxs: Index) -> Self:
        """Rows by their numbers, negative ones from the end, or by a mask. Tensors are copied, objects and ragged rows shared."""
        positions = as_positions(idxs, len(self))
        return self._map(len(positions), lambda _, column: columnwise.take(column, positions))

    def slice(self, start: int | None = None, end: int | None = None, step: int | None = None) -> Self:
        """Rows ``start:end:step``; views of the same memory unless ``step`` is negative."""
        bounds = as_slice(slice(start, end, step), len(self))
        rows = len(range(len(self))[bounds])
        return self._map(rows, lambda _, column: columnwise.cut(column, bounds))

    def reorder(self, indices: Index) -> None:
        """Reorders the rows in place; on an error they stay as they are.

        Raises:
            InvalidIndex: the indices do not name each row once; ``data[indices]`` takes some rows.
        """
        positions = as_positions(indices, len(self))
        if not np.array_equal(np.sort(positions), np.arange(len(self))):
            raise InvalidIndex(
                f"reorder needs each of the {len(self)} rows once, and got {len(positions)} indices that do not name them so: "
                "data[indices] takes some rows"
            )
        self._adopt(self.select_idxs(positions))

    def repeat(self, repeat_times: int = 2, interleave: bool = True) -> Self:
        """Repeats every row: ``aabb``, or ``abab`` without ``interleave``. Objects are shared, not copied."""
        times = int(repeats(repeat_times, len(self), [()]))
        return self._map(len(self) * times, lambda _, column: columnwise.repeat(column, times, interleave))

    def sample_level_repeat(self, repeat_times: "Sequence[int] | np.ndarray | torch.Tensor") -> Self:
        """Repeats row i ``repeat_times[i]`` times.

        Args:
            repeat_times: ``(B,)`` whole numbers of at least 0; InvalidIndex otherwise.
        """
        times = repeats(repeat_times, len(self), [(len(self),)])
        return self.select_idxs(np.repeat(np.arange(len(self)), times))

    def unfold_column_chunks(self, n_split: int, split_keys: Sequence[str] | None = None) -> Self:
        """Splits columns ``(B, n_split * K, ...)`` into rows ``(B * n_split, K, ...)``, and repeats the rows of other columns.

        Raises:
            IndivisibleBatch: the second dimension of a column in ``split_keys`` does not divide.
        """
        if n_split < 1:
            raise IndivisibleBatch(f"columns cannot be split into {n_split} parts")
        split = _name_list(split_keys)
        return self._map(
            len(self) * n_split,
            lambda name, column: (
                columnwise.unfold_chunks(column, n_split, name)
                if name in split
                else columnwise.repeat(column, n_split, interleave=True)
            ),
        )

    def padding(self, padding_size: int, padding_candidate: str = "") -> None:
        """Appends ``padding_size`` copies of the last row, or of the first with ``"first"``, in place."""
        if padding_size < 0 or (padding_size > 0 and len(self) == 0):
            raise InvalidIndex(f"cannot append {padding_size} copies of a row to a batch of {len(self)} rows")
        if padding_size:
            row = 0 if padding_candidate == "first" else len(self) - 1
            extra = self.slice(row, row + 1).repeat(padding_size)
            self._adopt(
                self._map(len(self) + padding_size, lambda name, column: columnwise.concat([column, extra[name]], name))
            )

    def _map(self, rows: int, change: Callable[[str, Column], Column]) -> Self:
        """A batch of ``rows`` rows whose columns are ``change(name, column)``, with a copy of ``meta_info``."""
        self.check_consistency()
        batch = None
        if self.batch is not None:
            tensors = {name: change(name, tensor) for name, tensor in self._tensors().items()}
            batch = TensorDict(tensors, batch_size=[rows], device=self.batch.device)
        arrays = {name: change(name, array) for name, array in self.non_tensor_batch.items()}
        return self._made(batch, arrays, dict(self.meta_info))

    def _made(self, batch: TensorDict | None, arrays: dict[str, Any], facts: dict[str, Any]) -> Self:
        """A batch of columns that a verb made from this one's. They are valid, so the fields are set without a check."""
        kind = type(self)
        if kind.__init__ is not DataProto.__init__ or kind.__post_init__ is not DataProto.__post_init__:
            return kind(batch=batch, non_tensor_batch=arrays, meta_info=facts)
        made = object.__new__(kind)
        made.batch, made.non_tensor_batch, made.meta_info = batch, arrays, facts
        return made

    def _adopt(self, other: "DataProto") -> None:
        """Takes the columns of a batch made from this one: the last step of verbs that work in place."""
        self.batch, self.non_tensor_batch = other.batch, other.non_tensor_batch

    # ---- Splitting and joining

    def is_padding_enabled(self) -> bool:
        """Whether ``meta_info`` or `DataProtoConfig` allows :meth:`chunk` to make splits of different sizes."""
        return bool(self.meta_info.get(DataProtoConfig.auto_padding_key, False)) or DataProtoConfig.auto_padding

    def chunk(self, chunks: int) -> list[Self]:
        """Splits the rows into ``chunks`` views of equal size. With padding enabled sizes may differ, and splits may be empty.

        Raises:
            IndivisibleBatch: the rows do not divide.
        """
        rows = len(self)
        if not isinstance(chunks, int | np.integer) or chunks < 1 or (rows % chunks and not self.is_padding_enabled()):
            raise IndivisibleBatch(
                f"{rows} rows do not divide into {chunks} equal parts; pad them with pad_dataproto_to_divisor first"
            )
        return self._partition(_part_sizes(rows, chunks, of_tensors=self.batch is not None))

    def split(self, split_size: int) -> list[Self]:
        """Splits the rows into views of ``split_size`` rows; the last one is shorter if the rows do not divide."""
        if not isinstance(split_size, int | np.integer) or split_size < 1:
            raise IndivisibleBatch(f"rows cannot be split into parts of {split_size}")
        whole, rest = divmod(len(self), int(split_size))
        return self._partition([split_size] * whole + [rest] * (rest > 0))

    def _partition(self, sizes: list[int]) -> list[Self]:
        """Splits of these sizes, in order, as views, each with a copy of ``meta_info``."""
        self.check_consistency()
        ends = list(accumulate(sizes))
        nested = any(getattr(tensor, "is_nested", False) for tensor in self._tensors().values())
        if nested or not sizes or 0 in sizes:  # Tensordict does not split these.
            return [self.slice(end - size, end) for size, end in zip(sizes, ends)]
        batches = [None] * len(ends) if self.batch is None else self.batch.split(sizes)
        return [
            self._made(
                batch,
                {name: array[end - size : end] for name, array in self.non_tensor_batch.items()},
                dict(self.meta_info),
            )
            for batch, size, end in zip(batches, sizes, ends)
        ]

    @staticmethod
    def concat(data: Iterable["DataProto"]) -> "DataProto":
        """Joins the rows of batches.

        ``metrics`` in ``meta_info`` are collected, other keys must agree (see `concat_meta_info`). A batch without columns adds
        no rows. A list in ``non_tensor_batch`` is read as an array, as in verl. Rollouts, which have ``max_tokens`` in
        ``meta_info``, are padded to the widest of them (see `dataproto.packing`) and keep the largest ``max_tokens``.

        Raises:
            MissingColumn: a column is absent from some batches.
            ColumnConflict: a column differs in kind or shape, or a key of ``meta_info`` in value.
        """
        if not (data := list(data)):
            raise InvalidIndex("there is nothing to concatenate: the list of parts is empty")
        for part in data:
            if not isinstance(part, DataProto):
                raise InvalidColumn(f"only DataProto can be concatenated, not {type(part).__name__}")
        data = [part._with_arrays() for part in data]
        meta_info = concat_meta_info([part.meta_info for part in data])
        parts = [part for part in data if part._rows() is not None]
        if not parts:
            return type(data[0])(meta_info=meta_info)
        if all(MAX_TOKENS in part.meta_info for part in parts):
            parts = equally_wide(parts)
        names = parts[0].names()
        for part in parts:
            if different := sorted(set(part.names()) ^ set(names)):
                raise MissingColumn(f"columns {different} are absent from some parts: {names} and {part.names()}")
        columns = {name: columnwise.concat([part[name] for part in parts], name) for name in names}
        arrays = {name: columns.pop(name) for name in parts[0].non_tensor_batch}
        batches = [part.batch for part in parts if part.batch is not None]
        batch = None
        if batches:
            device = batches[0].device if len({each.device for each in batches}) == 1 else None
            batch = TensorDict(columns, batch_size=[sum(map(len, parts))], device=device)
        return type(data[0])(batch=batch, non_tensor_batch=arrays, meta_info=meta_info)

    def _with_arrays(self) -> Self:
        """This batch, checked; or a batch with arrays in place of the lists in ``non_tensor_batch``."""
        lists = {name: np.asarray(rows) for name, rows in self.non_tensor_batch.items() if isinstance(rows, list)}
        if lists:
            return type(self)(self.batch, {**self.non_tensor_batch, **lists}, self.meta_info)
        self.check_consistency()
        return self

    def make_iterator(
        self,
        mini_batch_size: int,
        epochs: int,
        seed: int | None = None,
        dataloader_kwargs: Mapping[str, Any] | None = None,
    ) -> Iterator[Self]:
        """Iterates over mini-batches of ``mini_batch_size`` rows, ``epochs`` times.

        Without shuffling they are views of this batch. ``dataloader_kwargs={"shuffle": True}`` (arguments of torch's
        ``DataLoader``) shuffles in another order each epoch, which ``seed`` determines, or torch's global generator without it.
        As in verl, a seed does not shuffle by itself.

        Raises:
            IndivisibleBatch: the rows do not divide.
        """
        rows = len(self)
        if not isinstance(mini_batch_size, int | np.integer) or mini_batch_size < 1 or rows % mini_batch_size:
            raise IndivisibleBatch(f"{rows} rows do not divide into mini-batches of {mini_batch_size}")
        if rows == 0:
            return iter(())
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        numbers: Any = range(rows)
        loader = DataLoader(numbers, mini_batch_size, collate_fn=list, generator=generator, **(dataloader_kwargs or {}))
        return (self._rows_of(chosen) for _ in range(epochs) for chosen in loader)

    def _rows_of(self, chosen: list[int]) -> Self:
        if chosen == list(range(chosen[0], chosen[0] + len(chosen))):
            return self.slice(chosen[0], chosen[0] + len(chosen))
        return self.select_idxs(chosen)

    # ---- Moving and copying

    def to(
        self, device: torch.device | str | int | torch.dtype | None = None, dtype: torch.dtype | None = None
    ) -> Self:
        """Moves dense and ragged tensors to a device, in place. A dtype casts floating-point tensors and no others."""
        if isinstance(device, torch.dtype):
            device, dtype = None, device
        batch = self.batch if self.batch is None or device is None else self.batch.to(device)
        if batch is not None and dtype is not None:
            batch = batch.apply(lambda tensor: tensor.to(dtype) if tensor.dtype.is_floating_point else tensor)
        moved = {
            name: column.to(device, dtype) if isinstance(column, RaggedTensor) else column
            for name, column in self.non_tensor_batch.items()
        }
        self.batch, self.non_tensor_batch = batch, moved
        return self

    def writable(self) -> Self:
        """Returns a copy that may be written without changing this batch, or the memory of others where this one was received.

        Tensors, arrays and images are copied, also inside of objects, each distinct one once, so that rows share what they
        shared before; other objects are not copied.
        """
        batch, arrays, facts = copied((plain_batch(self.batch), self.non_tensor_batch, self.meta_info))
        return type(self)(batch=batch, non_tensor_batch=arrays, meta_info=facts)

    def __copy__(self) -> Self:
        return self.select()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        batch = None if self.batch is None else self.batch.clone()
        arrays, facts = copy.deepcopy((self.non_tensor_batch, self.meta_info), memo)
        return type(self)(batch=batch, non_tensor_batch=arrays, meta_info=facts)

    # ---- Saving and sending

    def save_to_disk(self, filepath: str | os.PathLike[str], allow_pickle: bool = False) -> None:
        """Writes one file that loads without running code: tensors and arrays as they are, images as PNG, the rest as JSON.

        Raises:
            FileFormatError: an object is of a type that only pickle can store, and ``allow_pickle`` is false.
        """
        disk.save(filepath, self.batch, self.non_tensor_batch, self.meta_info, allow_pickle)

    @staticmethod
    def load_from_disk(
        filepath: str | os.PathLike[str], allow_pickle: bool = False, verify: bool = False
    ) -> "DataProto":
        """Reads a file of :meth:`save_to_disk`; tensors and arrays stay in the file until they are used.

        Args:
            allow_pickle: also read pickled objects, which may run code.
            verify: read everything now and compare it with the checksums.

        Raises:
            FileFormatError: the file is damaged, of another format or version, or has pickled objects without ``allow_pickle``.
        """
        return disk.load(filepath, DataProto, allow_pickle, verify)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return reduce_batch(self, protocol)

    def __getstate__(self) -> tuple[EncodedTensorDict | None, dict[str, Any], dict[str, Any]]:
        """The state in verl's form: encoded tensors, arrays, ``meta_info``. Pickle uses `serialization.wire` instead."""
        encoded = None if self.batch is None else serialize_tensordict(self.batch)
        return encoded, self.non_tensor_batch, self.meta_info

    def __setstate__(self, state: tuple[Any, dict[str, Any], dict[str, Any]]) -> None:
        """Sets the state from :meth:`__getstate__` of this class or of verl's, whose pickles load where this class replaces it.

        In verl's state the tensors may be bytes of ``torch.save``; they are unpickled like the rest of the state.
        """
        encoded, self.non_tensor_batch, self.meta_info = state
        if isinstance(encoded, bytes):
            here = torch.accelerator.is_available()
            self.batch = torch.load(BytesIO(encoded), map_location=None if here else "cpu", weights_only=False)
        else:
            self.batch = None if encoded is None else deserialize_tensordict(encoded)
        self.__post_init__()


def _is_column(value: object, shape: torch.Size) -> bool:
    """Whether a value that a ``TensorDict`` of this shape keeps whole is an array of what torch cannot hold, one for each row."""
    if not isinstance(value, np.ndarray) or value.dtype.kind in "biufc":
        return False
    return bool(value.shape[:1] == tuple(shape[:1]) != ())


def _batch_shape(name: str, tensor: Any, dims: int) -> tuple[int, ...]:
    if len(getattr(tensor, "shape", ())) == 0:
        raise InvalidColumn(f"column {name!r} is a {type(tensor).__name__} without rows, not a tensor (B, ...)")
    return tuple(tensor.shape[:dims])


def _part_sizes(rows: int, parts: int, of_tensors: bool) -> list[int]:
    """Sizes of ``parts`` splits: those of ``torch.chunk`` if it makes that many, otherwise the most even ones."""
    size = -(-rows // parts)
    if of_tensors and size and -(-rows // size) == parts:
        return [size] * (parts - 1) + [rows - size * (parts - 1)]
    return [rows // parts + (part < rows % parts) for part in range(parts)]


def _pick(values: Mapping[str, Any], names: Iterable[str] | None) -> dict[str, Any]:
    if names is None:
        return dict(values)
    wanted = set(_name_list(names))
    return {name: value for name, value in values.items() if name in wanted}


def _name_list(names: Iterable[str] | None) -> list[str]:
    return [] if names is None else [names] if isinstance(names, str) else list(names)


# ---- verl's functions


class _Switches(type):
    """Class-level properties of :class:`DataProtoConfig`."""

    auto_padding_key = "_verl_auto_padding"
    _auto_padding = False

    @property
    def auto_padding(cls) -> bool:
        """Whether every batch may be split unevenly; ``VERL_AUTO_PADDING=TRUE`` in the environment enables it too."""
        return cls._auto_padding or os.getenv("VERL_AUTO_PADDING", "FALSE").upper() in ("TRUE", "1")

    @auto_padding.setter
    def auto_padding(cls, enabled: bool) -> None:
        if not isinstance(enabled, bool):
            raise InvalidColumn(f"auto_padding is True or False, not {enabled!r}")
        cls._auto_padding = enabled


class DataProtoConfig(metaclass=_Switches):
    """Switches of the whole process, under verl's names."""


Batch = TypeVar("Batch", bound=DataProto)


def pad_dataproto_to_divisor(data: Batch, size_divisor: int) -> tuple[Batch, int]:
    """Repeats rows from the front until the number of rows divides.

    Returns:
        The padded batch (``data`` itself if its rows divide) and the number of rows added.

    Raises:
        IndivisibleBatch: ``size_divisor`` is not positive.

    >>> padded, added = pad_dataproto_to_divisor(DataProto.from_dict(non_tensors={"name": ["a", "b", "c"]}), 7)
    >>> padded["name"].tolist(), added
    (['a', 'b', 'c', 'a', 'b', 'c', 'a'], 4)
    """
    if size_divisor < 1:
        raise IndivisibleBatch(f"rows cannot be divided into {size_divisor} parts")
    rows = len(data)
    added = -rows % size_divisor
    if rows == 0:
        logger.warning("a batch without rows has nothing to repeat and is not padded")
    if added == 0:
        return data, 0
    sizes = [rows] * (added // rows) + [added % rows] * (added % rows > 0)

    def padded(name: str, column: Column) -> Column:
        return columnwise.concat([column, *(columnwise.cut(column, slice(0, size, 1)) for size in sizes)], name)

    return data._map(rows + added, padded), added


def unpad_dataproto(data: Batch, pad_size: int) -> Batch:
    """Removes the last ``pad_size`` rows; returns ``data`` itself for 0.

    Raises:
        InvalidIndex: ``pad_size`` is negative or larger than the number of rows.
    """
    if not 0 <= pad_size <= len(data):
        raise InvalidIndex(f"cannot take {pad_size} rows off a batch of {len(data)} rows")
    return data if pad_size == 0 else data.slice(0, len(data) - pad_size)


def fold_batch_dim(data: Batch, new_batch_size: int) -> Batch:
    """Columns ``(B, ...)`` to ``(new_batch_size, B // new_batch_size, ...)``; tensors are views where torch can make one.

    Raises:
        IndivisibleBatch: the number of rows does not divide.
        InvalidColumn: a column is ragged.
    """
    columns = columnwise.fold_rows(data._columns(), len(data), new_batch_size)
    return data._map(new_batch_size, lambda name, _: columns[name])


def unfold_batch_dim(data: Batch, batch_dims: int = 2) -> Batch:
    """Merges the first ``batch_dims`` dimensions of every column into one, the rows: ``(A, B, ...)`` to ``(A * B, ...)``.

    Raises:
        InvalidColumn: a column is ragged, has fewer dimensions, or differs from the others in their sizes.
    """
    columns, rows = columnwise.unfold_rows(data._columns(), batch_dims)
    return data._map(len(data) if rows is None else rows, lambda name, _: columns[name])


def collate_fn(x: list[DataProtoItem]) -> DataProto:
    """A batch of items: tensors are stacked, all other values become columns of objects, ``meta_info`` is left out.

    Raises:
        MissingColumn: items have different columns.
        ColumnConflict: tensors of one name have different shapes.
    """
    if not x:
        return DataProto()
    tensors = [{} if item.batch is None else dict(item.batch.items()) for item in x]
    names = [{*each, *item.non_tensor_batch} for each, item in zip(tensors, x)]
    for row, present in enumerate(names):
        if present != names[0]:
            raise MissingColumn(f"item {row} lacks or adds columns: {sorted(present ^ names[0])}")
    batch = None
    if x[0].batch is not None:
        columns = {key: columnwise.concat([each[key].unsqueeze(0) for each in tensors], key) for key in tensors[0]}
        batch = TensorDict(columns, batch_size=[len(x)], device=x[0].batch.device)
    arrays = {
        key: columnwise.as_array([item.non_tensor_batch[key] for item in x], key) for key in x[0].non_tensor_batch
    }
    return DataProto(batch=batch, non_tensor_batch=arrays)


def all_gather_data_proto(data: DataProto, process_group: Any) -> None:
    """:func:`dataproto.all_gather` in place, as in verl: each rank keeps its own ``meta_info``. On an error no batch changes."""
    data._adopt(all_gather(data, process_group, with_facts=False))

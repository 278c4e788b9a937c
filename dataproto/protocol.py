"""``DataProto``: the one batch that travels between the workers, and its verbs.

Names, arguments and results are those of ``verl.protocol`` (0.9); what is stricter here stands in each docstring under Raises. The
rules for single columns are in ``rows``, those for merging in ``merging``.
"""

import copy
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self, overload

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase

from dataproto import describe
from dataproto import rows as columnwise
from dataproto.columns import missing_message
from dataproto.errors import (
    ColumnConflict,
    IndivisibleBatch,
    InvalidColumn,
    InvalidIndex,
    MissingColumn,
    RowCountMismatch,
)
from dataproto.folding import fold_batch_dim, unfold_batch_dim, unfold_columns
from dataproto.merging import concat_meta_info, union_meta_info, union_numpy_dict, union_tensor_dict
from dataproto.padding import (
    DataProtoConfig,
    pad_dataproto_to_divisor,
    pad_inert,
    unpad_dataproto,
    unpad_inert,
)
from dataproto.rows import Column, Index
from dataproto.serialize import (
    deserialize_single_tensor,
    deserialize_tensordict,
    serialize_single_tensor,
    serialize_tensordict,
)
from dataproto.tensordict_utils import get_tensordict

__all__ = [
    "DataProto",
    "DataProtoConfig",
    "DataProtoItem",
    "collate_fn",
    "deserialize_single_tensor",
    "deserialize_tensordict",
    "fold_batch_dim",
    "pad_dataproto_to_divisor",
    "pad_inert",
    "serialize_single_tensor",
    "serialize_tensordict",
    "unfold_batch_dim",
    "union_numpy_dict",
    "union_tensor_dict",
    "unpad_dataproto",
    "unpad_inert",
]


@dataclass
class DataProtoItem:
    """One row: its tensors without the batch dimension, its objects, and a copy of the batch's facts."""

    batch: TensorDict | None = None
    non_tensor_batch: dict[str, Any] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)


def collate_fn(x: list[DataProtoItem]) -> "DataProto":
    """Items to a batch: tensors stacked, anything else as columns of objects, ``meta_info`` left out.

    Raises:
        MissingColumn: items have different columns.
    """
    names = [(set() if item.batch is None else set(item.batch.keys())) | item.non_tensor_batch.keys() for item in x]
    for row, present in enumerate(names):
        if present != names[0]:
            raise MissingColumn(f"item {row} lacks or adds columns: {sorted(present ^ names[0])}")
    tensors = [item.batch for item in x if item.batch is not None]
    keys = x[0].non_tensor_batch if x else {}
    return DataProto(
        batch=torch.stack(tensors).contiguous() if tensors else None,
        non_tensor_batch={key: columnwise.as_array([item.non_tensor_batch[key] for item in x], key) for key in keys},
    )


@dataclass(eq=False, repr=False)
class DataProto:
    """Columns of ``len(data)`` rows, and facts about the batch as a whole.

    Args:
        batch: tensors ``(B, ...)`` in a ``TensorDict`` of batch size ``[B]``, or ``None``.
        non_tensor_batch: arrays ``(B, ...)``, mostly of dtype object: one Python object a row.
        meta_info: facts about the whole batch. What belongs to a row is a column.

    Raises:
        InvalidColumn: a column is not a tensor or array with rows.
        RowCountMismatch: columns have different numbers of rows.
        ColumnConflict: one name stands in both fields.

    Columns are shared by reference between batches made from one another, containers never are.

    >>> data = DataProto.from_dict({"ids": torch.tensor([[1, 2], [3, 4], [5, 6]])}, {"uid": ["a", "b", "c"]})
    >>> len(data), data["uid"].tolist(), data[1:]["ids"].tolist()
    (3, ['a', 'b', 'c'], [[3, 4], [5, 6]])
    >>> data["score"] = torch.tensor([0.5, 1.0, 0.0])
    >>> data[data["score"] > 0].repeat(2)["uid"].tolist()
    ['a', 'a', 'b', 'b']
    """

    batch: TensorDict | None = None
    non_tensor_batch: dict[str, np.ndarray] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.non_tensor_batch = {} if self.non_tensor_batch is None else self.non_tensor_batch
        self.meta_info = {} if self.meta_info is None else self.meta_info
        self.check_consistency()

    # Making one

    @classmethod
    def from_dict(
        cls,
        tensors: Mapping[str, torch.Tensor] | None = None,
        non_tensors: Mapping[str, Any] | None = None,
        meta_info: Mapping[str, Any] | None = None,
        num_batch_dims: int = 1,
        auto_padding: bool = False,
    ) -> Self:
        """A batch of tensors ``(B, ...)`` and of lists or arrays of B rows; ``auto_padding`` allows uneven ``chunk``.

        A list becomes an array of objects, one a row; rows that are lists of plain scalars of one length become a 2-D array.
        """
        if num_batch_dims < 1 or (num_batch_dims > 1 and non_tensors is not None):
            raise InvalidColumn(f"num_batch_dims={num_batch_dims}: rows are one dimension")
        rows = {name: _batch_shape(name, tensor, num_batch_dims) for name, tensor in (tensors or {}).items()}
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
        data: Mapping[str, torch.Tensor | np.ndarray],
        meta_info: Mapping[str, Any] | None = None,
        auto_padding: bool = False,
    ) -> Self:
        """A batch of tensors and arrays, told apart by their type; InvalidColumn for anything else."""
        for name, value in data.items():
            if not isinstance(value, torch.Tensor | np.ndarray):
                raise InvalidColumn(f"column {name!r} is a {type(value).__name__}, not a tensor or numpy array")
        tensors = {name: value for name, value in data.items() if isinstance(value, torch.Tensor)}
        arrays = {name: value for name, value in data.items() if isinstance(value, np.ndarray)}
        return cls.from_dict(tensors=tensors, non_tensors=arrays, meta_info=meta_info, auto_padding=auto_padding)

    @classmethod
    def from_tensordict(
        cls, tensor_dict: TensorDict, meta_info: Mapping[str, Any] | None = None, num_batch_dims: int = 1
    ) -> Self:
        """Tensors become ``batch``, ``NonTensorStack`` columns arrays of objects, ``NonTensorData`` facts in ``meta_info``."""
        tensors: dict[str, Any] = {}
        arrays: dict[str, Any] = {}
        facts = dict(meta_info or {})
        for name in tensor_dict.keys():
            value = tensor_dict.get(name)
            if isinstance(value, NonTensorStack):
                arrays[name] = [row.data for row in value]
            elif isinstance(value, NonTensorData):
                facts[name] = value.data
            else:
                tensors[name] = value
        return cls.from_dict(tensors, arrays or None, facts, num_batch_dims)

    def to_tensordict(self) -> TensorDict:
        """The columns and facts as one ``TensorDict``; ColumnConflict where a fact has a column's name."""
        columns = {} if self.batch is None else dict(self.batch.items())
        for name, array in self.non_tensor_batch.items():
            columns[name] = NonTensorStack.from_list([NonTensorData(value) for value in array])
        return get_tensordict(columns, self.meta_info)

    # Looking at it

    def __len__(self) -> int:
        return self._rows() or 0

    def _rows(self) -> int | None:
        """The number of rows, or ``None`` where there is no column that could say."""
        if self.batch is not None:
            return int(self.batch.batch_size[0])
        return next((len(array) for array in self.non_tensor_batch.values()), None)

    def names(self) -> list[str]:
        """The names of all columns, tensors first."""
        return [*(() if self.batch is None else self.batch.keys()), *self.non_tensor_batch]

    def __contains__(self, name: object) -> bool:
        return name in self.non_tensor_batch or (self.batch is not None and name in self.batch.keys())

    def __repr__(self) -> str:
        return f"{type(self).__name__} of {len(self)} rows\n{self.get_data_info()}"

    def get_data_info(self) -> str:
        """Names, shapes, dtypes and types of all that the batch holds, one a line."""
        return describe.data_info(self.batch, self.non_tensor_batch, self.meta_info)

    def print_size(self, prefix: str = "") -> None:
        """Prints how many GB tensors and arrays take."""
        print(describe.size_info(self.batch, self.non_tensor_batch, prefix))

    def check_consistency(self) -> None:
        """Checks that every column has the same rows and a name of its own; see the class for what it raises."""
        if self.batch is not None and (not isinstance(self.batch, TensorDictBase) or self.batch.batch_dims != 1):
            found = getattr(self.batch, "batch_size", type(self.batch).__name__)
            raise InvalidColumn(f"batch is a TensorDict with one batch dimension, not {found}")
        tensors = {} if self.batch is None else self.batch
        rows = self._rows()
        for name, array in self.non_tensor_batch.items():
            if not isinstance(array, np.ndarray):
                raise InvalidColumn(
                    f"column {name!r} of non_tensor_batch is a {type(array).__name__}, not a numpy array"
                )
            if columnwise.row_count(array, name) != rows:
                raise RowCountMismatch(f"column {name!r} has {len(array)} rows, the batch has {rows}")
            if name in tensors:
                raise ColumnConflict(f"column {name!r} stands in batch and in non_tensor_batch")

    # One column

    @overload
    def __getitem__(self, item: str) -> Any: ...
    @overload
    def __getitem__(self, item: int | np.integer[Any]) -> DataProtoItem: ...
    @overload
    def __getitem__(self, item: Index) -> Self: ...
    def __getitem__(self, item: Any) -> Any:
        """A column by its name, a row by its number, rows by a slice, list, array, tensor or mask.

        Raises:
            MissingColumn: no column has that name.
            InvalidIndex: out of range, or not something that selects rows.
        """
        if isinstance(item, str):
            return self._column(item)
        if isinstance(item, slice):
            return self.slice(item.start, item.stop, item.step)
        if isinstance(item, list | range | np.ndarray | torch.Tensor) and getattr(item, "ndim", 1) > 0:
            return self.select_idxs(item)
        row = columnwise.as_row(item, len(self))
        return DataProtoItem(
            batch=None if self.batch is None else self.batch[row],
            non_tensor_batch={name: array[row] for name, array in self.non_tensor_batch.items()},
            meta_info=dict(self.meta_info),
        )

    def __setitem__(self, name: str, column: torch.Tensor | np.ndarray | Sequence[Any]) -> None:
        """Adds or replaces a column: tensors go to ``batch``, arrays and lists to ``non_tensor_batch``.

        Raises:
            RowCountMismatch: not as many rows as the batch.
            InvalidColumn: not a column.
        """
        if not isinstance(name, str):
            raise InvalidColumn(f"columns are named by strings, not {name!r}")
        value = column if isinstance(column, torch.Tensor | TensorDictBase) else columnwise.as_array(column, name)
        found, rows = columnwise.row_count(value, name), self._rows()
        if rows is not None and found != rows:
            raise RowCountMismatch(f"column {name!r} has {found} rows, the batch has {rows}")
        batch = self._unlocked_batch()
        if isinstance(value, np.ndarray):
            self.non_tensor_batch[name] = value
            if batch is not None and name in batch.keys():
                del batch[name]
        else:
            self.batch = TensorDict({}, batch_size=[found]) if batch is None else batch
            self.batch.set(name, value)
            self.non_tensor_batch.pop(name, None)

    def _column(self, name: str) -> Any:
        if name in self.non_tensor_batch:
            return self.non_tensor_batch[name]
        if self.batch is None or name not in self.batch.keys():
            raise MissingColumn(missing_message([name], self.names()))
        return self.batch[name]

    def _unlocked_batch(self) -> TensorDict | None:
        if self.batch is not None and self.batch.is_locked:
            self.batch = self.batch.copy()
        return self.batch

    # Some of the columns

    def select(
        self,
        batch_keys: Iterable[str] | None = None,
        non_tensor_batch_keys: Iterable[str] | None = None,
        meta_info_keys: Iterable[str] | None = None,
        deepcopy: bool = False,
    ) -> Self:
        """Some of the columns and facts (``None``: all of that field), by reference; with ``deepcopy``, copies.

        Raises:
            MissingColumn: a name in ``batch_keys`` is absent. In the other fields absent names are passed over, as in verl.
        """
        batch = None if self.batch is None else self.batch.copy()
        if batch_keys is not None:
            wanted = _name_list(batch_keys)
            self._check_present(wanted, () if batch is None else batch.keys())
            batch = None if batch is None else batch.select(*wanted)
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
        """Takes columns and facts out, in place, and returns them as a batch; on an error nothing is taken out.

        Raises:
            MissingColumn: a name is absent, or stands twice.
        """
        batch = self._unlocked_batch()
        tensors, arrays, facts = map(_name_list, (batch_keys, non_tensor_batch_keys, meta_info_keys))
        self._check_present(tensors, () if batch is None else batch.keys())
        self._check_present(arrays, self.non_tensor_batch)
        self._check_present(facts, self.meta_info)
        return type(self).from_dict(
            {name: batch.pop(name) for name in tensors} if batch is not None else None,
            {name: self.non_tensor_batch.pop(name) for name in arrays},
            {name: self.meta_info.pop(name) for name in facts},
        )

    def rename(self, old_keys: str | Sequence[str], new_keys: str | Sequence[str]) -> Self:
        """Gives columns new names, in place and all at once (so that two may swap); on an error none is renamed.

        Raises:
            MissingColumn: an old name is absent.
            ColumnConflict: a new name is taken, or there are not as many new names as old ones.
        """
        for keys in (old_keys, new_keys):
            if not isinstance(keys, str | list | tuple):
                raise InvalidColumn(f"names are a string or a list of strings, not a {type(keys).__name__}")
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

    # Some of the rows

    def select_idxs(self, idxs: Index) -> Self:
        """Rows by numbers (negative ones count from the end) or by a mask; tensors are copied, objects shared."""
        positions = columnwise.as_positions(idxs, len(self))
        return self._map(len(positions), lambda _, column: columnwise.take(column, positions))

    def slice(self, start: int | None = None, end: int | None = None, step: int | None = None) -> Self:
        """Rows ``start:end:step``; views of the same memory, except where ``step`` is negative."""
        bounds = columnwise.as_slice(slice(start, end, step), len(self))
        rows = len(range(len(self))[bounds])
        return self._map(rows, lambda _, column: columnwise.cut(column, bounds))

    def _map(self, rows: int, change: Callable[[str, Column], Column]) -> Self:
        """A batch of ``rows`` rows whose columns are ``change(name, column)``, with its own ``meta_info``."""
        batch = None
        if self.batch is not None:
            tensors = {name: change(name, tensor) for name, tensor in self.batch.items()}
            batch = TensorDict(tensors, batch_size=[rows], device=self.batch.device)
        arrays = {name: change(name, array) for name, array in self.non_tensor_batch.items()}
        return type(self)(batch=batch, non_tensor_batch=arrays, meta_info=dict(self.meta_info))

    def _adopt(self, other: "DataProto") -> None:
        """Takes over the columns of a batch made from this one: the last step of verbs that work in place."""
        self.batch, self.non_tensor_batch = other.batch, other.non_tensor_batch

    def reorder(self, indices: Index) -> None:
        """Puts the rows in another order, in place; on an error they stay as they are."""
        self._adopt(self.select_idxs(indices))

    def repeat(self, repeat_times: int = 2, interleave: bool = True) -> Self:
        """Every row ``repeat_times`` times: ``aabb``, or ``abab`` where not ``interleave``. Objects are shared, not copied."""
        if isinstance(repeat_times, bool) or not isinstance(repeat_times, int | np.integer) or repeat_times < 0:
            raise InvalidIndex(f"rows cannot be repeated {repeat_times!r} times")
        times = int(repeat_times)
        return self._map(len(self) * times, lambda _, column: columnwise.repeat(column, times, interleave))

    def sample_level_repeat(self, repeat_times: "Sequence[int] | np.ndarray | torch.Tensor") -> Self:
        """Row i ``repeat_times[i]`` times, ``(B,)``; InvalidIndex where they are not B whole numbers of at least 0."""
        times = np.asarray(repeat_times.tolist() if isinstance(repeat_times, torch.Tensor) else repeat_times)
        times = times.astype(np.int64) if times.size == 0 else times
        if times.shape != (len(self),) or times.dtype.kind not in "iu" or (times < 0).any():
            raise InvalidIndex(f"{len(self)} rows need as many whole numbers of repeats, not {repeat_times!r}")
        return self.select_idxs(np.repeat(np.arange(len(self)), times))

    def unfold_column_chunks(self, n_split: int, split_keys: Sequence[str] | None = None) -> Self:
        """Cuts columns ``(B, n_split * K, ...)`` into rows ``(B * n_split, K, ...)`` and repeats the other columns to match.

        Raises:
            IndivisibleBatch: the second dimension of a column in ``split_keys`` does not divide.
        """
        return unfold_columns(self, n_split, _name_list(split_keys))

    # Parts and wholes

    def is_padding_enabled(self) -> bool:
        """Whether ``chunk`` may make parts of different sizes: by ``meta_info`` or for the whole process."""
        return bool(self.meta_info.get(DataProtoConfig.auto_padding_key, False)) or DataProtoConfig.auto_padding

    def padding(self, padding_size: int, padding_candidate: str = "") -> None:
        """Appends ``padding_size`` copies of the first (``"first"``) or else the last row, in place."""
        if padding_size < 0 or (padding_size > 0 and len(self) == 0):
            raise InvalidIndex(f"cannot append {padding_size} copies of a row to a batch of {len(self)} rows")
        if padding_size:
            row = 0 if padding_candidate == "first" else len(self) - 1
            extra = self.slice(row, row + 1).repeat(padding_size)
            self._adopt(
                self._map(len(self) + padding_size, lambda name, column: columnwise.join([column, extra[name]], name))
            )

    def chunk(self, chunks: int) -> list[Self]:
        """``chunks`` parts of equal size, in order, as views. With padding enabled sizes may differ, and parts be empty.

        Raises:
            IndivisibleBatch: the rows do not divide.
        """
        rows = len(self)
        if chunks < 1 or (rows % chunks and not self.is_padding_enabled()):
            raise IndivisibleBatch(
                f"{rows} rows do not divide into {chunks} equal parts; pad them with pad_dataproto_to_divisor first"
            )
        ends = np.cumsum(_part_sizes(rows, chunks, of_tensors=self.batch is not None)).tolist()
        return [self.slice(start, end) for start, end in zip([0, *ends], ends)]

    def split(self, split_size: int) -> list[Self]:
        """Parts of ``split_size`` rows as views, the last one shorter where the rows do not divide."""
        if split_size < 1:
            raise IndivisibleBatch(f"rows cannot be split into parts of {split_size}")
        return [self.slice(start, start + split_size) for start in range(0, len(self), split_size)]

    @staticmethod
    def concat(data: Sequence["DataProto"]) -> "DataProto":
        """The rows of all parts. ``metrics`` in ``meta_info`` are collected, other facts must agree (see ``merging``).

        A part without any column adds no rows.

        Raises:
            MissingColumn: a column is absent from some part.
            ColumnConflict: a column or fact differs in kind or value.
        """
        if not data:
            raise InvalidIndex("there is nothing to concatenate: the list of parts is empty")
        for part in data:
            if not isinstance(part, DataProto):
                raise InvalidColumn(f"only DataProto can be concatenated, not {type(part).__name__}")
            part.check_consistency()
        meta_info = concat_meta_info([part.meta_info for part in data])
        parts = [(number, part) for number, part in enumerate(data) if part._rows() is not None]
        if not parts:
            return type(data[0])(meta_info=meta_info)
        first = parts[0][1]
        for number, part in parts:
            if different := sorted(set(part.names()) ^ set(first.names())):
                raise MissingColumn(
                    f"columns {different} are absent from some parts: part {parts[0][0]} has {first.names()}, "
                    f"part {number} has {part.names()}"
                )
        columns = {name: columnwise.join([part[name] for _, part in parts], name) for name in first.names()}
        batch = None
        if any(part.batch is not None for _, part in parts):
            devices = {part.batch.device for _, part in parts if part.batch is not None}
            tensors = {name: column for name, column in columns.items() if name not in first.non_tensor_batch}
            rows = sum(len(part) for _, part in parts)
            batch = TensorDict(tensors, batch_size=[rows], device=devices.pop() if len(devices) == 1 else None)
        arrays = {name: columns[name] for name in first.non_tensor_batch}
        return type(data[0])(batch=batch, non_tensor_batch=arrays, meta_info=meta_info)

    def union(self, other: "DataProto") -> Self:
        """Adds the columns and facts of ``other``, in place; on an error nothing is added. What both hold must be equal.

        Raises:
            RowCountMismatch: different numbers of rows.
            ColumnConflict: a name has two values, or stands for a tensor here and an array there.
        """
        if not isinstance(other, DataProto):
            raise InvalidColumn(f"union takes a DataProto, not a {type(other).__name__}")
        self.check_consistency()
        other.check_consistency()
        if None not in (self._rows(), other._rows()) and len(self) != len(other):
            raise RowCountMismatch(f"union of {len(self)} rows with {len(other)} rows")
        for left, right in ((self, other), (other, self)):
            if crossing := sorted(set(() if left.batch is None else left.batch.keys()) & right.non_tensor_batch.keys()):
                raise ColumnConflict(f"columns {crossing} are tensors on one side and arrays on the other")
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

    def make_iterator(
        self,
        mini_batch_size: int,
        epochs: int,
        seed: int | None = None,
        dataloader_kwargs: Mapping[str, Any] | None = None,
    ) -> Iterator[Self]:
        """Mini-batches of ``mini_batch_size`` rows, ``epochs`` times over.

        Without shuffling they are views of this batch. A ``seed`` shuffles, in another order each epoch, unless ``dataloader_kwargs``
        (those of torch's ``DataLoader``) say ``shuffle=False`` or bring a sampler; ``shuffle=True`` without a seed draws from torch's
        global generator.

        Raises:
            IndivisibleBatch: the rows do not divide.
        """
        rows = len(self)
        if mini_batch_size < 1 or rows % mini_batch_size:
            raise IndivisibleBatch(f"{rows} rows do not divide into mini-batches of {mini_batch_size}")
        options = dict(dataloader_kwargs or {})
        if seed is not None and not options.keys() & {"sampler", "batch_sampler"}:
            options.setdefault("shuffle", True)
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        loader: Any = torch.utils.data.DataLoader(
            range(rows),
            batch_size=mini_batch_size,
            collate_fn=list,
            generator=generator,
            **options,  # type: ignore[arg-type]
        )
        return (self._rows_of(chosen) for _ in range(epochs) for chosen in loader)

    def _rows_of(self, chosen: list[int]) -> Self:
        if chosen == list(range(chosen[0], chosen[0] + len(chosen))):
            return self.slice(chosen[0], chosen[0] + len(chosen))
        return self.select_idxs(chosen)

    # Elsewhere

    def to(self, device: torch.device | str | int) -> Self:
        """Moves the tensors of ``batch`` to a device, in place."""
        if self.batch is not None:
            self.batch = self.batch.to(device)
        return self

    def __copy__(self) -> Self:
        return self.select()

    def __getstate__(self) -> tuple[Any, ...]:
        return (None if self.batch is None else serialize_tensordict(self.batch), self.non_tensor_batch, self.meta_info)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        encoded, self.non_tensor_batch, self.meta_info = state
        self.batch = None if encoded is None else deserialize_tensordict(encoded)

    def save_to_disk(self, filepath: str | os.PathLike[str], allow_pickle: bool = False) -> None:
        """Writes one file that loads without running code: tensors and arrays as they are, images as PNG, the rest as JSON.

        Raises:
            FileFormatError: an object is of a kind that only pickle can store, and ``allow_pickle`` is not given.
        """
        disk.save(filepath, self.batch, self.non_tensor_batch, self.meta_info, allow_pickle)

    @staticmethod
    def load_from_disk(filepath: str | os.PathLike[str], allow_pickle: bool = False) -> "DataProto":
        """Reads what :meth:`save_to_disk` wrote.

        Raises:
            FileFormatError: damaged, of another format or version, or with pickled objects while ``allow_pickle`` is not given.
        """
        return DataProto(*disk.load(filepath, allow_pickle))


def _batch_shape(name: str, tensor: Any, dims: int) -> tuple[int, ...]:
    if len(getattr(tensor, "shape", ())) == 0:
        raise InvalidColumn(f"column {name!r} is a {type(tensor).__name__} without rows, not a tensor (B, ...)")
    return tuple(tensor.shape[:dims])


def _name_list(names: Iterable[str] | None) -> list[str]:
    return [] if names is None else [names] if isinstance(names, str) else list(names)


def _pick(values: Mapping[str, Any], names: Iterable[str] | None) -> dict[str, Any]:
    if names is None:
        return dict(values)
    wanted = set(_name_list(names))
    return {name: value for name, value in values.items() if name in wanted}


def _part_sizes(rows: int, parts: int, of_tensors: bool) -> list[int]:
    """Sizes of ``parts`` parts: those of ``torch.chunk`` where it makes that many parts, otherwise as even as can be."""
    size = -(-rows // parts)
    if of_tensors and size and -(-rows // size) == parts:
        return [size] * (parts - 1) + [rows - size * (parts - 1)]
    return [rows // parts + (part < rows % parts) for part in range(parts)]

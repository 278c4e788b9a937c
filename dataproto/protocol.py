"""``DataProto``: the one batch that travels between the workers, and its verbs.

Names, arguments and results are those of ``verl.protocol`` (0.9); what is stricter here stands in each docstring under Raises.
The fields and their law are in ``table``, the rules for single columns in ``rows``, those for merging in ``merging``.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict
from torch.utils.data import DataLoader

from dataproto import _verl_conversion as conversion
from dataproto._ops import column_ops as columnwise
from dataproto._ops.folding import fold_batch_dim, unfold_batch_dim, unfold_columns
from dataproto._ops.indexing import Index
from dataproto._ops.merging import collate_fn, concat_meta_info, union_meta_info, union_numpy_dict, union_tensor_dict
from dataproto._ops.padding import (
    DataProtoConfig,
    pad_dataproto_to_divisor,
    pad_inert,
    unpad_dataproto,
    unpad_inert,
)
from dataproto._ops.widths import MAX_TOKENS, equally_wide
from dataproto._table import DataProtoItem, Table, name_list
from dataproto._verl_dispatch import BatchData, DataProtoFuture, _padding_size_key
from dataproto.distributed import all_gather_data_proto
from dataproto.errors import (
    ColumnConflict,
    IndivisibleBatch,
    InvalidColumn,
    InvalidIndex,
    MissingColumn,
    RowCountMismatch,
)
from dataproto.ragged import RaggedTensor
from dataproto.serialization import file as disk
from dataproto.serialization.tensor_bytes import (
    deserialize_single_tensor,
    deserialize_tensordict,
    serialize_single_tensor,
    serialize_tensordict,
)
from dataproto.tensordict_utils import get_tensordict, stack_objects

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
    "pad_inert",
    "serialize_single_tensor",
    "serialize_tensordict",
    "unfold_batch_dim",
    "union_numpy_dict",
    "union_tensor_dict",
    "unpad_dataproto",
    "unpad_inert",
]


class DataProto(Table):
    """Columns of ``len(data)`` rows, and facts about the batch as a whole.

    Args:
        batch: tensors ``(B, ...)`` in a ``TensorDict`` of batch size ``[B]``, or ``None``.
        non_tensor_batch: arrays ``(B, ...)``, mostly of dtype object: one Python object a row; and ragged tensors of B rows.
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

    # Making one

    @classmethod
    def from_dict(
        cls,
        tensors: Mapping[str, torch.Tensor | RaggedTensor] | None = None,
        non_tensors: Mapping[str, Any] | None = None,
        meta_info: Mapping[str, Any] | None = None,
        num_batch_dims: int = 1,
        auto_padding: bool = False,
    ) -> Self:
        """A batch of tensors ``(B, ...)`` and of lists or arrays of B rows; ``auto_padding`` allows uneven ``chunk``.

        A list becomes an array of objects, one a row; rows that are lists of plain scalars of one length become a 2-D array.
        Ragged tensors may stand in either argument; they go to ``non_tensor_batch``.
        """
        ragged = {name: column for name, column in (tensors or {}).items() if isinstance(column, RaggedTensor)}
        tensors = {name: tensor for name, tensor in (tensors or {}).items() if name not in ragged}
        if clash := sorted(ragged.keys() & (non_tensors or {}).keys()):
            raise ColumnConflict(f"columns {clash} stand in tensors and in non_tensors")
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
        """A batch of tensors, ragged tensors and arrays, told apart by their type; InvalidColumn for anything else."""
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
        """Tensors become ``batch``, ``NonTensorStack`` columns arrays of objects, ``NonTensorData`` facts in ``meta_info``.

        Nested tensors whose rows vary in their first dimension become ragged columns over the same values.
        """
        tensors: dict[str, Any] = {}
        arrays: dict[str, Any] = {}
        facts = dict(meta_info or {})
        for name, value in tensor_dict.items():
            if isinstance(value, NonTensorStack):
                arrays[name] = [row.data for row in value]
            elif isinstance(value, NonTensorData):
                facts[name] = value.data
            elif RaggedTensor.holds(value):
                arrays[name] = RaggedTensor.from_nested(value)
            else:
                tensors[name] = value
        return cls.from_dict(tensors, arrays or None, facts, num_batch_dims)

    def to_tensordict(self) -> TensorDict:
        """The columns and facts as one ``TensorDict``, ragged columns as nested tensors; ColumnConflict where names clash."""
        columns = self._tensors()
        for name, array in self.non_tensor_batch.items():
            columns[name] = array.to_nested() if isinstance(array, RaggedTensor) else stack_objects(array)
        return get_tensordict(columns, self.meta_info)

    @classmethod
    def from_verl(cls, data: Any) -> Self:
        """A batch of verl's class as one of this class: the same tensors, arrays and objects, nothing is copied.

        Nested tensors whose rows vary in their first dimension become ragged columns over the same values.

        Raises:
            InvalidColumn: ``data`` does not have verl's three fields.
        """
        return cls(*conversion.fields_of(data))

    def to_verl(self, verl_class: Callable[..., Any] | None = None) -> Any:
        """The same tensors, arrays and objects as a batch of verl's class; nothing is copied.

        Ragged columns become arrays of objects, one numpy array a row over the same memory (a tensor where numpy lacks the dtype
        or the device): all of verl's verbs know these, while some fail on nested tensors.

        Args:
            verl_class: what to make instead of ``verl.protocol.DataProto``, which needs verl to be installed.

        Raises:
            MissingPackage: verl is not installed.
        """
        return (verl_class or conversion.verl_class())(
            batch=None if self.batch is None else self.batch.copy(),
            non_tensor_batch=conversion.arrays_of(self.non_tensor_batch),
            meta_info=dict(self.meta_info),
        )

    # Other rows

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
        return unfold_columns(self, n_split, name_list(split_keys))

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
        return self._partition(_part_sizes(rows, chunks, of_tensors=self.batch is not None))

    def split(self, split_size: int) -> list[Self]:
        """Parts of ``split_size`` rows as views, the last one shorter where the rows do not divide."""
        if split_size < 1:
            raise IndivisibleBatch(f"rows cannot be split into parts of {split_size}")
        whole, rest = divmod(len(self), split_size)
        return self._partition([split_size] * whole + [rest] * (rest > 0))

    @staticmethod
    def concat(data: Sequence["DataProto"]) -> "DataProto":
        """The rows of all parts. ``metrics`` in ``meta_info`` are collected, other facts must agree (see ``merging``).

        A part without any column adds no rows. A list that was put into ``non_tensor_batch`` is read as an array, as in verl.
        Rollouts, which are recognised by ``max_tokens`` in ``meta_info``, are padded to the widest of them (see ``widths``); of
        different ``max_tokens`` the largest stays.

        Raises:
            MissingColumn: a column is absent from some part.
            ColumnConflict: a column or fact differs in kind or value.
        """
        if not data:
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
        columns = {name: columnwise.join([part[name] for part in parts], name) for name in names}
        arrays = {name: columns.pop(name) for name in parts[0].non_tensor_batch}
        batches = [part.batch for part in parts if part.batch is not None]
        batch = None
        if batches:
            device = batches[0].device if len({each.device for each in batches}) == 1 else None
            batch = TensorDict(columns, batch_size=[sum(map(len, parts))], device=device)
        return type(data[0])(batch=batch, non_tensor_batch=arrays, meta_info=meta_info)

    def _with_arrays(self) -> Self:
        """This batch checked, or, where lists stand among its arrays, one in which they are arrays."""
        lists = {name: np.asarray(rows) for name, rows in self.non_tensor_batch.items() if isinstance(rows, list)}
        if lists:
            return type(self)(self.batch, {**self.non_tensor_batch, **lists}, self.meta_info)
        self.check_consistency()
        return self

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

    def make_iterator(
        self,
        mini_batch_size: int,
        epochs: int,
        seed: int | None = None,
        dataloader_kwargs: Mapping[str, Any] | None = None,
    ) -> Iterator[Self]:
        """Mini-batches of ``mini_batch_size`` rows, ``epochs`` times over.

        In the order of the rows they are views of this batch. ``dataloader_kwargs={"shuffle": True}`` (arguments of torch's
        ``DataLoader``) shuffles, in another order each epoch, which follows from ``seed``, or else from torch's global
        generator. As in verl, a seed alone does not shuffle.

        Raises:
            IndivisibleBatch: the rows do not divide.
        """
        rows = len(self)
        if mini_batch_size < 1 or rows % mini_batch_size:
            raise IndivisibleBatch(f"{rows} rows do not divide into mini-batches of {mini_batch_size}")
        if rows == 0:
            return iter(())
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        numbers: Any = range(rows)
        options = dataloader_kwargs or {}
        loader = DataLoader(numbers, mini_batch_size, collate_fn=list, generator=generator, **options)
        return (self._rows_of(chosen) for _ in range(epochs) for chosen in loader)

    def _rows_of(self, chosen: list[int]) -> Self:
        if chosen == list(range(chosen[0], chosen[0] + len(chosen))):
            return self.slice(chosen[0], chosen[0] + len(chosen))
        return self.select_idxs(chosen)

    # Elsewhere

    def to(
        self, device: torch.device | str | int | torch.dtype | None = None, dtype: torch.dtype | None = None
    ) -> Self:
        """Moves dense and ragged tensors to a device, in place; a dtype casts those of floating point, and only those."""
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

    def save_to_disk(self, filepath: str | os.PathLike[str], allow_pickle: bool = False) -> None:
        """Writes one file that loads without running code: tensors and arrays as they are, images as PNG, the rest as JSON.

        Raises:
            FileFormatError: an object is of a kind that only pickle can store, and ``allow_pickle`` is not given.
        """
        disk.save(filepath, self.batch, self.non_tensor_batch, self.meta_info, allow_pickle)

    @staticmethod
    def load_from_disk(
        filepath: str | os.PathLike[str], allow_pickle: bool = False, verify: bool = False
    ) -> "DataProto":
        """Reads what :meth:`save_to_disk` wrote; tensors and arrays stay in the file until they are touched.

        Args:
            allow_pickle: also read pickled objects, which may run code.
            verify: read everything now and compare it with its checksums.

        Raises:
            FileFormatError: damaged, of another format or version, or with pickled objects while ``allow_pickle`` is not given.
        """
        return disk.load(filepath, DataProto, allow_pickle, verify)


def _batch_shape(name: str, tensor: Any, dims: int) -> tuple[int, ...]:
    if len(getattr(tensor, "shape", ())) == 0:
        raise InvalidColumn(f"column {name!r} is a {type(tensor).__name__} without rows, not a tensor (B, ...)")
    return tuple(tensor.shape[:dims])


def _part_sizes(rows: int, parts: int, of_tensors: bool) -> list[int]:
    """Sizes of ``parts`` parts: those of ``torch.chunk`` where it makes that many parts, otherwise as even as can be."""
    size = -(-rows // parts)
    if of_tensors and size and -(-rows // size) == parts:
        return [size] * (parts - 1) + [rows - size * (parts - 1)]
    return [rows // parts + (part < rows % parts) for part in range(parts)]

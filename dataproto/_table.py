"""The three fields of a batch, their law, and the reading and writing of columns and rows."""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from itertools import accumulate
from typing import Any, Self, overload

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from dataproto._ops import column_ops as columnwise
from dataproto._ops import describe
from dataproto._ops.column_ops import Column
from dataproto._ops.indexing import Index, as_positions, as_row, as_slice
from dataproto._validation import validate
from dataproto.columns import missing_message
from dataproto.errors import ColumnConflict, InvalidColumn, MissingColumn, RowCountMismatch
from dataproto.ragged import RaggedTensor
from dataproto.serialization.tensor_bytes import EncodedTensorDict, deserialize_tensordict, serialize_tensordict
from dataproto.serialization.wire import copied, plain_batch, reduce_batch


@dataclass
class DataProtoItem:
    """One row: its tensors without the batch dimension, its objects, and a copy of the batch's facts."""

    batch: TensorDict | None = None
    non_tensor_batch: dict[str, Any] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return reduce_batch(self, protocol)


@dataclass(eq=False, repr=False)
class Table:
    """Columns of equally many rows and facts about the whole: what :class:`dataproto.DataProto` is built on."""

    batch: TensorDict | None = None
    non_tensor_batch: dict[str, np.ndarray | RaggedTensor] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.non_tensor_batch = {} if self.non_tensor_batch is None else self.non_tensor_batch
        self.meta_info = {} if self.meta_info is None else self.meta_info
        self.check_consistency()

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
        return [*self._tensors(), *self.non_tensor_batch]

    def _tensors(self) -> dict[str, Any]:
        return {} if self.batch is None else dict(self.batch.items())

    def __contains__(self, name: object) -> bool:
        return name in self.names()

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
                raise ColumnConflict(f"column {name!r} stands in batch and in non_tensor_batch")

    def validate(self) -> None:
        """Checks every well-known column against the table in ``columns.py``; others pass. Nothing calls it unasked.

        Dtypes; shapes, so that letters (B rows, P + R = L tokens) mean the same in all columns; masks of 0 and 1; prompts padded
        on the left and responses on the right; ``response_mask`` on attended tokens only; ``input_ids`` made of ``prompts`` and
        ``responses``; media that agree with ``mm_token_type_ids``.

        Raises:
            InvalidColumn: names column, row, what is expected and what was found.

        >>> from dataproto import DataProto
        >>> DataProto.from_dict({"attention_mask": torch.tensor([[0, 1], [2, 1]])}).validate()
        Traceback (most recent call last):
        dataproto.errors.InvalidColumn: column 'attention_mask', row 1: expected only 0, 1, found 2
        """
        validate(self)

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
        row = as_row(item, len(self))
        return DataProtoItem(
            batch=None if self.batch is None else self.batch[row],
            non_tensor_batch={name: array[row] for name, array in self.non_tensor_batch.items()},
            meta_info=dict(self.meta_info),
        )

    def __setitem__(self, name: str, column: torch.Tensor | RaggedTensor | np.ndarray | Sequence[Any]) -> None:
        """Adds or replaces a column: tensors go to ``batch``, ragged tensors, arrays and lists to ``non_tensor_batch``.

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
        if isinstance(value, np.ndarray | RaggedTensor):
            self.non_tensor_batch[name] = value
            if batch is not None and name in self._tensors():
                del batch[name]
        else:
            self.batch = TensorDict({}, batch_size=[found]) if batch is None else batch
            self.batch.set(name, value)
            self.non_tensor_batch.pop(name, None)

    def _column(self, name: str) -> Any:
        columns = {**self._tensors(), **self.non_tensor_batch}
        if name not in columns:
            raise MissingColumn(missing_message([name], list(columns)))
        return columns[name]

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
        if batch_keys is None:
            batch = None if self.batch is None else self.batch.copy()
        else:
            batch = self._select_tensors(name_list(batch_keys))
        arrays = _pick(self.non_tensor_batch, non_tensor_batch_keys)
        facts = _pick(self.meta_info, meta_info_keys)
        if deepcopy:
            batch = None if batch is None else batch.clone()
            arrays, facts = copy.deepcopy(arrays), copy.deepcopy(facts)
        return type(self)(batch=batch, non_tensor_batch=arrays, meta_info=facts)

    def _select_tensors(self, names: list[str]) -> TensorDict | None:
        try:
            if self.batch is not None:
                return self.batch.select(*names)
            self._check_present(names, ())
        except KeyError:
            self._check_present(names, self._tensors())
            raise
        return None

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
        self.check_consistency()
        batch = self._unlocked_batch()
        tensors, arrays, facts = map(name_list, (batch_keys, non_tensor_batch_keys, meta_info_keys))
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
        """Gives columns new names, in place and all at once (so that two may swap); on an error none is renamed.

        Raises:
            MissingColumn: an old name is absent.
            ColumnConflict: a new name is taken, or there are not as many new names as old ones.
        """
        for keys in (old_keys, new_keys):
            if not isinstance(keys, str | list | tuple):
                raise InvalidColumn(f"names are a string or a list of strings, not a {type(keys).__name__}")
        self.check_consistency()
        old, new = name_list(old_keys), name_list(new_keys)
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
        """Rows by numbers (negative ones count from the end) or by a mask; tensors are copied, objects and ragged rows shared."""
        positions = as_positions(idxs, len(self))
        return self._map(len(positions), lambda _, column: columnwise.take(column, positions))

    def slice(self, start: int | None = None, end: int | None = None, step: int | None = None) -> Self:
        """Rows ``start:end:step``; views of the same memory, except where ``step`` is negative."""
        bounds = as_slice(slice(start, end, step), len(self))
        rows = len(range(len(self))[bounds])
        return self._map(rows, lambda _, column: columnwise.cut(column, bounds))

    def _partition(self, sizes: list[int]) -> list[Self]:
        """Parts of these sizes, in order, as views, each with its own ``meta_info``."""
        self.check_consistency()
        ends = list(accumulate(sizes))
        nested = any(getattr(tensor, "is_nested", False) for tensor in self._tensors().values())
        if nested or not sizes or 0 in sizes:  # which tensordict does not split
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

    def _map(self, rows: int, change: Callable[[str, Column], Column]) -> Self:
        """A batch of ``rows`` rows whose columns are ``change(name, column)``, with its own ``meta_info``."""
        self.check_consistency()
        batch = None
        if self.batch is not None:
            tensors = {name: change(name, tensor) for name, tensor in self._tensors().items()}
            batch = TensorDict(tensors, batch_size=[rows], device=self.batch.device)
        arrays = {name: change(name, array) for name, array in self.non_tensor_batch.items()}
        return self._made(batch, arrays, dict(self.meta_info))

    def _made(self, batch: TensorDict | None, arrays: dict[str, Any], facts: dict[str, Any]) -> Self:
        """A batch of columns that a verb took from this one: they were checked, so that the fields may be set directly."""
        kind = type(self)
        if kind.__init__ is not Table.__init__ or kind.__post_init__ is not Table.__post_init__:
            return kind(batch=batch, non_tensor_batch=arrays, meta_info=facts)
        made = object.__new__(kind)
        made.batch, made.non_tensor_batch, made.meta_info = batch, arrays, facts
        return made

    def _adopt(self, other: "Table") -> None:
        """Takes over the columns of a batch made from this one: the last step of verbs that work in place."""
        self.batch, self.non_tensor_batch = other.batch, other.non_tensor_batch

    # Copies

    def __copy__(self) -> Self:
        return self.select()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        batch = None if self.batch is None else self.batch.clone()
        arrays, facts = copy.deepcopy((self.non_tensor_batch, self.meta_info), memo)
        return type(self)(batch=batch, non_tensor_batch=arrays, meta_info=facts)

    def writable(self) -> Self:
        """The same batch in memory of its own: what is written into it reaches nobody else.

        Tensors, arrays and images are copied, also inside of objects, each distinct one once, so that rows share what they
        shared; other objects are not copied. A batch that was received may be written without that (see ``wire``).
        """
        batch, arrays, facts = copied((plain_batch(self.batch), self.non_tensor_batch, self.meta_info))
        return type(self)(batch=batch, non_tensor_batch=arrays, meta_info=facts)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return reduce_batch(self, protocol)

    def __getstate__(self) -> tuple[EncodedTensorDict | None, dict[str, Any], dict[str, Any]]:
        """Encoded tensors (see ``serialize``), arrays, facts: for those who call it as verl's. Pickle does not: see ``wire``."""
        encoded = None if self.batch is None else serialize_tensordict(self.batch)
        return encoded, self.non_tensor_batch, self.meta_info

    def __setstate__(self, state: tuple[Any, dict[str, Any], dict[str, Any]]) -> None:
        """Takes the value of :meth:`__getstate__`, or that of verl's class, whose pickles are read where this class replaces it.

        In a state of verl's the tensors may be bytes of ``torch.save``, which is unpickled like everything around it.
        """
        encoded, self.non_tensor_batch, self.meta_info = state
        if isinstance(encoded, bytes):
            here = torch.accelerator.is_available()
            self.batch = torch.load(BytesIO(encoded), map_location=None if here else "cpu", weights_only=False)
        else:
            self.batch = None if encoded is None else deserialize_tensordict(encoded)
        self.__post_init__()


def _pick(values: Mapping[str, Any], names: Iterable[str] | None) -> dict[str, Any]:
    if names is None:
        return dict(values)
    wanted = set(name_list(names))
    return {name: value for name, value in values.items() if name in wanted}


def name_list(names: Iterable[str] | None) -> list[str]:
    return [] if names is None else [names] if isinstance(names, str) else list(names)

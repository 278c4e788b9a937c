"""What users of verl rely on beside the verbs, and "Differences from verl" of docs/dataproto.md, row by row.

`scripts/verl_dropin` shows what needs verl: its side of each difference, and its own code on this class.
"""

import copy
import io
import pickle
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from dataproto import (
    DataProto,
    RaggedTensor,
    collate_fn,
    fold_batch_dim,
    pad_dataproto_to_divisor,
    unfold_batch_dim,
    unpad_dataproto,
)
from dataproto.errors import ColumnConflict, IndivisibleBatch, InvalidIndex
from dataproto.protocol import BatchData, DataProtoFuture
from dataproto.tensordict_utils import get_tensordict, nested_tensor_from_tensor_list


def batch(rows: int = 4, **facts: object) -> DataProto:
    return DataProto.from_dict({"x": torch.arange(rows)}, {"uid": [f"p{row}" for row in range(rows)]}, facts)


def rows_of(data: DataProto) -> list[int]:
    numbers = data["x"].tolist()
    assert data["uid"].tolist() == [f"p{number}" for number in numbers]
    return numbers


class Handle:
    """As Ray's ``ObjectRef``: its ``future()`` is a future of Python's."""

    def __init__(self, value: Any = None, error: Exception | None = None) -> None:
        self.done: Future[Any] = Future()
        if error is not None:
            self.done.set_exception(error)
        elif value is not None:
            self.done.set_result(value)

    def future(self) -> "Future[Any]":
        return self.done


# Futures


def test_a_future_joins_what_its_handles_return() -> None:
    future = DataProtoFuture.concat([Handle(part) for part in batch(4, step=1).chunk(2)])
    assert rows_of(future.get()) == [0, 1, 2, 3]
    assert future.get().meta_info == {"step": 1}
    assert [rows_of(part.get()) for part in future.chunk(2)] == [[0, 1], [2, 3]]
    assert future.chunk(4)[0].futures is future.futures


def test_a_future_can_be_cut_before_it_is_done() -> None:
    handle = Handle()
    second = DataProtoFuture.concat([handle]).chunk(2)[1]
    handle.done.set_result(batch(2))
    assert rows_of(second.get()) == [1]


def test_a_future_of_tables() -> None:
    tables = [get_tensordict({"x": torch.arange(2) + 2 * part, "uid": ["a", "b"]}) for part in range(2)]
    made = DataProtoFuture.concat([Handle(table) for table in tables]).get()
    assert made["x"].tolist() == [0, 1, 2, 3]
    assert list(made["uid"]) == ["a", "b", "a", "b"]


def test_a_future_raises_what_its_worker_raised() -> None:
    with pytest.raises(OSError, match="disk"):
        DataProtoFuture.concat([Handle(batch()), Handle(error=OSError("disk"))]).get()
    with pytest.raises(AssertionError, match="returned a int"):
        DataProtoFuture.concat([Handle(3)]).get()


def test_parts_of_a_future_travel_to_workers() -> None:
    part = pickle.loads(pickle.dumps(DataProtoFuture(BatchData.concat, ["handle"]).chunk(2)[1]))
    assert part.futures == ["handle"]
    assert part.dispatch_fn(batch(4))["x"].tolist() == [2, 3]


# Arguments of any kind


def test_what_can_be_split_and_joined() -> None:
    table = get_tensordict({"x": torch.zeros(2)})
    assert [BatchData(value).is_chunkable() for value in (batch(), table, DataProtoFuture.concat([]), [1], None)] == [
        *(True, True, True, False, False)
    ]
    lists = ([batch()], (table,), [Handle()], [], [1], batch())
    assert [BatchData(value).is_concatable() for value in lists] == [True, True, True, False, False, False]
    with pytest.raises(InvalidIndex, match="nothing to concatenate"):
        BatchData([]).concat()


def test_batches_are_split_and_joined() -> None:
    parts = BatchData(batch(4)).chunk(2)
    assert [rows_of(part) for part in parts] == [[0, 1], [2, 3]]
    assert rows_of(BatchData(parts).concat()) == [0, 1, 2, 3]
    future = BatchData([Handle(part) for part in parts]).concat()
    assert [rows_of(part.get()) for part in BatchData(future).chunk(2)] == [[0, 1], [2, 3]]


def test_tables_are_split_and_joined() -> None:
    tokens = [torch.tensor(row) for row in ([1, 2], [3], [4, 5, 6], [7])]
    positions = [torch.arange(2 * len(row)).view(2, -1) for row in tokens]  # vary in their last dimension
    columns = {
        "x": torch.arange(4),
        "tokens": nested_tensor_from_tensor_list(tokens),
        "positions": nested_tensor_from_tensor_list(positions, ragged_idx=2),
        "uid": ["a", "b", "c", "d"],
    }
    table = get_tensordict(columns, {"step": 3})
    parts = BatchData(table).chunk(2)
    assert parts[1]["x"].tolist() == [2, 3]
    assert [row.tolist() for row in parts[1]["tokens"].unbind()] == [[4, 5, 6], [7]]
    assert list(parts[1]["uid"]) == ["c", "d"]
    parts[1]["x"].zero_()
    assert table["x"].tolist() == [0, 1, 2, 3]  # parts have memory of their own
    whole = BatchData(BatchData(table).chunk(4)).concat()
    assert whole["x"].tolist() == [0, 1, 2, 3]
    assert [row.tolist() for row in whole["tokens"].unbind()] == [row.tolist() for row in tokens]
    assert [row.tolist() for row in whole["positions"].unbind()] == [row.tolist() for row in positions]
    with pytest.raises(IndivisibleBatch, match="4 rows do not divide into 3"):
        BatchData(table).chunk(3)


def test_tables_without_tensors_or_rows() -> None:
    words = BatchData(get_tensordict({"uid": ["a", "b"]})).chunk(2)
    assert [list(part["uid"]) for part in words] == [["a"], ["b"]]
    facts = get_tensordict({}, {"step": 3})
    assert BatchData([facts, facts]).concat()["step"] == 3


def test_rows_of_one_length_keep_the_dimension_in_which_others_vary() -> None:
    rows = [torch.zeros(4, 2), torch.ones(4, 5), torch.ones(4, 5) * 2, torch.zeros(4, 3)]
    data = DataProto(TensorDict({"positions": nested_tensor_from_tensor_list(rows, ragged_idx=2)}, batch_size=[4]))
    alike = data[[1, 2]]["positions"]
    assert alike._ragged_idx == 2
    assert alike.values().shape == (4, 10)
    assert DataProto.concat([data[[1, 2]], data[[2, 1]]])["positions"]._ragged_idx == 2


# States


def test_states_are_those_of_verl() -> None:
    data = batch(3, step=1)
    encoded, arrays, facts = data.__getstate__()
    assert encoded[2]["x"][:2] == ("int64", (3,))
    assert arrays["uid"].tolist() == ["p0", "p1", "p2"]
    assert facts == {"step": 1}
    made = DataProto()
    made.__setstate__(data.__getstate__())
    assert rows_of(made) == [0, 1, 2]
    assert made.meta_info == {"step": 1}
    empty = DataProto()
    empty.__setstate__(batch(3).pop([], ["uid"]).__getstate__())
    assert empty["uid"].tolist() == ["p0", "p1", "p2"]


class Theirs:
    """A class with verl's fields. Its pickles are verl's, read where this project's class stands under verl's name."""

    def __init__(self, batch: Any, non_tensor_batch: Any, meta_info: Any) -> None:
        self.batch, self.non_tensor_batch, self.meta_info = batch, non_tensor_batch, meta_info

    def __reduce__(self) -> tuple[Any, ...]:
        buffer = io.BytesIO()
        torch.save(self.batch, buffer)
        return object.__new__, (DataProto,), (buffer.getvalue(), self.non_tensor_batch, self.meta_info)


def test_pickles_of_verl_are_read_where_this_class_replaces_its() -> None:
    data = batch(2, step=1)
    made = pickle.loads(pickle.dumps(Theirs(data.batch, data.non_tensor_batch, data.meta_info)))
    assert type(made) is DataProto
    assert rows_of(made) == [0, 1]
    assert made.meta_info == {"step": 1}


# The border


def test_the_fields_of_a_batch_are_those_of_verl() -> None:
    """Each class is made of the other's fields, which share their columns; a ragged column becomes one object for each row."""
    data = batch(2, step=1)
    data["tokens"] = RaggedTensor.from_list([[5, 6], [7]])
    data["tokens"] = list(data["tokens"])
    theirs = Theirs(data.batch, dict(data.non_tensor_batch), dict(data.meta_info))
    back = DataProto(theirs.batch, dict(theirs.non_tensor_batch), dict(theirs.meta_info))
    assert rows_of(back) == [0, 1]
    assert back["x"].data_ptr() == data["x"].data_ptr()
    assert [row.tolist() for row in theirs.non_tensor_batch["tokens"]] == [[5, 6], [7]]


def test_lists_among_arrays_are_joined_as_verl_joins_them() -> None:
    parts = batch(4).chunk(2)
    for part, times in zip(parts, ([0.5, 1.5], [2.5, 3.5])):
        part.non_tensor_batch["seconds"] = times  # type: ignore[assignment]
    made = DataProto.concat(parts)
    assert made["seconds"].dtype == np.float64
    assert made["seconds"].tolist() == [0.5, 1.5, 2.5, 3.5]
    assert parts[0].non_tensor_batch["seconds"] == [0.5, 1.5]
    parts[1].non_tensor_batch["seconds"] = [1.0]  # type: ignore[assignment]
    with pytest.raises(AssertionError, match="'seconds' has 1 rows"):
        DataProto.concat(parts)


# Differences from verl, row by row


def test_each_batch_has_its_own_facts() -> None:
    facts = {"step": 1}
    data = DataProto.from_dict({"x": torch.arange(4)}, meta_info=facts)
    for made in (data, data[0], data[1:], data[[1]], data.select(), data.repeat(2), data.chunk(2)[0]):
        made.meta_info["step"] = 2
        assert facts == {"step": 1}
        data.meta_info["step"] = 1


def test_a_selection_has_its_own_containers() -> None:
    data = batch()
    chosen = data.select()
    chosen["y"], chosen["z"] = torch.zeros(4), ["z"] * 4
    assert data.names() == ["x", "uid"]


def test_arguments_stay_as_they_are() -> None:
    arrays: dict[str, Any] = {"uid": ["a"]}
    facts: dict[str, Any] = {}
    DataProto.from_dict({"x": torch.zeros(1)}, arrays, facts, auto_padding=True)
    assert (arrays, facts) == ({"uid": ["a"]}, {})
    data = batch(4)
    unfold_batch_dim(fold_batch_dim(data, 2))
    assert rows_of(data) == [0, 1, 2, 3]
    wide = DataProto.from_dict({"x": torch.zeros(2, 3)})
    unfold_batch_dim(wide)
    assert wide.batch is not None
    assert wide.batch.batch_size == (2,)


def test_mini_batches_keep_dtypes_and_are_views_in_order() -> None:
    data = batch()
    data["n"] = np.arange(4)
    first = next(data.make_iterator(2, 1))
    assert first["x"].data_ptr() == data["x"].data_ptr()
    assert first["n"].dtype == np.int64
    assert collate_fn([data[0], data[1]])["n"].dtype == object  # as in verl
    shuffled = next(data.make_iterator(2, 1, seed=0, dataloader_kwargs={"shuffle": True}))
    shuffled["x"].fill_(9)
    assert rows_of(data) == [0, 1, 2, 3]


def test_rows_stay_objects_whatever_their_lengths() -> None:
    turn = {"role": "user", "content": "?"}
    lists = {"messages": [[turn], [turn]], "arrays": [np.zeros(3), np.ones(3)], "tensors": [torch.zeros(2)] * 2}
    data = DataProto.from_dict({"x": torch.arange(2)}, lists)
    collated = collate_fn([data[0], data[1]])
    for made in (data, collated):
        assert [made[name].shape for name in lists] == [(2,)] * 3
        assert made["messages"][1] == [turn]
    longer = DataProto.from_dict({"x": torch.arange(1)}, {"messages": [[turn, turn]]})
    joined = DataProto.concat([data.select(["x"], ["messages"]), longer])
    assert [len(messages) for messages in joined["messages"]] == [1, 1, 2]
    assert DataProto.from_dict(non_tensors={"pairs": [["a", "b"], ["c", "d"]]})["pairs"].shape == (2, 2)  # as in verl


def test_padding_keeps_the_facts() -> None:
    data = batch(4, metrics={"loss": 1.0})
    assert pad_dataproto_to_divisor(data, 3)[0].meta_info == {"metrics": {"loss": 1.0}}


def test_union_compares_deeply_and_keeps_what_it_has() -> None:
    left, right = batch(), batch()
    kept = left["uid"]
    assert left.union(right)["uid"] is kept
    nan = [DataProto.from_dict({"x": torch.tensor([float("nan")])}) for _ in range(2)]
    assert nan[0].union(nan[1])["x"].isnan().all()
    media = [DataProto.from_dict(non_tensors={"m": [{"pixels": torch.ones(2)}]}) for _ in range(2)]
    assert media[0].union(media[1])["m"][0]["pixels"].tolist() == [1, 1]


def test_concat_keeps_the_longest_time_and_every_metric() -> None:
    first, second = batch(1, timing={"gen": 1.0}, metrics={"a": 1}), batch(1, timing={"gen": 2.0}, metrics={"b": 2})
    facts = DataProto.concat([first, second]).meta_info
    assert facts == {"timing": {"gen": 2.0}, "metrics": {"a": [1], "b": [2]}}


def test_nested_tensors_of_a_table_become_ragged_columns() -> None:
    nested = nested_tensor_from_tensor_list([torch.zeros(2), torch.zeros(3)])
    data = DataProto.from_tensordict(TensorDict({"r": nested, "x": torch.zeros(2)}, batch_size=[2]))
    assert isinstance(data.non_tensor_batch["r"], RaggedTensor)
    assert data[[1, 0]]["r"].lengths.tolist() == [3, 2]


def test_deep_copies_are_deep() -> None:
    data = batch()
    for made in (data.select(deepcopy=True), copy.deepcopy(data)):
        made["x"].fill_(9)
    assert rows_of(data) == [0, 1, 2, 3]


def test_batches_are_equal_to_themselves_only() -> None:
    data = batch()
    assert data == data
    assert data != data.select()
    assert len({data, data}) == 1


def test_what_verl_takes_in_silence_is_refused() -> None:
    for call in (lambda: batch()[True], lambda: batch()[[0.9]], lambda: unpad_dataproto(batch(), 9)):  # type: ignore[call-overload]
        with pytest.raises(InvalidIndex):
            call()
    with pytest.raises(ColumnConflict):
        DataProto.from_dict({"x": torch.zeros(1)}, {"x": ["a"]})
    with pytest.raises(ColumnConflict):
        batch().union(DataProto.from_dict({"uid": torch.zeros(4)}))


def test_what_verl_cannot_do_is_done() -> None:
    words = DataProto.from_dict(non_tensors={"word": ["a", "b"]})
    assert list(words.to_tensordict()["word"]) == ["a", "b"]
    assert [each["word"].tolist() for each in words.make_iterator(1, 1)] == [["a"], ["b"]]
    assert words.union(DataProto.from_dict(non_tensors={"n": [1, 2]})).names() == ["word", "n"]
    assert batch().rename("uid", "id").names() == ["x", "id"]
    uneven = DataProto.from_dict({"x": torch.arange(5)}, auto_padding=True)
    assert [part["x"].tolist() for part in uneven.chunk(4)] == [[0, 1], [2], [3], [4]]


def test_a_future_uses_its_collect_function() -> None:
    assert DataProtoFuture(lambda parts: len(parts), [Handle(batch()), Handle(batch())]).get() == 2

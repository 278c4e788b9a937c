"""A ragged column goes through every verb of ``DataProto`` as a dense one does."""

import copy
import pickle
from collections.abc import Callable

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
from dataproto.errors import ColumnConflict, IndivisibleBatch, InvalidColumn, InvalidIndex, RowCountMismatch

ROWS = [[0], [], [10, 11, 12], [20, 21]]


def batch() -> DataProto:
    """Four rows; the number of each tells what its ragged row and its object are."""
    return DataProto.from_dict(
        {"n": torch.arange(4), "r": RaggedTensor.from_list(ROWS)}, {"uid": [f"p{row}" for row in range(4)]}, {"step": 1}
    )


def rows_of(data: DataProto) -> list[int]:
    """The numbers of the rows, checked to agree between all columns."""
    numbers = data["n"].tolist()
    assert isinstance(data["r"], RaggedTensor)
    assert [row.tolist() for row in data["r"]] == [ROWS[number] for number in numbers]
    assert data["r"].lengths.tolist() == [len(ROWS[number]) for number in numbers]
    assert data["uid"].tolist() == [f"p{number}" for number in numbers]
    data.check_consistency()
    return numbers


def reordered(data: DataProto) -> DataProto:
    data.reorder(torch.tensor([3, 1, 0, 2]))
    return data


def padded(data: DataProto) -> DataProto:
    data.padding(2, "first")
    return data


VERBS: dict[str, tuple[Callable[[DataProto], DataProto], list[int]]] = {
    "slice": (lambda data: data[1:3], [1, 2]),
    "empty slice": (lambda data: data[2:2], []),
    "slice backwards": (lambda data: data[::-1], [3, 2, 1, 0]),
    "last": (lambda data: data[-1:], [3]),
    "numbers": (lambda data: data[[3, 0, 0]], [3, 0, 0]),
    "negative numbers": (lambda data: data[np.array([-1, -4])], [3, 0]),
    "mask": (lambda data: data[data["n"] % 2 == 1], [1, 3]),
    "no row": (lambda data: data[[]], []),
    "select_idxs": (lambda data: data.select_idxs(torch.tensor([2])), [2]),
    "select": (lambda data: data.select(["n"], ["r", "uid"]), [0, 1, 2, 3]),
    "deepcopy": (lambda data: data.select(deepcopy=True), [0, 1, 2, 3]),
    "copy": (copy.deepcopy, [0, 1, 2, 3]),
    "pop": (lambda data: data.pop(["n"], ["uid", "r"]), [0, 1, 2, 3]),
    "rename": (lambda data: data.rename("r", "s").rename(["s"], ["r"]), [0, 1, 2, 3]),
    "union": (lambda data: data.union(batch()), [0, 1, 2, 3]),
    "or": (lambda data: data.select(["n"], ["uid"]) | data.select([], ["r"]), [0, 1, 2, 3]),
    "or part": (lambda data: data[:2] | batch()[:2], [0, 1]),
    "iterator": (lambda data: list(data.make_iterator(2, 1))[1], [2, 3]),
    "chunk": (lambda data: data.chunk(2)[1], [2, 3]),
    "split": (lambda data: data.split(3)[1], [3]),
    "concat": (lambda data: DataProto.concat([data[2:], data, batch()[:1]]), [2, 3, 0, 1, 2, 3, 0]),
    "reorder": (reordered, [3, 1, 0, 2]),
    "repeat": (lambda data: data[:2].repeat(2), [0, 0, 1, 1]),
    "repeat whole": (lambda data: data[1:3].repeat(2, interleave=False), [1, 2, 1, 2]),
    "repeat 0": (lambda data: data.repeat(0), []),
    "sample_level_repeat": (lambda data: data.sample_level_repeat([0, 2, 1, 0]), [1, 1, 2]),
    "unfold others": (lambda data: data.unfold_column_chunks(2), [0, 0, 1, 1, 2, 2, 3, 3]),
    "padding": (padded, [0, 1, 2, 3, 0, 0]),
    "pad": (lambda data: pad_dataproto_to_divisor(data, 3)[0], [0, 1, 2, 3, 0, 1]),
    "unpad": (lambda data: unpad_dataproto(*pad_dataproto_to_divisor(data, 3)), [0, 1, 2, 3]),
    "to": (lambda data: data.to("cpu"), [0, 1, 2, 3]),
    "pickle": (lambda data: pickle.loads(pickle.dumps(data)), [0, 1, 2, 3]),
    "pickle rows": (lambda data: pickle.loads(pickle.dumps(data[[2, 2]], protocol=5)), [2, 2]),
    "tensordict": (lambda data: DataProto.from_tensordict(data.to_tensordict()), [0, 1, 2, 3]),
    "from_single_dict": (lambda data: DataProto.from_single_dict({n: data[n] for n in data.names()}), [0, 1, 2, 3]),
}


@pytest.mark.parametrize("verb", VERBS)
def test_verbs(verb: str) -> None:
    change, expected = VERBS[verb]
    assert rows_of(change(batch())) == expected


def test_a_column_without_rows_in_a_tensordict() -> None:
    none = batch().select(["n"], ["r"])[:0]
    nested = none.to_tensordict()
    assert nested["r"].is_nested
    assert DataProto.from_tensordict(nested)["r"] == none["r"]


def test_rows_are_shared_not_copied() -> None:
    data = batch()
    storage = data["r"].storage
    for verb in ("slice", "numbers", "mask", "select", "repeat", "repeat whole", "sample_level_repeat", "chunk", "pad"):
        assert VERBS[verb][0](data)["r"].storage is storage
    assert DataProto.concat(data.chunk(4))["r"].storage is storage


def test_the_column_stands_among_the_objects() -> None:
    data = batch()
    assert list(data.non_tensor_batch) == ["uid", "r"]
    assert len(DataProto.from_dict({"r": data["r"]})) == len(DataProto(non_tensor_batch={"r": data["r"]})) == 4
    assert DataProto.from_dict(non_tensors={"r": data["r"]})["r"] is data["r"]
    with pytest.raises(ColumnConflict, match="'r'"):
        DataProto.from_dict({"r": data["r"]}, {"r": ["a"] * 4})
    with pytest.raises(RowCountMismatch, match="'r' has 4 rows, the batch has 3"):
        DataProto(TensorDict({"n": torch.arange(3)}, batch_size=[3]), {"r": data["r"]})


def test_one_row_and_items() -> None:
    data = batch()
    assert data[2].non_tensor_batch["r"].tolist() == data[-2].non_tensor_batch["r"].tolist() == ROWS[2]
    assert [item.non_tensor_batch["r"].tolist() for item in data] == ROWS
    collated = collate_fn([data[2], data[1]])["r"]
    assert [row.tolist() for row in collated] == [ROWS[2], ROWS[1]]


def test_assignment_moves_a_column_between_the_fields() -> None:
    data = batch()
    dense, ragged = torch.arange(4), data["r"]
    data["r"] = dense
    assert data["r"] is dense
    assert "r" not in data.non_tensor_batch
    data["r"] = ragged
    assert data["r"] is ragged
    assert "r" not in data.batch
    with pytest.raises(RowCountMismatch):
        data["r"] = ragged[:3]
    assert data["r"] is ragged


def test_union_wants_the_same_rows() -> None:
    data = batch()
    assert data.union(batch())["r"] is data["r"]
    for other, said in (
        (RaggedTensor.from_list([[0], [], [10, 11, 13], [20, 21]]), "row 2 differs"),
        (RaggedTensor.from_list([[0], [], [10, 11], [20, 21]]), "row 2 differs"),
        (data["r"].to("meta"), "devices"),
        (RaggedTensor.from_list(ROWS, dtype=torch.int32), "dtypes"),
        (RaggedTensor.from_list([[[row]] for row in range(4)]), "rows"),
        (np.arange(4), "RaggedTensor"),
    ):
        with pytest.raises(ColumnConflict, match=said):
            batch().union(DataProto(non_tensor_batch={"r": other}))
    with pytest.raises(ColumnConflict, match="tensors on one side"):
        batch().union(DataProto.from_dict({"r": torch.arange(4)}))


def test_concat_wants_the_same_kind() -> None:
    data = batch()
    for other in (torch.arange(4), ["a"] * 4, data["r"].to("meta"), RaggedTensor(torch.zeros(4), [1] * 4)):
        wrong = batch()
        wrong["r"] = other
        with pytest.raises(ColumnConflict, match="'r'"):
            DataProto.concat([data, wrong])


def test_splitting_rows() -> None:
    data = DataProto.from_dict({"r": RaggedTensor.from_list([[1, 2, 3, 4], [], [5, 6]]), "n": torch.arange(3)})
    halves = data.unfold_column_chunks(2, ["r"])
    assert [row.tolist() for row in halves["r"]] == [[1, 2], [3, 4], [], [], [5], [6]]
    assert halves["n"].tolist() == [0, 0, 1, 1, 2, 2]
    assert halves["r"].storage is data["r"].storage
    with pytest.raises(IndivisibleBatch, match="row 2 of 2"):
        data.unfold_column_chunks(4, ["r"])


def test_ragged_rows_have_one_batch_dimension() -> None:
    for fold in (lambda data: fold_batch_dim(data, 2), unfold_batch_dim):
        with pytest.raises(InvalidColumn, match="ragged"):
            fold(batch())


def test_to_moves_and_casts_ragged_and_dense_alike() -> None:
    data = DataProto.from_dict({"x": torch.ones(2), "n": torch.arange(2), "r": RaggedTensor(torch.ones(3), [1, 2])})
    data["k"] = RaggedTensor(torch.arange(3), [1, 2])
    assert data.to("cpu") is data
    assert {name: data[name].dtype for name in data.names()}["r"] == torch.float32
    data.to("cpu", dtype=torch.bfloat16)
    assert [data[name].dtype for name in "xnrk"] == [torch.bfloat16, torch.int64, torch.bfloat16, torch.int64]
    data.to(torch.float32)
    assert [data[name].dtype for name in "xnrk"] == [torch.float32, torch.int64, torch.float32, torch.int64]
    data.to("meta")
    assert {data[name].device.type for name in "xnrk"} == {"meta"}


def test_it_is_shown_and_counted(capsys: pytest.CaptureFixture[str]) -> None:
    data = batch()
    assert "r: RaggedTensor(4 rows of (n,) torch.int64 on cpu, lengths [1, 0, 3, 2])" in data.get_data_info()
    DataProto(non_tensor_batch={"r": data["r"]}).print_size()
    assert f"{48 / 1024**3} GB" in capsys.readouterr().out


def test_none_next_to_a_tensor_is_an_object_like_any_other() -> None:
    rows = [torch.ones(2), None, torch.zeros(1)]
    data = DataProto.from_dict(non_tensors={"o": rows})
    for made in (data[::-1][::-1], DataProto.concat(data.split(1)), data.repeat(2)[::2], data | data):
        assert made["o"][1] is None
        assert made["o"][0] is rows[0]
    with pytest.raises(ColumnConflict, match="row 0 differs"):
        data.union(DataProto.from_dict(non_tensors={"o": [None, None, None]}))
    with pytest.raises(InvalidColumn, match="row 1 is None"):
        data["o"] = RaggedTensor.from_list(rows)
    with pytest.raises(InvalidIndex):
        data[None]


@pytest.mark.parametrize("verb", ["repeat", "repeat whole"])
def test_repeating_columns_of_more_dimensions(verb: str) -> None:
    data = DataProto.from_dict(
        {"t": torch.arange(4).view(2, 2), "r": RaggedTensor(torch.arange(6).view(3, 2), [1, 2])},
        {"a": np.arange(4).reshape(2, 2), "o": [[0, 1], [2, 3]]},
    )
    order = [0, 0, 1, 1] if verb == "repeat" else [0, 1, 0, 1]
    made = data.repeat(2, interleave=verb == "repeat")
    assert made["t"].tolist() == made["a"].tolist() == made["o"].tolist() == [[[0, 1], [2, 3]][row] for row in order]
    assert [row.tolist() for row in made["r"]] == [[[[0, 1]], [[2, 3], [4, 5]]][row] for row in order]

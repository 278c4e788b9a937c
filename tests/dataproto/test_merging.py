"""Union and concat: columns side by side and one below the other, and what becomes of ``meta_info``."""

import math

import numpy as np
import pytest
import torch
from PIL import Image
from tensordict import TensorDict

from dataproto import DataProto, union_numpy_dict, union_tensor_dict
from dataproto.column_ops import first_difference
from dataproto.errors import ColumnConflict, InvalidColumn, MissingColumn, RowCountMismatch
from dataproto.tensordict_utils import same_value

NAN = float("nan")


def inputs(rows: int = 2) -> list[dict[str, torch.Tensor]]:
    return [
        {"pixel_values": torch.arange(6.0).view(2, 3) + row, "grid": torch.tensor([[1, 2, 1]])} for row in range(rows)
    ]


def left() -> DataProto:
    return DataProto.from_dict(
        {"ids": torch.tensor([1, 2]), "score": torch.tensor([0.5, NAN])},
        {"uid": ["a", "b"], "multi_modal_inputs": inputs()},
        {"step": 1, "loss": NAN},
    )


# Union


def test_union_adds_in_place() -> None:
    data = left()
    tensors, arrays, facts = data.batch, data.non_tensor_batch, data.meta_info
    other = DataProto.from_dict({"adv": torch.tensor([3, 4])}, {"name": ["x", "y"]}, {"more": 2})
    assert data.union(other) is data
    assert data.batch is tensors
    assert data.non_tensor_batch is arrays
    assert data.meta_info is facts
    assert data["adv"] is other["adv"]
    assert data["name"].tolist() == ["x", "y"]
    assert set(data.meta_info) == {"step", "loss", "more"}


def test_union_of_equal_copies_is_no_conflict() -> None:
    data = left().union(left())
    assert data.names() == left().names()
    assert len(data) == 2


def test_union_fills_an_empty_side_or_field() -> None:
    assert DataProto().union(left())["ids"].tolist() == [1, 2]
    assert left().union(DataProto(meta_info={"x": 1})).meta_info["x"] == 1
    texts, tensors = DataProto.from_dict(non_tensors={"t": ["x", "y"]}), DataProto.from_dict({"a": torch.zeros(2)})
    assert texts.select().union(tensors).names() == tensors.select().union(texts).names() == ["a", "t"]
    joined = texts.union(tensors)
    joined["new"] = torch.zeros(2)
    assert tensors.names() == ["a"]


def test_or_leaves_both_sides_alone() -> None:
    data, other = left(), DataProto.from_dict({"adv": torch.tensor([3, 4])}, meta_info={"more": 2})
    made = data | other
    assert made.names() == ["ids", "score", "adv", "uid", "multi_modal_inputs"]
    assert data.names() == left().names()
    assert set(data.meta_info) == {"step", "loss"}
    assert other.names() == ["adv"]
    same = data
    data |= other
    assert data is same
    assert "adv" in data
    with pytest.raises(TypeError):
        data | {"x": 1}  # type: ignore[operator]


CONFLICTS = {
    "tensor": (
        DataProto.from_dict({"new": torch.zeros(2), "ids": torch.tensor([1, 3])}),
        ColumnConflict,
        "`ids`.*row 1 differs",
    ),
    "dtype": (
        DataProto.from_dict({"ids": torch.tensor([1.0, 2.0])}),
        ColumnConflict,
        "`ids`.*torch.int64 and torch.float32",
    ),
    "shape": (DataProto.from_dict({"ids": torch.ones(2, 1).long()}), ColumnConflict, r"`ids`.*\(2,\) and \(2, 1\)"),
    "array": (
        DataProto.from_dict({"new": torch.zeros(2)}, {"uid": ["a", "c"]}),
        ColumnConflict,
        "`uid`.*row 1 differs",
    ),
    "media": (
        DataProto.from_dict({"new": torch.zeros(2)}, {"multi_modal_inputs": inputs()[::-1]}),
        *(ColumnConflict, "`multi_modal_inputs`.*row 0 differs"),
    ),
    "fact": (DataProto.from_dict({"new": torch.zeros(2)}, meta_info={"step": 2}), ColumnConflict, "'step': 1 and 2"),
    "rows": (DataProto.from_dict({"new": torch.zeros(3)}), RowCountMismatch, "2 rows with 3 rows"),
    "field": (DataProto.from_dict({"uid": torch.zeros(2)}), ColumnConflict, "'uid'.*tensors on one side"),
    "other field": (DataProto.from_dict(non_tensors={"ids": [1, 2]}), ColumnConflict, "'ids'.*tensors on one side"),
}


@pytest.mark.parametrize("name", CONFLICTS)
def test_a_union_that_fails_changes_nothing(name: str) -> None:
    other, error, message = CONFLICTS[name]
    data = left()
    for kind in (error, AssertionError):
        with pytest.raises(kind, match=message):
            data.union(other)
    assert data.names() == left().names()
    assert same_value(dict(data.batch.items()), dict(left().batch.items()))
    assert same_value(data.non_tensor_batch, left().non_tensor_batch)
    assert same_value(data.meta_info, left().meta_info)


def test_union_takes_batches_only() -> None:
    with pytest.raises(InvalidColumn, match="takes a DataProto, not a dict"):
        left().union({"ids": 1})  # type: ignore[arg-type]


def test_union_tensor_dict() -> None:
    one = TensorDict({"a": torch.arange(4).view(2, 2)}, batch_size=[2])
    two = TensorDict({"a": torch.arange(4).view(2, 2), "b": torch.ones(2)}, batch_size=[2])
    assert union_tensor_dict(one, two) is one
    assert set(one.keys()) == {"a", "b"}
    with pytest.raises(AssertionError, match=r"`a`.*row 1 differs"):
        union_tensor_dict(one, TensorDict({"c": torch.ones(2), "a": torch.tensor([[0, 1], [2, 9]])}, batch_size=[2]))
    with pytest.raises(AssertionError, match=r"\(2,\) and \(3,\)"):
        union_tensor_dict(one, TensorDict({"c": torch.ones(3)}, batch_size=[3]))
    assert set(one.keys()) == {"a", "b"}


def test_union_numpy_dict() -> None:
    one = {"a": np.array([1.0, NAN])}
    assert union_numpy_dict(one, {"a": np.array([1.0, NAN]), "b": np.array([1, 2])}) is one
    assert set(one) == {"a", "b"}
    with pytest.raises(
        AssertionError,
        match=r"`b` in tensor_dict1 and tensor_dict2 are not the same object: .*; pop it from one of them first",
    ):
        union_numpy_dict(one, {"c": np.zeros(1), "b": np.array([1, 3])})
    with pytest.raises(AssertionError, match="dtypes int64 and float64"):
        union_numpy_dict(one, {"b": np.array([1.0, 2.0])})
    with pytest.raises(InvalidColumn, match="`a` is a list"):
        union_numpy_dict(one, {"a": [1.0, NAN]})  # type: ignore[dict-item]
    assert set(one) == {"a", "b"}


# Equality


def circle() -> np.ndarray:
    array = np.array([None], dtype=object)
    array[0] = array
    return array


TURNING = torch.tensor([1 + 2j, 3 - 4j])
SAME = [
    (NAN, NAN),
    ({"a": [1, NAN]}, {"a": [1, NAN]}),
    ([torch.tensor([1.0, NAN])], [torch.tensor([1.0, NAN])]),
    (np.array([np.array([2, 3]), "x", NAN], dtype=object), np.array([np.array([2, 3]), "x", NAN], dtype=object)),
    (Image.new("RGB", (2, 2), "red"), Image.new("RGB", (2, 2), "red")),
    ((1, {"x": torch.ones(2)}), (1, {"x": torch.ones(2)})),
    (circle(), circle()),
    (torch.ones(3).to(torch.float8_e4m3fn), torch.ones(3).to(torch.float8_e4m3fn)),
    (np.array(["2020-01-01", "NaT"], dtype="M8[D]"), np.array(["2020-01-01", "NaT"], dtype="M8[D]")),
    (np.array(["a", "b"]), np.array(["a", "b"])),
    (torch.empty(0, 3), torch.empty(0, 3)),
    (torch.eye(2).to_sparse(), torch.eye(2).to_sparse()),
    (TURNING, TURNING.clone()),
    (TURNING.conj(), TURNING.conj().resolve_conj()),
]
DIFFERENT = [
    (NAN, 1.0),
    ({"a": 1}, {"a": 1, "b": 2}),
    ([1, 2], [1]),
    ([1, 2], (1, 2)),
    ([torch.tensor([1.0])], [torch.tensor([2.0])]),
    ([torch.tensor([1.0])], [torch.tensor([1])]),
    ([torch.tensor([1.0])], [np.array([1.0])]),
    (np.array([1, NAN], dtype=object), np.array([1, "nan"], dtype=object)),
    (np.array([1], dtype=object), np.array([1.0], dtype=object)),
    (np.array([1, 2]), np.array([1.0, 2.0])),
    (Image.new("RGB", (2, 2), "red"), Image.new("RGB", (2, 2), "blue")),
    (circle(), np.array([None], dtype=object)),
    (torch.ones(3).to(torch.float8_e4m3fn), torch.zeros(3).to(torch.float8_e4m3fn)),
    (torch.zeros(2), torch.zeros(3)),
    (torch.eye(2).to_sparse(), torch.ones(2, 2).to_sparse()),
    (torch.eye(2).to_sparse(), torch.eye(2)),
    (TURNING, TURNING.conj()),  # the same memory, read in another way
    (TURNING.imag, TURNING.conj().imag),
]


@pytest.mark.parametrize("pair", SAME)
def test_same(pair: tuple) -> None:
    assert same_value(*pair)


@pytest.mark.parametrize("pair", DIFFERENT)
def test_different(pair: tuple) -> None:
    assert not same_value(*pair)
    assert not same_value(*reversed(pair))


def test_one_memory_is_equal_without_looking() -> None:
    huge = torch.empty(1).expand(1 << 40)  # comparing these elements would take hours
    assert same_value(huge, huge[:])
    strided = np.lib.stride_tricks.as_strided(np.zeros(1), (1 << 40,), (0,))
    assert same_value(strided, strided[:])


def test_overlapping_views_are_compared_by_value() -> None:
    values = torch.arange(4)
    assert not same_value(values[:3], values[1:])
    assert not same_value(values.view(2, 2), values.view(2, 2).T)


def test_differences_are_found() -> None:
    assert first_difference(torch.zeros(2), np.zeros(2)) == "one is a Tensor, the other a ndarray"
    assert first_difference(np.array([1, 2, 3]), np.array([1, 9, 3])) == "row 1 differs"


# Concat


def part(*values: int, **meta: object) -> DataProto:
    return DataProto.from_dict({"x": torch.tensor(values)}, {"uid": [f"p{value}" for value in values]}, meta)


def test_concat_keeps_the_order() -> None:
    made = DataProto.concat([part(1, 2), part(3), part(4, 5)])
    assert made["x"].tolist() == [1, 2, 3, 4, 5]
    assert made["uid"].tolist() == ["p1", "p2", "p3", "p4", "p5"]
    assert DataProto.concat([part(1)[:0], part(7)])["x"].tolist() == [7]


def test_concat_takes_parts_one_by_one() -> None:
    assert DataProto.concat(each for each in (part(1), part(2)))["x"].tolist() == [1, 2]


def test_concat_copies_tensors() -> None:
    one = part(1)
    DataProto.concat([one])["x"].zero_()
    assert one["x"].tolist() == [1]


@pytest.mark.parametrize("turn", [1, -1])
def test_concat_drops_no_column(turn: int) -> None:
    parts = [DataProto.from_dict(non_tensors={"uid": ["p1"]}), part(2)][::turn]
    with pytest.raises(MissingColumn, match=r"columns \['x'\] are absent from some parts"):
        DataProto.concat(parts)
    with pytest.raises(MissingColumn, match="uid"):
        DataProto.concat([part(1), part(2).select(non_tensor_batch_keys=[])][::turn])


def test_a_part_without_columns_only_brings_facts() -> None:
    made = DataProto.concat([DataProto(meta_info={"metrics": {"a": 1}}), part(1, 2, metrics={"a": 2})])
    assert made["x"].tolist() == [1, 2]
    assert made.meta_info == {"metrics": {"a": [1, 2]}}
    assert DataProto.concat([DataProto(meta_info={"k": 1}), DataProto(meta_info={"k": 1})]).meta_info == {"k": 1}


def test_concat_refuses_what_does_not_fit() -> None:
    with pytest.raises(ColumnConflict, match=r"'x' cannot be joined: shapes \(1,\) and \(1, 1\)"):
        DataProto.concat([DataProto.from_dict({"x": torch.ones(1)}), DataProto.from_dict({"x": torch.ones(1, 1)})])
    with pytest.raises(ColumnConflict, match="'x' is a tensor in one part and an array in another"):
        DataProto.concat([DataProto.from_dict({"x": torch.ones(1)}), DataProto.from_dict(non_tensors={"x": [1]})])
    with pytest.raises(ColumnConflict, match=r"'x' is on different devices: \['cpu', 'meta'\]"):
        DataProto.concat([part(1), part(2).to("meta")])
    with pytest.raises(IndexError, match="empty"):
        DataProto.concat([])
    with pytest.raises(InvalidColumn, match="dict"):
        DataProto.concat([part(1), {}])  # type: ignore[list-item]


def test_lists_that_are_regular_in_one_part_only_can_be_joined() -> None:
    regular, ragged = ([[1, 2], [3, 4]], [[5], [6, 7, 8]])
    parts = [DataProto.from_dict(non_tensors={"ids": ids}) for ids in (regular, ragged, [[9]])]
    assert DataProto.concat(parts)["ids"].tolist() == [*regular, *ragged, [9]]
    assert DataProto.concat(parts[::-1])["ids"].tolist() == [[9], *ragged, *regular]
    assert all(isinstance(row, list) for row in DataProto.concat(parts)["ids"])


def test_concat_promotes_dtypes_as_torch_and_numpy_do() -> None:
    made = DataProto.concat(
        [DataProto.from_single_dict({"a": torch.ones(1), "b": np.array([1])})] * 1
        + [DataProto.from_single_dict({"a": torch.ones(1, dtype=torch.int64), "b": np.array([0.5])})]
    )
    assert made["a"].dtype == torch.float32
    assert made["b"].tolist() == [1.0, 0.5]


# Facts


def test_metrics_are_collected() -> None:
    one = part(1, metrics={"loss": 1.0, "kl": 0.1}, name="run")
    two = part(2, metrics=[{"loss": 2.0, "kl": 0.2}, {"loss": 3.0, "kl": 0.3}], only=5)
    made = DataProto.concat([one, two, part(3, metrics=None)])
    assert made.meta_info == {"metrics": {"loss": [1.0, 2.0, 3.0], "kl": [0.1, 0.2, 0.3]}, "name": "run", "only": 5}
    assert one.meta_info["metrics"] == {"loss": 1.0, "kl": 0.1}


def test_a_metric_that_one_part_lacks_is_collected_from_the_others() -> None:
    made = DataProto.concat([part(1, metrics={"a": 1}), part(2, metrics={"a": 2, "b": 5})])
    assert made.meta_info["metrics"] == {"a": [1, 2], "b": [5]}


def test_facts_must_agree() -> None:
    with pytest.raises(AssertionError, match=r"Conflicting values for meta_info key 'temperature': 1.0 and 0.7"):
        DataProto.concat([part(1, temperature=1.0), part(2, temperature=0.7)])


def test_nan_and_tensors_among_facts_agree_with_themselves() -> None:
    made = DataProto.concat(
        [part(row, loss=float("nan"), stats={"x": torch.ones(2)}, n=np.array([1, 2])) for row in (1, 2)]
    )
    assert math.isnan(made.meta_info["loss"])
    assert made.meta_info["n"].tolist() == [1, 2]


def test_timings_keep_the_slowest() -> None:
    made = DataProto.concat(
        [
            part(1, timing={"gen": 1.0, "reshard": 5.0, "name": "w"}, **{"timing_s/step": 2}),
            part(2, timing={"gen": 3.0, "name": "w"}, **{"timing_s/step": 1}),
            part(3, timing={"gen": NAN, "other": 1}),
        ]
    )
    assert made.meta_info == {"timing": {"gen": 3.0, "reshard": 5.0, "name": "w", "other": 1}, "timing_s/step": 2}
    with pytest.raises(ColumnConflict, match="timing"):
        DataProto.concat([part(1, timing="fast"), part(2, timing="slow")])

"""Verbs over whole batches. Expected values are worked by hand, and what verl 0.9.1 gives wherever verl accepts the input."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch.utils.data import DataLoader

from dataproto import DataProto, DataProtoConfig, collate_fn, fold_batch_dim, unfold_batch_dim
from dataproto.errors import (
    ColumnConflict,
    DataProtoError,
    IndivisibleBatch,
    InvalidColumn,
    InvalidIndex,
    MissingColumn,
)


def batch(rows: int = 4, **meta: object) -> DataProto:
    return DataProto.from_dict({"x": torch.arange(rows)}, {"uid": [f"p{row}" for row in range(rows)]}, meta)


def rows_of(data: DataProto) -> list[int]:
    """The rows, checked to agree between the fields."""
    numbers = data["x"].tolist()
    assert data["uid"].tolist() == [f"p{number}" for number in numbers]
    return numbers


# Repeating and ordering


def test_repeat() -> None:
    data = batch(3, step=1)
    assert rows_of(data.repeat(2)) == [0, 0, 1, 1, 2, 2]
    assert rows_of(data.repeat(2, interleave=False)) == [0, 1, 2, 0, 1, 2]
    assert rows_of(data.repeat(1)) == [0, 1, 2]
    assert len(data.repeat(0)) == 0
    assert data.repeat(2).meta_info == {"step": 1}
    wide = DataProto.from_dict({"a": torch.arange(4).view(2, 2)}, {"b": np.arange(4).reshape(2, 2)})
    assert wide.repeat(2)["a"].tolist() == wide.repeat(2)["b"].tolist() == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert wide.repeat(2, False)["b"].tolist() == [[0, 1], [2, 3], [0, 1], [2, 3]]


def test_repeated_tensors_have_their_own_memory() -> None:
    data = batch(2)
    for times in (1, 2):
        data.repeat(times)["x"].fill_(9)
    assert rows_of(data) == [0, 1]


@pytest.mark.parametrize("times", [-1, 1.5, "2", True])
def test_repeat_takes_whole_numbers(times: object) -> None:
    with pytest.raises(InvalidIndex, match="repeated"):
        batch().repeat(times)  # type: ignore[arg-type]


@pytest.mark.parametrize("times", [[3, 0, 1], (3, 0, 1), np.array([3, 0, 1]), torch.tensor([3, 0, 1])])
def test_sample_level_repeat(times: object) -> None:
    assert rows_of(batch(3).sample_level_repeat(times)) == [0, 0, 0, 2]  # type: ignore[arg-type]
    assert len(DataProto().sample_level_repeat([])) == 0


@pytest.mark.parametrize("times", [[1, 2], [1, 1, -1], [1.0, 1.0, 1.0], 2, torch.ones(3, 1), [True, True, False]])
def test_sample_level_repeat_refuses(times: object) -> None:
    with pytest.raises(AssertionError, match="repeated by 3 whole numbers"):
        batch(3).sample_level_repeat(times)  # type: ignore[arg-type]


@pytest.mark.parametrize("order", [torch.tensor([2, 0, 1]), np.array([2, 0, 1]), [2, 0, 1]])
def test_reorder_is_in_place(order: object) -> None:
    data = batch(3, step=1)
    assert data.reorder(order) is None  # type: ignore[arg-type, func-returns-value]
    assert rows_of(data) == [2, 0, 1]
    assert data.meta_info == {"step": 1}


@pytest.mark.parametrize(
    ("order", "message"),
    [([0, 1, 3], "row 3 is out of range for 3 rows"), ([0, 1], "each of the 3 rows once"), ([0, 1, 1], "3 rows once")],
)
def test_a_reorder_that_fails_changes_nothing(order: list[int], message: str) -> None:
    data = batch(3)
    with pytest.raises(InvalidIndex, match=message):
        data.reorder(order)
    assert rows_of(data) == [0, 1, 2]


def test_unfold_column_chunks() -> None:
    data = DataProto.from_dict(
        {"pairs": torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]]), "one": torch.tensor([10, 20])},
        {"uid": ["a", "b"], "labels": [["a1", "a2"], ["b1", "b2"]]},
        {"step": 1},
    )
    made = data.unfold_column_chunks(2, split_keys=["pairs", "labels"])
    assert made["pairs"].tolist() == [[1, 2], [3, 4], [5, 6], [7, 8]]
    assert made["one"].tolist() == [10, 10, 20, 20]
    assert made["uid"].tolist() == ["a", "a", "b", "b"]
    assert made["labels"].tolist() == [["a1"], ["a2"], ["b1"], ["b2"]]
    assert made.meta_info == {"step": 1}
    assert data.unfold_column_chunks(2)["pairs"].tolist() == data.repeat(2)["pairs"].tolist()
    with pytest.raises(IndivisibleBatch, match=r"'pairs' of shape \(2, 4\) does not split into 3"):
        data.unfold_column_chunks(3, ["pairs"])


def test_fold_and_unfold() -> None:
    data = batch(6, step=1)
    folded = fold_batch_dim(data, 3)
    assert len(folded) == 3
    assert folded["x"].tolist() == [[0, 1], [2, 3], [4, 5]]
    assert folded["uid"].tolist() == [["p0", "p1"], ["p2", "p3"], ["p4", "p5"]]
    folded.reorder([1, 2, 0])
    assert rows_of(unfold_batch_dim(folded)) == [2, 3, 4, 5, 0, 1]
    assert rows_of(data) == [0, 1, 2, 3, 4, 5]
    assert folded.meta_info == {"step": 1}
    with pytest.raises(IndivisibleBatch):
        fold_batch_dim(data, 4)
    with pytest.raises(InvalidColumn, match="first 2 dimensions"):
        unfold_batch_dim(data)


# Parts


def test_chunk_makes_equal_parts_in_order() -> None:
    parts = batch(6).chunk(3)
    assert [rows_of(part) for part in parts] == [[0, 1], [2, 3], [4, 5]]
    assert [len(part) for part in DataProto().chunk(2)] == [0, 0]


@pytest.mark.parametrize(("rows", "parts"), [(5, 4), (4, 0), (4, -1), (4, 2.0)])
def test_chunk_says_how_to_make_rows_divide(rows: int, parts: int) -> None:
    for error in (IndivisibleBatch, AssertionError):
        with pytest.raises(
            error, match=f"{rows} rows do not divide into {parts} equal parts; pad.*pad_dataproto_to_divisor"
        ):
            batch(rows).chunk(parts)


@pytest.mark.parametrize(
    ("rows", "parts", "sizes"),
    [(10, 4, [3, 3, 3, 1]), (7, 4, [2, 2, 2, 1]), (5, 4, [2, 1, 1, 1]), (6, 4, [2, 2, 1, 1]), (2, 4, [1, 1, 0, 0])],
)
def test_chunk_with_padding_enabled_makes_that_many_parts(rows: int, parts: int, sizes: list[int]) -> None:
    data = DataProto.from_dict(
        {"x": torch.arange(rows)}, {"uid": [f"p{row}" for row in range(rows)]}, auto_padding=True
    )
    made = data.chunk(parts)
    assert [len(part) for part in made] == sizes
    assert [row for part in made for row in rows_of(part)] == list(range(rows))


def test_padding_can_be_enabled_for_the_process_or_by_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not batch().is_padding_enabled()
    monkeypatch.setenv("VERL_AUTO_PADDING", "true")
    assert batch().is_padding_enabled()
    monkeypatch.delenv("VERL_AUTO_PADDING")
    try:
        DataProtoConfig.auto_padding = True
        assert [len(part) for part in batch(5).chunk(4)] == [2, 1, 1, 1]
    finally:
        DataProtoConfig.auto_padding = False
    with pytest.raises(AssertionError):
        DataProtoConfig.auto_padding = "yes"  # type: ignore[assignment]


def test_split() -> None:
    assert [rows_of(part) for part in batch(5).split(2)] == [[0, 1], [2, 3], [4]]
    assert [rows_of(part) for part in batch(2).split(9)] == [[0, 1]]
    assert DataProto().split(2) == []
    for size in (0, 1.5, 2.0, "2"):
        with pytest.raises(IndivisibleBatch, match=f"parts of {size}"):
            batch().split(size)  # type: ignore[arg-type]
    assert [len(part) for part in batch(5).split(np.int64(2))] == [2, 2, 1]  # type: ignore[arg-type]
    assert [len(part) for part in batch(4).chunk(np.int64(2))] == [2, 2]  # type: ignore[arg-type]


def test_every_part_has_its_own_meta_info() -> None:
    data = batch(4, step=1)
    parts = [*data.chunk(2), *data.split(2), data[:1], data[[0]], data.select(), data.repeat(2), data[0]]
    for number, part in enumerate(parts):
        part.meta_info["part"] = number
    assert data.meta_info == {"step": 1}
    assert [part.meta_info["part"] for part in parts] == list(range(len(parts)))


def test_padding_appends_the_first_or_last_row() -> None:
    for candidate, expected in (("first", 0), ("last", 2), ("", 2)):
        data = batch(3, loss=float("nan"))
        assert data.padding(2, candidate) is None  # type: ignore[func-returns-value]
        assert rows_of(data) == [0, 1, 2, expected, expected]
    data.padding(0)
    assert len(data) == 5
    with pytest.raises(InvalidIndex):
        DataProto().padding(1)


# Iterating


def test_mini_batches_are_views_in_order() -> None:
    data = batch(6, step=1)
    made = list(data.make_iterator(2, epochs=2))
    assert [rows_of(each) for each in made] == [[0, 1], [2, 3], [4, 5]] * 2
    assert made[1]["x"].data_ptr() == data["x"][2:].data_ptr()
    made[0].meta_info["step"] = 2
    assert data.meta_info == {"step": 1}


def test_shuffled_orders_follow_from_the_seed() -> None:
    shuffle = {"shuffle": True}
    orders = [[rows_of(each) for each in batch(12).make_iterator(4, 2, seed, shuffle)] for seed in (3, 3, 4)]
    assert orders[0] == orders[1] != orders[2]
    first, second = ([row for rows in half for row in rows] for half in (orders[0][:3], orders[0][3:]))
    assert sorted(first) == sorted(second) == list(range(12))
    assert list(range(12)) != first != second


def test_a_seed_alone_does_not_shuffle() -> None:
    assert [rows_of(each) for each in batch(6).make_iterator(3, epochs=2, seed=3)] == [[0, 1, 2], [3, 4, 5]] * 2


def test_shuffling_follows_the_order_of_verl() -> None:
    loader = DataLoader(range(8), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(5))  # type: ignore[arg-type]
    expected = [rows.tolist() for _ in range(2) for rows in loader]
    made = batch(8).make_iterator(4, epochs=2, seed=5, dataloader_kwargs={"shuffle": True})
    assert [rows_of(each) for each in made] == expected


def test_who_says_no_shuffling_or_brings_a_sampler_gets_that_order() -> None:
    still = batch(4).make_iterator(2, 1, seed=3, dataloader_kwargs={"shuffle": False})
    assert [rows_of(each) for each in still] == [[0, 1], [2, 3]]
    sampled = batch(4).make_iterator(2, 1, seed=3, dataloader_kwargs={"sampler": [3, 1, 2, 0]})
    assert [rows_of(each) for each in sampled] == [[3, 1], [2, 0]]


def test_shuffling_without_a_seed_follows_the_global_generator() -> None:
    orders = []
    for _ in range(2):
        torch.manual_seed(0)
        orders.append([rows_of(each) for each in batch(8).make_iterator(4, 1, dataloader_kwargs={"shuffle": True})])
    assert orders[0] == orders[1] != [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_an_iterator_needs_rows_that_divide() -> None:
    for size in (3, 0, -2, 2.0):
        with pytest.raises(IndivisibleBatch, match="4 rows do not divide"):
            batch(4).make_iterator(size, 1)
    assert list(batch(4)[:0].make_iterator(2, 1)) == list(batch(4)[:0].make_iterator(2, 1, seed=1)) == []


# Other forms


def test_collate_puts_items_together() -> None:
    data = batch(4, step=1)
    made = collate_fn([data[2], data[0]])
    assert rows_of(made) == [2, 0]
    assert made.meta_info == {}
    assert collate_fn([DataProto.from_dict(non_tensors={"a": ["x"]})[0]])["a"].tolist() == ["x"]
    with pytest.raises(MissingColumn, match="item 1"):
        collate_fn([data[0], data.select([])[0]])
    with pytest.raises(ColumnConflict, match="'x' cannot be joined"):
        collate_fn([data[0], DataProto.from_dict({"x": torch.zeros(1, 2)}, {"uid": ["a"]})[0]])


def test_an_array_of_strings_in_a_tensordict_is_a_column_if_it_has_one_for_each_row() -> None:
    """TensorDict keeps it whole, in each part of the table; a list it cuts."""
    names, three = np.array(["a", "b"]), np.array(["x", "y", "z"])
    table = TensorDict({"x": torch.arange(2), "name": names, "three": three, "tag": np.array("t")}, batch_size=[2])
    data = DataProto.from_tensordict(table)
    assert data[1:]["name"].tolist() == ["b"]
    assert data.meta_info["three"].tolist() == ["x", "y", "z"]
    assert str(data.meta_info["tag"]) == "t"


def test_to_tensordict_and_back() -> None:
    data = DataProto.from_dict(
        {"x": torch.arange(3)},
        {"uid": ["a", "b", "c"], "turns": [[], [0.5, 0.8], [0.9]], "info": [{"acc": 1.0}] * 3},
        {"step": 1, "name": "run"},
    )
    flat = data.to_tensordict()
    assert flat["uid"] == ["a", "b", "c"]
    assert list(flat["turns"][1]) == [0.5, 0.8]
    assert flat["step"] == 1
    assert flat.batch_size == torch.Size([3])
    back = DataProto.from_tensordict(flat, meta_info={"more": 2})
    assert back["x"].tolist() == [0, 1, 2]
    assert {name: back[name].tolist() for name in ("uid", "turns", "info")} == {
        name: data[name].tolist() for name in ("uid", "turns", "info")
    }
    assert back.meta_info == {"step": 1, "name": "run", "more": 2}
    assert DataProto.from_dict(non_tensors={"uid": ["a"]}).to_tensordict()["uid"] == ["a"]
    assert DataProto.from_tensordict(TensorDict({"a": torch.zeros(2)}, batch_size=[2])).non_tensor_batch == {}
    with pytest.raises(ColumnConflict, match="'x'"):
        DataProto.from_dict({"x": torch.zeros(1)}, meta_info={"x": 1}).to_tensordict()


def test_to_moves_in_place() -> None:
    data = batch(2)
    assert data.to("meta") is data
    assert data["x"].device.type == "meta"
    assert DataProto().to("cpu").batch is None


def test_from_single_dict_tells_fields_apart() -> None:
    data = DataProto.from_single_dict({"x": torch.zeros(2), "n": np.arange(2)}, {"step": 1}, auto_padding=True)
    assert list(data.batch.keys()) == ["x"]
    assert list(data.non_tensor_batch) == ["n"]
    assert data["n"].dtype == np.int64
    assert data.meta_info == {"step": 1, "_verl_auto_padding": True}
    assert data.is_padding_enabled()


# Checks are not assert statements

UNDER_O = """
import torch
from dataproto import DataProto
from dataproto.errors import DataProtoError
assert False, "this program runs without assertions"
data = DataProto.from_dict({"a": torch.arange(5)}, {"b": list("vwxyz")})
wrong = {
    "rows": lambda: DataProto.from_dict({"a": torch.zeros(2)}, {"b": ["x"]}),
    "two fields": lambda: DataProto.from_dict({"a": torch.zeros(2)}, {"a": ["x", "y"]}),
    "chunk": lambda: data.chunk(2),
    "iterator": lambda: data.make_iterator(2, 1),
    "pop": lambda: data.pop(["nope"]),
    "union": lambda: data.union(DataProto.from_dict({"a": torch.zeros(5, dtype=torch.int64)})),
    "concat": lambda: DataProto.concat([data, DataProto.from_dict(non_tensors={"b": ["x"]})]),
    "facts": lambda: DataProto.concat([DataProto(meta_info={"k": 1}), DataProto(meta_info={"k": 2})]),
    "index": lambda: data[[7]],
    "dims": lambda: DataProto.from_dict({"a": torch.zeros(2, 2)}, num_batch_dims=0),
}
for name, call in wrong.items():
    try:
        call()
    except DataProtoError:
        print(name)
"""


@pytest.mark.long  # compiles everything again
def test_checks_stay_under_python_O() -> None:
    done = subprocess.run([sys.executable, "-O", "-c", UNDER_O], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        *("rows", "two fields", "chunk", "iterator", "pop", "union", "concat", "facts", "index", "dims")
    ]


def test_all_errors_have_one_root() -> None:
    for call in (lambda: batch().chunk(3), lambda: batch()["no"], lambda: batch()[9], lambda: batch().pop(["no"])):
        with pytest.raises(DataProtoError):
            call()

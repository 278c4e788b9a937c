"""The fields of a batch, their law, and reading and writing columns and rows."""

import copy
import pickle

import numpy as np
import pytest
import torch
from PIL import Image
from tensordict import TensorDict

from dataproto import DataProto, DataProtoItem, object_array
from dataproto.errors import ColumnConflict, InvalidColumn, InvalidIndex, MissingColumn, RowCountMismatch


def batch(rows: int = 4) -> DataProto:
    return DataProto.from_dict(
        tensors={"ids": torch.arange(2 * rows).view(rows, 2), "score": torch.arange(rows) / 2},
        non_tensors={"uid": [f"p{row}" for row in range(rows)], "turns": [[0] * row for row in range(rows)]},
        meta_info={"step": 7},
    )


def snapshot(data: DataProto) -> tuple:
    tensors = None if data.batch is None else {name: value.tolist() for name, value in data.batch.items()}
    return tensors, {name: value.tolist() for name, value in data.non_tensor_batch.items()}, dict(data.meta_info)


# Law


def test_an_empty_batch_has_no_rows() -> None:
    assert len(DataProto()) == 0
    assert len(DataProto(batch=None, non_tensor_batch=None, meta_info=None)) == 0
    assert DataProto.from_dict({}).batch is None


def test_rows_are_counted_from_either_field() -> None:
    assert len(batch(3)) == 3
    assert len(DataProto.from_dict(non_tensors={"uid": ["a", "b"]})) == 2
    assert len(DataProto(batch=TensorDict({}, batch_size=[5]))) == 5


@pytest.mark.parametrize("error", [RowCountMismatch, AssertionError, ValueError])
def test_tensors_of_different_rows_are_refused(error: type[Exception]) -> None:
    with pytest.raises(error, match=r"'a': \(2,\).*'b': \(3,\)"):
        DataProto.from_dict({"a": torch.zeros(2), "b": torch.zeros(3)})


def test_arrays_must_have_the_rows_of_the_tensors_and_of_each_other() -> None:
    with pytest.raises(RowCountMismatch, match="'uid' has 2 rows, the batch has 3"):
        DataProto.from_dict({"a": torch.zeros(3)}, {"uid": ["x", "y"]})
    with pytest.raises(RowCountMismatch, match="'b' has 1 rows, the batch has 2"):
        DataProto.from_dict(non_tensors={"a": [1, 2], "b": [1]})


def test_a_name_stands_in_one_field_only() -> None:
    with pytest.raises(ColumnConflict, match="'a' is in batch and in non_tensor_batch"):
        DataProto.from_dict({"a": torch.zeros(2)}, {"a": [1, 2]})


def test_every_verb_notices_what_was_written_past_the_law() -> None:
    data = batch()
    data.non_tensor_batch["late"] = np.zeros(3)
    for verb in (data.check_consistency, lambda: data[:2], lambda: data.union(DataProto()), lambda: data.pop()):
        with pytest.raises(RowCountMismatch, match="'late' has 3 rows, the batch has 4"):
            verb()


@pytest.mark.parametrize("value", [torch.tensor(1.0), [1.0, 2.0], None])
def test_tensor_columns_are_tensors_with_rows(value: object) -> None:
    with pytest.raises(InvalidColumn, match="'a'"):
        DataProto.from_dict({"a": value})


@pytest.mark.parametrize("value", ["abc", {"x": 1}, 3, None, {1, 2}, np.array(1)])
def test_other_columns_are_lists_or_arrays(value: object) -> None:
    with pytest.raises(InvalidColumn, match="'a'"):
        DataProto.from_dict(non_tensors={"a": value})


def test_the_constructor_takes_only_what_it_keeps() -> None:
    with pytest.raises(InvalidColumn, match="one batch dimension"):
        DataProto(batch=TensorDict({"a": torch.zeros(2, 3)}, batch_size=[2, 3]))
    with pytest.raises(InvalidColumn, match="one batch dimension"):
        DataProto(batch={"a": torch.zeros(2)})  # type: ignore[arg-type]
    with pytest.raises(InvalidColumn, match="list, not a numpy array"):
        DataProto(non_tensor_batch={"a": [1, 2]})  # type: ignore[dict-item]
    with pytest.raises(InvalidColumn, match="'a' is a list"):
        DataProto.from_single_dict({"a": [1, 2]})  # type: ignore[dict-item]
    with pytest.raises(InvalidColumn, match="num_batch_dims=2"):
        DataProto.from_dict({"a": torch.zeros(2, 2)}, {"b": [1, 2]}, num_batch_dims=2)


def test_arguments_are_left_alone() -> None:
    lists, facts = {"uid": ["a", "b"]}, {"step": 1}
    data = DataProto.from_dict(non_tensors=lists, meta_info=facts, auto_padding=True)
    data.meta_info["more"] = 1
    assert lists == {"uid": ["a", "b"]}
    assert facts == {"step": 1}


def test_subclasses_make_their_own_kind() -> None:
    class Special(DataProto):
        pass

    data = Special.from_single_dict({"a": torch.arange(4), "b": np.arange(4)})
    made = [data[1:], data[[0]], data.select(), data.repeat(2), *data.chunk(2), data.pop(["a"]), Special.concat([data])]
    assert {type(each) for each in made} == {Special}


# Lists


def test_images_of_one_size_stay_images() -> None:
    images = [Image.new("RGB", (4, 3), color) for color in ("red", "green", "blue")]
    data = DataProto.from_dict(non_tensors={"image": images, "pair": [[image, image] for image in images]})
    assert data["image"].shape == data["pair"].shape == (3,)
    assert all(found is image for found, image in zip(data["image"], images))
    assert data["pair"][1][0] is images[1]


def test_tensors_and_arrays_of_one_shape_stay_objects() -> None:
    tensors, arrays = [torch.zeros(2, 3), torch.ones(2, 3)], [np.zeros(3), np.ones(3)]
    data = DataProto.from_dict(non_tensors={"t": tensors, "a": arrays, "d": [{"x": tensors[0]}] * 2})
    assert data["t"].shape == data["a"].shape == data["d"].shape == (2,)
    assert data["t"][1] is tensors[1]
    assert data["a"][1] is arrays[1]


def test_lists_of_scalars_become_what_verl_makes_of_them() -> None:
    data = DataProto.from_dict(non_tensors={"regular": [[1, 2], [3, 4]], "uneven": [[], [0.5]], "words": ["a", "b"]})
    assert data["regular"].shape == (2, 2)
    assert data["uneven"].tolist() == [[], [0.5]]
    assert data["uneven"].shape == data["words"].shape == (2,)
    assert {array.dtype for array in data.non_tensor_batch.values()} == {np.dtype(object)}


def test_messages_stay_lists_however_many_there_are() -> None:
    prompts = [[{"role": "user", "content": "1"}], [{"role": "user", "content": "2"}]]
    data = DataProto.from_dict(non_tensors={"raw_prompt": prompts})
    assert data["raw_prompt"].shape == (2,)
    assert data["raw_prompt"][0] == prompts[0]


def test_object_array_keeps_lists_whole() -> None:
    assert object_array([[1, 2], [3, 4]]).tolist() == [[1, 2], [3, 4]]
    assert object_array([[1, 2], [3, 4]]).shape == (2,)


# One column


def test_columns_are_read_by_name() -> None:
    data = batch(2)
    assert data["ids"] is data.batch["ids"]
    assert data["uid"] is data.non_tensor_batch["uid"]
    assert "ids" in data
    assert "uid" in data
    assert "step" not in data
    assert data.names() == ["ids", "score", "uid", "turns"]


@pytest.mark.parametrize("error", [MissingColumn, KeyError])
def test_a_missing_column_is_named_with_its_writer(error: type[Exception]) -> None:
    with pytest.raises(error, match=r"'old_log_probs' \(written by ActorWorker.log_probs\); present: 'ids', 'score'"):
        batch()["old_log_probs"]


def test_columns_are_written_into_their_field() -> None:
    data = batch(2)
    data["mask"] = torch.ones(2)
    data["names"] = ["x", "y"]
    data["count"] = np.array([1, 2])
    assert set(data.batch.keys()) == {"ids", "score", "mask"}
    assert set(data.non_tensor_batch) == {"uid", "turns", "names", "count"}
    assert data["count"].dtype == np.int64


def test_replacing_a_column_may_change_its_field() -> None:
    data = batch(2)
    data["uid"] = torch.tensor([5, 6])
    data["score"] = ["low", "high"]
    assert data["uid"].tolist() == [5, 6]
    assert data["score"].tolist() == ["low", "high"]
    assert sorted(data.names()) == ["ids", "score", "turns", "uid"]
    data.check_consistency()


def test_a_column_with_other_rows_is_refused_and_changes_nothing() -> None:
    data = batch(3)
    before = snapshot(data)
    for column in (torch.zeros(2), np.zeros(4), ["a"]):
        with pytest.raises(RowCountMismatch, match=r"'uid' has . rows, the batch has 3"):
            data["uid"] = column
    with pytest.raises(InvalidColumn):
        data["uid"] = 3  # type: ignore[assignment]
    with pytest.raises(InvalidColumn, match="named by strings"):
        data[0] = torch.zeros(3)  # type: ignore[index]
    assert snapshot(data) == before


def test_the_first_column_sets_the_number_of_rows() -> None:
    data = DataProto(meta_info={"step": 1})
    data["a"] = torch.zeros(3, 2)
    assert len(data) == 3
    with pytest.raises(RowCountMismatch):
        data["b"] = ["x"]


def test_a_locked_tensordict_can_be_added_to() -> None:
    data = DataProto(batch=TensorDict({"a": torch.zeros(2)}, batch_size=[2]).lock_())
    data["b"] = torch.ones(2)
    assert data["b"].tolist() == [1, 1]


# Rows


def test_an_item_is_one_row() -> None:
    data = batch()
    for index in (2, -2, np.int64(2), torch.tensor(2)):
        item = data[index]
        assert isinstance(item, DataProtoItem)
        assert item.batch["ids"].tolist() == [4, 5]
        assert item.non_tensor_batch == {"uid": "p2", "turns": [0, 0]}
        assert item.meta_info == {"step": 7}
        assert item.batch.batch_size == torch.Size([])


@pytest.mark.parametrize(
    ("index", "rows"),
    [
        (slice(1, 3), [1, 2]),
        (slice(None, None, 2), [0, 2]),
        (slice(-1, None), [3]),
        (slice(None, None, -1), [3, 2, 1, 0]),
        (slice(2, None, -2), [2, 0]),
        (slice(3, 1), []),
        ([3, 0, 0], [3, 0, 0]),
        ([-1, -4], [3, 0]),
        ([], []),
        (range(1, 3), [1, 2]),
        (np.array([2, 1], dtype=np.int32), [2, 1]),
        (np.array([1, 0, 1, 1], dtype=np.uint8), [1, 0, 1, 1]),
        (torch.tensor([1, 0, 1, 1], dtype=torch.uint8), [1, 0, 1, 1]),
        (np.array([]), []),
        (torch.tensor([3, -3]), [3, 1]),
        ([True, False, False, True], [0, 3]),
        (np.array([False] * 4), []),
        (torch.tensor([False, True, True, False]), [1, 2]),
    ],
)
def test_rows_are_chosen_as_in_numpy(index: object, rows: list[int]) -> None:
    data = batch()[index]
    assert data["uid"].tolist() == [f"p{row}" for row in rows]
    assert data["ids"].tolist() == [[2 * row, 2 * row + 1] for row in rows]
    assert [len(turns) for turns in data["turns"]] == rows
    assert data.batch.batch_size == torch.Size([len(rows)])
    assert data.meta_info == {"step": 7}


@pytest.mark.parametrize(
    "index",
    [
        *(
            4,
            -5,
            [4],
            np.array([-5]),
            [True, False],
            torch.ones(3, dtype=torch.bool),
            [0.0, 1.0],
            [[0, 1]],
            (0, 1),
            1.0,
        ),
        np.array([2**64 - 1], dtype=np.uint64),
        *(None, True, ["a"], [[0], [1, 2]], slice(None, None, 0), slice("a", None), torch.tensor([1.5])),
    ],
)
def test_other_indices_are_refused(index: object) -> None:
    for error in (InvalidIndex, IndexError, TypeError):
        with pytest.raises(error):
            batch()[index]


def test_slices_are_views_and_chosen_rows_are_copies() -> None:
    data = batch()
    data[1:3]["ids"].zero_()
    data[[0]]["ids"].zero_()
    assert data["ids"].tolist() == [[0, 1], [0, 0], [0, 0], [6, 7]]


def test_media_are_shared_however_rows_are_chosen() -> None:
    pixels = torch.zeros(8, 3)
    data = DataProto.from_dict(non_tensors={"media": [{"pixels": pixels}, {}]})
    for made in (
        data[[0, 0]],
        data.repeat(3),
        data[:1],
        DataProto.concat([data, data]),
        data.select(),
        data[:1].repeat(2),
    ):
        assert made["media"][0] is data["media"][0]


def test_iteration_goes_over_items() -> None:
    assert [item.non_tensor_batch["uid"] for item in batch(3)] == ["p0", "p1", "p2"]


def test_nested_tensors_are_columns_too() -> None:
    rows = [torch.arange(2), torch.arange(3), torch.arange(1)]
    data = DataProto.from_dict(
        {"n": torch.nested.as_nested_tensor(rows, layout=torch.jagged)}, {"uid": ["a", "b", "c"]}
    )
    assert [row.tolist() for row in data[[2, 0]]["n"].unbind()] == [[0], [0, 1]]
    assert [row.tolist() for row in data[1:]["n"].unbind()] == [[0, 1, 2], [0]]
    joined = DataProto.concat([data[:1], data[[1]]]).repeat(2)
    assert [row.tolist() for row in joined["n"].unbind()] == [[0, 1], [0, 1], [0, 1, 2], [0, 1, 2]]
    assert [row.tolist() for row in pickle.loads(pickle.dumps(data))["n"].unbind()] == [[0, 1], [0, 1, 2], [0]]


# Some of the columns


def test_select_shares_columns_but_not_containers() -> None:
    data = batch(2)
    chosen = data.select(["ids"], ["uid"], [])
    assert snapshot(chosen) == ({"ids": [[0, 1], [2, 3]]}, {"uid": ["p0", "p1"]}, {})
    assert chosen["ids"] is data["ids"]
    everything = data.select()
    everything["new"] = torch.zeros(2)
    everything["late"] = ["x", "y"]
    everything.meta_info["new"] = 1
    assert data.names() == ["ids", "score", "uid", "turns"]
    assert data.meta_info == {"step": 7}


def test_select_of_nothing_keeps_the_rows() -> None:
    assert len(batch(3).select([], [], [])) == 3


def test_select_with_deepcopy_copies_everything() -> None:
    data = batch(2)
    copied = data.select(deepcopy=True)
    copied["ids"].zero_()
    copied["turns"][1].append(9)
    assert data["ids"].tolist() == [[0, 1], [2, 3]]
    assert data["turns"].tolist() == [[], [0]]


def test_select_of_a_missing_tensor_names_it() -> None:
    with pytest.raises(MissingColumn, match="'nope'"):
        batch().select(["ids", "nope"])
    with pytest.raises(MissingColumn, match="'nope'"):
        DataProto.from_dict(non_tensors={"uid": ["a"]}).select(["nope"])
    assert batch(1).select(non_tensor_batch_keys=["nope"]).non_tensor_batch == {}


def test_pop_takes_columns_out() -> None:
    data = batch(2)
    popped = data.pop(["ids"], ["uid"], ["step"])
    assert snapshot(popped) == ({"ids": [[0, 1], [2, 3]]}, {"uid": ["p0", "p1"]}, {"step": 7})
    assert snapshot(data) == ({"score": [0.0, 0.5]}, {"turns": [[], [0]]}, {})


def test_pop_of_all_tensors_keeps_the_rows() -> None:
    data = batch(2)
    data.pop(["ids", "score"], ["uid", "turns"])
    assert len(data) == 2
    assert batch(2).pop(non_tensor_batch_keys=["uid"]).batch is None


@pytest.mark.parametrize(
    "names",
    [
        (["ids", "nope"], None, None),
        (["ids"], ["nope"], None),
        (["ids"], ["uid"], ["no"]),
        (["ids", "ids"], None, None),
    ],
)
def test_a_pop_that_fails_takes_nothing(names: tuple) -> None:
    data = batch()
    before = snapshot(data)
    for error in (MissingColumn, AssertionError, KeyError):
        with pytest.raises(error):
            data.pop(*names)
    assert snapshot(data) == before


def test_rename_works_in_place_on_both_fields() -> None:
    data = batch(2)
    assert data.rename(["ids", "score", "uid"], ["score", "ids", "name"]) is data
    assert data["ids"].tolist() == [0.0, 0.5]
    assert data["score"].tolist() == [[0, 1], [2, 3]]
    assert data["name"].tolist() == ["p0", "p1"]
    assert data.rename("name", "uid").names() == ["score", "ids", "turns", "uid"]


@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        (["ids", "nope"], ["a", "b"], MissingColumn),
        (["ids"], ["a", "b"], ValueError),
        (["ids"], ["uid"], ColumnConflict),
        (["ids", "score"], ["x", "x"], ColumnConflict),
        (["ids", "ids"], ["x", "y"], MissingColumn),
        (None, ["a"], TypeError),
    ],
)
def test_a_rename_that_fails_renames_nothing(old: object, new: object, error: type[Exception]) -> None:
    data = batch()
    before = snapshot(data)
    with pytest.raises(error):
        data.rename(old, new)  # type: ignore[arg-type]
    assert snapshot(data) == before


# Copies and words


def test_pickling_keeps_values_dtypes_and_sharing() -> None:
    image = Image.new("RGB", (2, 2), "red")
    data = DataProto.from_dict(
        {"half": torch.tensor([1.5, 2.5], dtype=torch.bfloat16), "flag": torch.tensor([True, False])},
        {"image": [image, image], "n": np.array([1, 2], dtype=np.int8)},
        {"step": 1},
    )
    for protocol in (2, 5):
        back = pickle.loads(pickle.dumps(data, protocol=protocol))
        assert torch.equal(back["half"], data["half"])
        assert back["flag"].dtype == torch.bool
        assert back["n"].dtype == np.int8
        assert back["image"][0] is back["image"][1]
        assert back["image"][0].tobytes() == image.tobytes()
        assert back.meta_info == {"step": 1}


def test_a_pickled_part_does_not_carry_the_whole() -> None:
    data = DataProto.from_dict({"wide": torch.zeros(64, 1024)})
    assert len(pickle.dumps(data[:1])) < 2 * 4 * 1024


def test_copies() -> None:
    data = batch(2)
    shallow, deep = copy.copy(data), copy.deepcopy(data)
    assert shallow["ids"] is data["ids"]
    deep["ids"].zero_()
    deep["turns"][1].append(1)
    assert snapshot(data) == snapshot(batch(2))


def test_words(capsys: pytest.CaptureFixture[str]) -> None:
    data = DataProto.from_dict({"a": torch.zeros(2, 3)}, {"n": np.zeros((2, 5))}, {"k": [1], "e": {}, "t": (1, "x")})
    assert data.get_data_info().splitlines() == [
        *("batch", "  a: (2, 3) (torch.float32) cpu", "non_tensor_batch", "  n: ndarray(2, 5) (float64)"),
        *("meta_info", "  k: list[int]", "  e: dict", "  t: tuple(int, str)"),
    ]
    assert repr(data).startswith("DataProto of 2 rows\nbatch\n")
    assert "a: (" not in DataProto().get_data_info()
    data.print_size("here")
    expected = f"here, Size of tensordict: {24 / 1024**3} GB, size of non_tensor_batch: {80 / 1024**3} GB\n"
    assert capsys.readouterr().out == expected

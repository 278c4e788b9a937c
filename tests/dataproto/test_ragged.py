"""``RaggedTensor`` by itself: reading, sharing, converting, refusing. Expected values are worked by hand."""

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch

from dataproto import RaggedTensor
from dataproto.errors import ColumnConflict, InvalidColumn, InvalidConfig, InvalidIndex
from dataproto.tensordict_utils import same_value


def ragged() -> RaggedTensor:
    """Rows [0, 1], [], [2, 3, 4], [5]."""
    return RaggedTensor(torch.arange(6), [2, 0, 3, 1])


def wide() -> RaggedTensor:
    """Rows of tokens of two numbers: [[0, 1]], [[2, 3], [4, 5]]."""
    return RaggedTensor(torch.arange(6.0).view(3, 2), torch.tensor([1, 2]))


def lists(rows: RaggedTensor) -> list[Any]:
    """The rows, read in three ways that must agree."""
    one_by_one = [rows[row].tolist() for row in range(len(rows))]
    assert one_by_one == [row.tolist() for row in rows]
    assert one_by_one == [part.tolist() for part in rows.values.split(rows.lengths.tolist())]
    return one_by_one


# Reading


def test_rows_by_number_are_views() -> None:
    data = ragged()
    assert data[0].tolist() == [0, 1]
    assert data[1].shape == (0,)
    assert data[-1].tolist() == [5]
    assert data[-4].tolist() == [0, 1]
    assert data[np.int64(2)].tolist() == data[torch.tensor(2)].tolist() == [2, 3, 4]
    assert data[2].data_ptr() == data.values[2:].data_ptr()
    assert wide()[1].tolist() == [[2, 3], [4, 5]]


@pytest.mark.parametrize(
    ("index", "rows"),
    [
        (slice(None), [[0, 1], [], [2, 3, 4], [5]]),
        (slice(1, 3), [[], [2, 3, 4]]),
        (slice(None, None, -1), [[5], [2, 3, 4], [], [0, 1]]),
        (slice(-1, None), [[5]]),
        (slice(2, 2), []),
        (slice(9, 12), []),
        ([3, 0, 0, -2], [[5], [0, 1], [0, 1], [2, 3, 4]]),
        ([], []),
        (np.array([1, 3]), [[], [5]]),
        (torch.tensor([-1]), [[5]]),
        (range(2), [[0, 1], []]),
        ([True, False, False, True], [[0, 1], [5]]),
        (np.array([False, True, True, False]), [[], [2, 3, 4]]),
        (torch.tensor([False] * 4), []),
        (np.array([1, 0, 0, 1]), [[], [0, 1], [0, 1], []]),  # numbers, though they look like a mask
    ],
)
def test_chosen_rows_share_the_values(index: Any, rows: list[list[int]]) -> None:
    data = ragged()
    assert lists(data[index]) == rows
    assert data[index].lengths.tolist() == [len(row) for row in rows]
    assert data[index].storage is data.storage


@pytest.mark.parametrize(
    "index", [4, -5, True, torch.tensor(True), np.array(True), "0", 1.0, None, (0, 1), [1.5], [4], [[0]]]
)
def test_what_selects_no_rows(index: Any) -> None:
    with pytest.raises(InvalidIndex):
        ragged()[index]


@pytest.mark.parametrize("mask", [[True] * 3, np.array([True] * 5), torch.tensor([True])])
def test_a_mask_has_the_length_of_the_rows(mask: Any) -> None:
    with pytest.raises(InvalidIndex, match="mask"):
        ragged()[mask]


def test_lengths_go_with_the_rows() -> None:
    data = ragged()
    assert data[1:].lengths.dtype == torch.int64
    data.lengths.fill_(0)
    assert lists(data) == [[0, 1], [], [2, 3, 4], [5]]
    given = torch.tensor([1, 1])
    kept = RaggedTensor(torch.arange(2), given)
    given.fill_(2)
    assert lists(kept) == [[0], [1]]


# Repeating and joining


@pytest.mark.parametrize("make", [ragged, wide])
def test_repeating_copies_no_values(make: Any) -> None:
    data = make()
    rows = lists(data)
    for repeated, expected in (
        (data.repeat(2), rows * 2),
        (data.repeat(0), []),
        (data.repeat_interleave(2), [row for row in rows for _ in range(2)]),
        (data.repeat_interleave(range(len(rows))), [row for number, row in enumerate(rows) for _ in range(number)]),
        (data.repeat_interleave(torch.arange(len(rows))), [row for n, row in enumerate(rows) for _ in range(n)]),
    ):
        assert lists(repeated) == expected
        assert repeated.storage is data.storage
        assert repeated.tail == data.tail


@pytest.mark.parametrize("times", [-1, 1.5, True, "2", [1, 2], [1, 1, 1, -1]])
def test_repeats_are_whole_numbers(times: Any) -> None:
    with pytest.raises(InvalidIndex, match="repeated"):
        ragged().repeat_interleave(times)
    with pytest.raises(InvalidIndex, match="repeated"):
        ragged().repeat(times)


def test_parts_of_one_storage_join_without_copying() -> None:
    data = ragged()
    joined = RaggedTensor.concat([data[2:], data[:1], data[:0], data[[3, 3]]])
    assert lists(joined) == [[2, 3, 4], [5], [0, 1], [5], [5]]
    assert joined.storage is data.storage
    same_memory = RaggedTensor(data.values.view(-1), [6])
    assert RaggedTensor.concat([data, same_memory]).storage.data_ptr() == data.storage.data_ptr()


def test_other_parts_are_copied_once_however_many_rows_show_them() -> None:
    data, other = ragged(), RaggedTensor(torch.tensor([7, 8, 9]), [2, 1])
    joined = RaggedTensor.concat([other[1:], data.repeat(2), other, data[2:3], other[:1]])
    assert lists(joined) == [[9], *[[0, 1], [], [2, 3, 4], [5]] * 2, [7, 8], [9], [2, 3, 4], [7, 8]]
    assert len(joined.storage) == 6 + 3
    huge = RaggedTensor(torch.arange(1000), [10] * 100)
    assert len(RaggedTensor.concat([huge[3:4], data]).storage) == 16


def test_parts_that_do_not_go_together() -> None:
    for other in (wide(), ragged().to("meta"), RaggedTensor(torch.zeros(6), [6])):
        with pytest.raises(ColumnConflict, match="0 and 1"):
            RaggedTensor.concat([ragged(), other])
    with pytest.raises(InvalidIndex, match="empty"):
        RaggedTensor.concat([])


def test_distinct_rows_let_go_of_the_rest() -> None:
    data = RaggedTensor(torch.arange(1000), [10] * 100)
    assert data.distinct() is data
    few = data[[7, 3, 7]].distinct()
    assert lists(few) == lists(data[[7, 3, 7]])
    assert len(few.storage) == 20
    assert few[0].data_ptr() == few[2].data_ptr()
    assert len(ragged()[1:2].distinct().storage) == 0


# Windows and values


def test_values_are_a_view_where_rows_follow_each_other() -> None:
    data = ragged()
    assert data.values is data.storage
    assert data[1:3].values.data_ptr() == data.storage[2:].data_ptr()
    assert data[[0, 1, 2]].values.data_ptr() == data.storage.data_ptr()
    assert data[[2, 0]].values.tolist() == [2, 3, 4, 0, 1]
    long = RaggedTensor(torch.arange(400), [100, 200, 100])
    assert long[[2, 0]].values.tolist() == [*range(300, 400), *range(100)]
    assert data[[]].values.shape == (0,)


def test_windows() -> None:
    data = RaggedTensor.windows(torch.arange(5), [3, 0, 1], torch.tensor([2, 3, 0]))
    assert lists(data) == [[3, 4], [0, 1, 2], []]
    assert data.starts.tolist() == [3, 0, 1]
    for starts, lengths in (([4], [2]), ([0, 1], [1]), ([-1], [1]), ([6], [0])):
        with pytest.raises(InvalidColumn):
            RaggedTensor.windows(torch.arange(5), starts, lengths)


@pytest.mark.parametrize("lengths", [[3], [4, -1], [1.5, 1.5], [True, True, True], [[3]], "3", 3, None])
def test_wrong_lengths(lengths: Any) -> None:
    with pytest.raises(InvalidColumn):
        RaggedTensor(torch.arange(2 if lengths == [3] else 3), lengths)


def test_unsigned_lengths_do_not_come_around() -> None:
    with pytest.raises(InvalidColumn, match="lengths are whole numbers"):
        RaggedTensor(torch.arange(3), np.array([4, 2**64 - 1], dtype=np.uint64))


@pytest.mark.parametrize("values", [torch.tensor(1), [1, 2], None, torch.eye(2).to_sparse()])
def test_wrong_values(values: Any) -> None:
    with pytest.raises(InvalidColumn, match="values"):
        RaggedTensor(values, [2])


# Equality


def test_equality_is_of_rows_not_of_storage() -> None:
    data = ragged()
    assert data == RaggedTensor.windows(torch.tensor([5, 2, 3, 4, 0, 1]), [4, 3, 1, 0], [2, 0, 3, 1])
    assert data[[0, 2]] != data[[2, 0]]
    assert data != RaggedTensor(torch.arange(6), [1, 1, 3, 1])
    assert RaggedTensor(torch.tensor([float("nan")]), [1]) == RaggedTensor(torch.tensor([float("nan")]), [1])


def test_equality_respects_dtype_device_and_tail() -> None:
    data = ragged()
    assert data != RaggedTensor(torch.arange(6, dtype=torch.int32), data.lengths)
    assert data != data.to("meta")
    empty = RaggedTensor(torch.zeros(0, 2), [])
    assert empty == RaggedTensor(torch.zeros(0, 2), [])
    assert empty != RaggedTensor(torch.zeros(0, 3), [])
    assert empty != RaggedTensor(torch.zeros(0, 2, dtype=torch.half), [])


def test_comparing_with_anything_else_is_false_and_no_error() -> None:
    data = ragged()
    for other in (None, 1, "a", [0], torch.arange(6), np.arange(6), data.to_nested()):
        assert (data == other) is False
        assert not same_value(data, other)
        assert not same_value(other, data)
    assert same_value({"a": [data, None]}, {"a": [ragged(), None]})


# Conversions


def test_padding_goes_to_the_side_asked_for() -> None:
    data = ragged()
    assert data.to_padded().tolist() == [[0, 1, 0], [0, 0, 0], [2, 3, 4], [5, 0, 0]]
    assert data.to_padded("left", -1).tolist() == [[-1, 0, 1], [-1, -1, -1], [2, 3, 4], [-1, -1, 5]]
    assert data.mask("left").tolist() == [[False, True, True], [False] * 3, [True] * 3, [False, False, True]]
    assert wide().to_padded("right", 9).tolist() == [[[0, 1], [9, 9]], [[2, 3], [4, 5]]]
    assert data[[2, 0]].to_padded().tolist() == [[2, 3, 4], [0, 1, 0]]
    with pytest.raises(InvalidConfig, match="middle"):
        data.to_padded("middle")  # type: ignore[arg-type]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("make", [ragged, wide, lambda: ragged()[:0], lambda: ragged()[[1, 1]]])
def test_padded_and_back(side: Any, make: Any) -> None:
    data = make()
    padded, mask = data.to_padded(side), data.mask(side)
    assert padded.shape == (len(data), mask.shape[1], *data.tail)
    assert RaggedTensor(padded[mask], mask.sum(1)) == data


@pytest.mark.parametrize("make", [ragged, wide, lambda: ragged()[:0], lambda: ragged()[[2, 0]]])
def test_nested_and_back(make: Any) -> None:
    data = make()
    nested = data.to_nested()
    assert nested.layout == torch.jagged
    assert [row.tolist() for row in nested.unbind()] == lists(data)
    assert RaggedTensor.from_nested(nested) == data
    assert RaggedTensor.from_nested(nested).storage.data_ptr() == nested.values().data_ptr()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_other_nested_tensors() -> None:
    with_holes = torch.nested.nested_tensor_from_jagged(torch.arange(8), torch.tensor([0, 4, 8]), torch.tensor([2, 1]))
    assert lists(RaggedTensor.from_nested(with_holes)) == [[0, 1], [4]]
    strided = torch.nested.as_nested_tensor([torch.ones(2), torch.zeros(1)], layout=torch.strided)
    assert lists(RaggedTensor.from_nested(strided)) == [[1, 1], [0]]
    later = torch.nested.nested_tensor_from_jagged(torch.zeros(4, 5), torch.tensor([0, 2, 5]), jagged_dim=2)
    for wrong in (later, torch.zeros(2), None):
        with pytest.raises(InvalidColumn):
            RaggedTensor.from_nested(wrong)


SHARED = torch.ones(2)


@pytest.mark.parametrize("rows", [np.arange(8).reshape(4, 2), torch.arange(8).view(4, 2)])
def test_from_rows_that_an_array_makes_as_it_is_read(rows: Any) -> None:
    assert lists(RaggedTensor.from_list(rows)) == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_from_list() -> None:
    assert lists(RaggedTensor.from_list([torch.tensor([1, 2]), torch.tensor([], dtype=torch.int64)])) == [[1, 2], []]
    assert lists(RaggedTensor.from_list([[1, 2], [], np.array([3])])) == [[1, 2], [], [3]]
    assert RaggedTensor.from_list([[], [1]]).dtype == torch.int64
    assert RaggedTensor.from_list([[1], [2]], dtype=torch.int32).dtype == torch.int32
    assert RaggedTensor.from_list([[], torch.ones(1, 2)])[0].shape == (0, 2)
    shared = torch.arange(3)
    assert len(RaggedTensor.from_list([shared, torch.arange(1), shared]).storage) == 4
    for none in (RaggedTensor.from_list([]), RaggedTensor.from_list([], dtype=torch.int8)):
        assert len(none) == 0
    assert RaggedTensor.from_list([[], []], dtype=torch.int8) == RaggedTensor(torch.empty(0, dtype=torch.int8), [0, 0])


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([torch.ones(1), None], "row 1 is None"),
        ([None, torch.ones(1)], "row 0 is None"),
        ([torch.ones(1), torch.tensor(1.0)], "row 1"),
        ([torch.ones(1), torch.ones(1, 2)], "row 1"),
        ([torch.ones(1), torch.ones(1).long()], "row 1"),
        ([torch.ones(1), torch.ones(1, device="meta")], "row 1"),
        ([[1], [1.5]], "row 1"),
        ([torch.tensor(1)], "row 0"),
        ([[1], ["a"]], "row 1 makes no tensor"),
        ([[1], [None]], "row 1 makes no tensor"),
        ([[[1, 2], [3]]], "row 0 makes no tensor"),
        ([SHARED, SHARED, None], "row 2 is None"),
        ([SHARED, SHARED, torch.ones(1).long()], "row 2 is"),
    ],
)
def test_from_list_names_the_row_that_does_not_fit(rows: list[Any], said: str) -> None:
    with pytest.raises(InvalidColumn, match=said):
        RaggedTensor.from_list(rows)


# Elsewhere


def test_to_casts_floating_point_rows_only_and_only_when_asked() -> None:
    floats, numbers = wide(), ragged()
    assert floats.to("cpu") is floats
    assert floats.to(floats.device, torch.float32) is floats
    assert floats.to(torch.bfloat16).dtype == torch.bfloat16
    assert floats.to("cpu", torch.half).dtype == floats.to(dtype=torch.half).dtype == torch.half
    assert numbers.to(torch.bfloat16) is numbers
    assert RaggedTensor(torch.tensor([True]), [1]).to(torch.half).dtype == torch.bool
    assert lists(floats.to(torch.float64)) == lists(floats)


def test_the_device_is_never_stale() -> None:
    moved = ragged().to("meta")
    assert moved.device == moved.values.device == moved[0].device == moved[1:].device == torch.device("meta")
    assert ragged().device == torch.device("cpu")
    assert moved.lengths.tolist() == [2, 0, 3, 1]
    assert moved.lengths.device == torch.device("cpu")


def test_to_moves_each_distinct_row_once() -> None:
    data = RaggedTensor(torch.arange(1000.0), [10] * 100)
    assert len(data[:2].repeat(8).to("meta").storage) == 20
    assert len(data[:2].repeat(8).to(torch.half).storage) == 20


def test_copies_have_their_own_memory_and_still_share_among_rows() -> None:
    data = ragged().repeat(2)
    for made in (copy.deepcopy(data), copy.deepcopy(data[:5])):
        made[0].fill_(9)
        assert lists(made)[4] == [9, 9]
    assert lists(data)[0] == [0, 1]
    holder = copy.deepcopy([data, data])
    assert holder[0] is holder[1]


# Gradients


@pytest.mark.parametrize(
    "read",
    [
        lambda data: data[0].sum() + 2 * data[2].sum(),
        lambda data: data[[2, 0, 2]].values.sum(),
        lambda data: sum(weight * row.sum() for weight, row in zip((1, 7, 2, 0), data.unbind())),
        lambda data: data.repeat_interleave([1, 1, 2, 0]).values.sum(),
        lambda data: data[[0, 2, 2]].to_padded("left", 5).sum(),
        lambda data: RaggedTensor.concat([data[2:3], RaggedTensor(torch.ones(1), [1]), data[::2]]).values.sum(),
        lambda data: data.to(torch.float64)[[0, 2, 2]].values.sum(),
        lambda data: data[[0, 2, 2]].to_nested().values().sum(),
        lambda data: data[[0, 2, 2]].distinct().values.sum(),
    ],
)
def test_gradients_flow_to_the_values(read: Any) -> None:
    values = torch.arange(6.0, requires_grad=True)
    read(RaggedTensor(values, [2, 0, 3, 1])).backward()
    assert values.grad.tolist() == [1, 1, 2, 2, 2, 0]


def test_gradients_reach_the_values() -> None:
    values = torch.ones(3, requires_grad=True)
    data = RaggedTensor(values, [1, 2])
    assert data.requires_grad
    assert not data.detach().requires_grad
    (data.values * torch.tensor([1.0, 2.0, 3.0])).sum().backward()
    assert values.grad.tolist() == [1, 2, 3]


# Every dtype

DTYPES = [torch.bool, torch.uint8, torch.int64, torch.uint16, torch.uint64, torch.bfloat16, torch.complex64]
DTYPES += [torch.float8_e4m3fn, torch.float8_e5m2, torch.float64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(dtype: torch.dtype) -> None:
    data = RaggedTensor(torch.tensor([1, 0, 1, 1, 0, 1]).to(dtype), [2, 0, 3, 1])
    chosen = data[[2, 0]]
    assert chosen.dtype == dtype
    assert chosen == RaggedTensor(torch.tensor([1, 1, 0, 1, 0]).to(dtype), [3, 2])
    assert RaggedTensor(chosen.to_padded("left")[chosen.mask("left")], chosen.lengths) == chosen
    assert RaggedTensor.concat([chosen, RaggedTensor(torch.ones(2).to(dtype), [2])])[2].dtype == dtype


def test_it_says_what_it_is() -> None:
    assert repr(wide()) == "RaggedTensor(2 rows of (n, 2) torch.float32 on cpu, lengths [1, 2])"
    assert (
        repr(ragged().repeat(3))
        == "RaggedTensor(12 rows of (n,) torch.int64 on cpu, lengths [2, 0, 3, 1, 2, 0, 3, 1, ...])"
    )
    assert ragged().repeat(2).nbytes == 96


def test_no_rows_stay_legal_everywhere() -> None:
    none = RaggedTensor(torch.zeros(0, 3), [])
    for made in (none[:], none[[]], none.repeat(3), none.repeat_interleave([]), RaggedTensor.concat([none, none])):
        assert made == none
    assert none.to_padded().shape == (0, 0, 3)
    assert none.unbind() == []
    assert pickle.loads(pickle.dumps(none)) == none
    blank = RaggedTensor(torch.zeros(0), [0, 0])
    assert blank.to_padded().shape == (2, 0)
    assert lists(blank[[1, 0, 1]]) == [[], [], []]


def test_pinned_rows_hold_each_distinct_row_once_where_there_is_a_device() -> None:
    rows = RaggedTensor(torch.arange(6), [2, 4]).repeat(3)[[1, 2, 3]]
    if not torch.accelerator.is_available():
        with pytest.raises(RuntimeError, match=r"accelerator|NVIDIA driver"):
            rows.pin_memory()
        return
    pinned = rows.pin_memory()
    assert pinned.storage.is_pinned()
    assert pinned == rows
    assert len(pinned.storage) == 6
    assert pinned.pin_memory() is pinned


def test_lists_of_numbers_become_what_torch_makes_of_them() -> None:
    for row in ([1, 2], [True, False], [1, True], [1.5, 2], [2**40], [[1, 2], [3, 4]], (5,)):
        for dtype in (None, torch.int64, torch.float32):
            expected = torch.as_tensor(row, dtype=dtype)
            found = RaggedTensor.from_list([row], dtype).values
            assert found.dtype == expected.dtype
            assert found.equal(expected)
    with pytest.raises(InvalidColumn, match=r"row 0 makes no tensor: .*overflow"):
        RaggedTensor.from_list([[2**40]], torch.int32)

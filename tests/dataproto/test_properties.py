"""Laws that hold for any batch, against lists of rows as the reference."""

import pickle
from pathlib import Path

import numpy as np
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dataproto import DataProto, object_array, pad_dataproto_to_divisor, unpad_dataproto
from dataproto.tensordict_utils import same_value
from helpers.examples import at_most

Row = tuple[int, str, tuple[int, ...]]


def batch(rows: list[Row]) -> DataProto:
    objects = object_array([list(row[2]) for row in rows])
    numbers = torch.tensor([[row[0], -row[0]] for row in rows], dtype=torch.int64).view(len(rows), 2)
    return DataProto.from_dict({"x": numbers}, {"s": np.array([row[1] for row in rows], dtype=object), "o": objects})


def rows_of(data: DataProto) -> list[Row]:
    numbers = data["x"].tolist()
    assert all(number == [number[0], -number[0]] for number in numbers)
    return [(number[0], text, tuple(row)) for number, text, row in zip(numbers, data["s"], data["o"])]


ROW = st.tuples(st.integers(-100, 100), st.text(max_size=3), st.lists(st.integers(0, 3), max_size=3).map(tuple))
ROWS = st.lists(ROW, max_size=9)
SETTINGS = settings(max_examples=at_most(60), suppress_health_check=[HealthCheck.function_scoped_fixture])


@SETTINGS
@given(ROWS, st.slices(9))
def test_slices(rows: list[Row], index: slice) -> None:
    assert rows_of(batch(rows)[index]) == rows[index]


@SETTINGS
@given(st.lists(ROW, min_size=1, max_size=9), st.data())
def test_chosen_rows(rows: list[Row], data: st.DataObject) -> None:
    index = data.draw(st.lists(st.integers(-len(rows), len(rows) - 1), max_size=12))
    expected = [rows[each] for each in index]
    for form in (index, np.array(index, dtype=np.int64), torch.tensor(index, dtype=torch.int64)):
        assert rows_of(batch(rows)[form]) == expected
    order, ordered = data.draw(st.permutations(range(len(rows)))), batch(rows)
    ordered.reorder(order)
    assert rows_of(ordered) == [rows[each] for each in order]
    mask = data.draw(st.lists(st.booleans(), min_size=len(rows), max_size=len(rows)))
    for form in (mask, np.array(mask), torch.tensor(mask)):
        assert rows_of(batch(rows)[form]) == [row for row, kept in zip(rows, mask) if kept]


@SETTINGS
@given(ROWS, st.integers(1, 5))
def test_parts_make_the_whole(rows: list[Row], size: int) -> None:
    data = batch(rows)
    for parts in (data.split(size), data.chunk(size) if len(rows) % size == 0 else []):
        assert [row for part in parts for row in rows_of(part)] == (rows if parts else [])
        if parts:
            assert rows_of(DataProto.concat(parts)) == rows
    data.meta_info["_verl_auto_padding"] = True
    parts = data.chunk(size)
    assert len(parts) == size
    assert rows_of(DataProto.concat(parts)) == rows
    padded, added = pad_dataproto_to_divisor(data, size)
    assert len(padded) % size == 0
    assert rows_of(unpad_dataproto(padded, added)) == rows


@SETTINGS
@given(ROWS, st.data())
def test_repeats(rows: list[Row], data: st.DataObject) -> None:
    times = data.draw(st.integers(0, 3))
    assert rows_of(batch(rows).repeat(times)) == [row for row in rows for _ in range(times)]
    assert rows_of(batch(rows).repeat(times, interleave=False)) == rows * times
    each = data.draw(st.lists(st.integers(0, 3), min_size=len(rows), max_size=len(rows)))
    assert rows_of(batch(rows).sample_level_repeat(each)) == [row for row, n in zip(rows, each) for _ in range(n)]


@SETTINGS
@given(ROWS)
def test_bytes_come_back(tmp_path: Path, rows: list[Row]) -> None:
    data = batch(rows)
    data.save_to_disk(tmp_path / "file")
    for back in (pickle.loads(pickle.dumps(data)), DataProto.load_from_disk(tmp_path / "file")):
        assert rows_of(back) == rows
        assert same_value(back["o"], data["o"])


@SETTINGS
@given(ROWS, ROWS)
def test_union_succeeds_exactly_on_equal_columns(one: list[Row], other: list[Row]) -> None:
    left, right = batch(one), batch(other)
    right["new"] = torch.zeros(len(other))
    before = rows_of(left)
    try:
        left.union(right)
    except ValueError:
        assert one != other
        assert "new" not in left
    else:
        assert one == other
        assert "new" in left
    assert rows_of(left) == before

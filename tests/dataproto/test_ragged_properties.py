"""Laws of ``RaggedTensor`` for any rows, against a list of tensors as the reference."""

import copy
import pickle

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dataproto import DataProto, RaggedTensor
from helpers.examples import at_most

SETTINGS = settings(max_examples=at_most(80))
Rows = list[torch.Tensor]

LENGTHS = st.lists(st.integers(0, 5), max_size=7)
TAILS = st.sampled_from([(), (2,), (0,), (2, 3)])


@st.composite
def oracles(draw: st.DrawFn, tail: tuple[int, ...] | None = None) -> tuple[RaggedTensor, Rows]:
    """A ragged tensor, made in one of several ways, and its rows."""
    tail = draw(TAILS) if tail is None else tail
    lengths = draw(LENGTHS)
    values = torch.randn(sum(lengths), *tail, generator=torch.Generator().manual_seed(draw(st.integers(0, 99))))
    made = RaggedTensor(values, lengths)
    rows = list(values.split(lengths)) if lengths else []
    if lengths and draw(st.booleans()):  # windows out of order, some rows twice
        order = draw(st.lists(st.integers(0, len(lengths) - 1), max_size=7))
        made, rows = made[order], [rows[row] for row in order]
    return made, rows


def check(made: RaggedTensor, rows: Rows, tail: torch.Size) -> None:
    """The ragged tensor holds exactly these rows, however it is read."""
    assert len(made) == len(rows)
    assert made.lengths.tolist() == [len(row) for row in rows]
    assert all(torch.equal(mine, row) for mine, row in zip(made, rows))
    assert torch.equal(made.values, torch.cat([*rows, torch.empty(0, *tail)]))
    assert made.tail == tail
    assert made == RaggedTensor(torch.cat([*rows, torch.empty(0, *tail)]), [len(row) for row in rows])


@SETTINGS
@given(oracles(), st.slices(7))
def test_slices(pair: tuple[RaggedTensor, Rows], index: slice) -> None:
    made, rows = pair
    check(made[index], rows[index], made.tail)


@SETTINGS
@given(oracles(), st.data())
def test_chosen_and_repeated_rows(pair: tuple[RaggedTensor, Rows], data: st.DataObject) -> None:
    made, rows = pair
    index = data.draw(st.lists(st.integers(-len(rows), len(rows) - 1), max_size=9)) if rows else []
    for form in (index, np.array(index, dtype=np.int64), torch.tensor(index, dtype=torch.int64)):
        check(made[form], [rows[row] for row in index], made.tail)
    mask = data.draw(st.lists(st.booleans(), min_size=len(rows), max_size=len(rows)))
    for form in (mask, np.array(mask, dtype=bool), torch.tensor(mask, dtype=torch.bool)):
        check(made[form], [row for row, kept in zip(rows, mask) if kept], made.tail)
    times = data.draw(st.integers(0, 3))
    check(made.repeat(times), rows * times, made.tail)
    check(made.repeat_interleave(times), [row for row in rows for _ in range(times)], made.tail)
    each = data.draw(st.lists(st.integers(0, 3), min_size=len(rows), max_size=len(rows)))
    check(made.repeat_interleave(each), [row for row, n in zip(rows, each) for _ in range(n)], made.tail)
    assert all(part.storage is made.storage for part in (made[index], made[mask], made.repeat(times)))


@SETTINGS
@given(st.data())
def test_parts_join(data: st.DataObject) -> None:
    tail = data.draw(TAILS)
    pairs = data.draw(st.lists(oracles(tail), min_size=1, max_size=4))
    cut = [data.draw(st.slices(7)) for _ in pairs]
    pairs += [(made[index], rows[index]) for (made, rows), index in zip(pairs, cut)]  # parts that share a storage
    order = data.draw(st.permutations(range(len(pairs))))
    joined = RaggedTensor.concat([pairs[number][0] for number in order])
    check(joined, [row for number in order for row in pairs[number][1]], torch.Size(tail))
    storages = {id(made.storage): len(made.storage) for made, _ in pairs}
    assert len(storages) == 1 or len(joined.storage) <= sum(storages.values())


@SETTINGS
@given(oracles(), st.sampled_from(["left", "right"]))
def test_other_forms_and_back(pair: tuple[RaggedTensor, Rows], side: str) -> None:
    made, rows = pair
    padded, mask = made.to_padded(side, 7), made.mask(side)  # type: ignore[arg-type]
    longest = max(map(len, rows), default=0)
    assert padded.shape == (len(rows), longest, *made.tail)
    for line, kept, row in zip(padded, mask, rows):
        blank = torch.full((longest - len(row), *made.tail), 7.0)
        assert torch.equal(line, torch.cat([blank, row] if side == "left" else [row, blank]))
        assert kept.tolist() == ([False] * len(blank) + [True] * len(row))[:: 1 if side == "left" else -1]
    check(RaggedTensor(padded[mask], mask.sum(1)), rows, made.tail)
    check(made.distinct(), rows, made.tail)
    check(copy.deepcopy(made), rows, made.tail)
    check(pickle.loads(pickle.dumps(made)), rows, made.tail)
    assert len(made.distinct().storage) <= len(made.storage)
    if rows:
        check(RaggedTensor.from_list(rows), rows, made.tail)
    if made.values.numel() or made.tail == ():
        check(RaggedTensor.from_nested(made.to_nested()), rows, made.tail)


@SETTINGS
@given(oracles(), st.data())
def test_as_a_column(pair: tuple[RaggedTensor, Rows], data: st.DataObject) -> None:
    made, rows = pair
    batch = DataProto.from_dict({"r": made, "n": torch.arange(len(rows))})
    index = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=9)) if rows else []
    chosen = batch[index]
    check(chosen["r"], [rows[row] for row in chosen["n"].tolist()], made.tail)
    size = data.draw(st.integers(1, 4))
    parts = batch.split(size)
    for part in parts:
        check(part["r"], [rows[row] for row in part["n"].tolist()], made.tail)
    if parts:
        whole = DataProto.concat(parts)
        check(whole["r"], rows, made.tail)
        assert whole["r"].storage is made.storage
    back = pickle.loads(pickle.dumps(DataProto.concat([chosen, batch])))
    check(back["r"], [rows[row] for row in back["n"].tolist()], made.tail)

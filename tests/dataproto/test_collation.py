"""Token lists to columns and bins, against loops over tokens."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dataproto import DataProto, RaggedTensor
from dataproto.collation import BinLayout, collate_supervised, pack_supervised, ragged_rows
from dataproto.errors import InvalidColumn, InvalidRow, RowCountMismatch
from dataproto.planning import first_fit_decreasing
from rollout.engine import Completion
from rollout.responses import collate_responses

tokens = st.lists(st.integers(0, 2**40), max_size=12)


@st.composite
def supervised_rows(draw):
    """Token ids, loss masks and token types."""
    ids = draw(st.lists(tokens, max_size=8))
    masks = [draw(st.lists(st.integers(0, 1), min_size=len(row), max_size=len(row))) for row in ids]
    types = [draw(st.lists(st.integers(0, 2), min_size=len(row), max_size=len(row))) for row in ids]
    return ids, masks, types


@given(st.lists(tokens, max_size=6))
def test_rollouts_equal_a_loop_over_tokens(rows):
    log_probs = [[-0.25 * (place + 1) for place in range(len(row))] for row in rows]
    done = [Completion(*each, "stop") for each in zip(range(len(rows)), rows, log_probs, strict=True)]
    ids, mask, floats = collate_responses(done, 12, pad_token_id=7)
    for row in range(len(rows)):
        for place in range(12):
            inside = place < len(rows[row])
            assert ids[row, place] == (rows[row][place] if inside else 7)
            assert mask[row, place] == inside
            assert floats[row, place] == (log_probs[row][place] if inside else 0)
    assert (ids.dtype, mask.dtype, floats.dtype) == (torch.int64, torch.int64, torch.float32)
    assert ids.shape == mask.shape == floats.shape == (len(rows), 12)


def test_completions_that_do_not_fit_are_named():
    good = Completion(0, [5], [-1.0], "stop")
    with pytest.raises(InvalidRow, match="row 1: 3 tokens do not fit into 2"):
        collate_responses([good, Completion(1, [5, 6, 7], [-1.0] * 3, "length")], 2, 0)
    with pytest.raises(InvalidRow, match="row 1: 2 tokens, but 1 log-probs"):
        collate_responses([good, Completion(1, [5, 6], [-1.0], "stop")], 2, 0)
    with pytest.raises(InvalidRow, match=r"row 1: log-probs are torch\.float32, one a token"):
        collate_responses([good, Completion(1, [5], [None], "stop")], 2, 0)


@given(supervised_rows(), st.booleans())
def test_supervised_columns_equal_a_loop_over_tokens(rows, masked):
    ids, masks, types = rows
    data = collate_supervised(ids, masks if masked else None, types, pad_token_id=9)
    length = max(map(len, ids), default=0)
    expected = {name: [] for name in data.names()}
    for row, mask, kinds in zip(ids, masks if masked else [[1] * len(row) for row in ids], types, strict=True):
        for values in expected.values():
            values.append([])
        for place in range(length):
            inside = place < len(row)
            expected["input_ids"][-1].append(row[place] if inside else 9)
            expected["attention_mask"][-1].append(int(inside))
            expected["position_ids"][-1].append(place if inside else 0)
            expected["mm_token_type_ids"][-1].append(kinds[place] if inside else 0)
            if place > 0:
                expected["response_mask"][-1].append(mask[place] if inside else 0)
    assert {name: data[name].tolist() for name in data.names()} == expected
    assert len(data) == len(ids)


def test_supervised_rows_of_any_kind_make_the_same_columns():
    ids, masks = [[5, 6, 7], [], [8, 9]], [[0, 1, 1], [], [1, 1]]
    lists = collate_supervised(ids, masks, pad_token_id=0, width=4)
    arrays = collate_supervised(
        [np.array(row, dtype=np.int32) for row in ids],
        [np.array(row, dtype=bool) for row in masks],
        pad_token_id=0,
        width=4,
    )
    ragged = RaggedTensor(torch.tensor([5, 6, 7, 8, 9]), [3, 0, 2])
    weights = RaggedTensor(torch.tensor([0, 1, 1, 1, 1]), [3, 0, 2])
    tensors = collate_supervised(
        [torch.tensor(row, dtype=torch.int64) for row in ids], weights, pad_token_id=0, width=4
    )
    for other in (arrays, tensors, collate_supervised(ragged, weights, pad_token_id=0, width=4)):
        assert all(other[name].equal(lists[name]) for name in lists.names())
    assert lists["input_ids"].tolist() == [[5, 6, 7, 0], [0, 0, 0, 0], [8, 9, 0, 0]]
    assert lists["response_mask"].tolist() == [[1, 1, 0], [0, 0, 0], [1, 0, 0]]


@pytest.mark.parametrize(
    "wrong", [[1.5], [None], ["5"], [[5]], [2**63], np.array([0.5]), np.array([[5]]), torch.ones(1)]
)
def test_a_row_that_holds_no_token_ids_is_named(wrong):
    with pytest.raises(InvalidRow, match=r"row 1: input_ids are torch\.int64, one a token") as caught:
        collate_supervised([[5], wrong], pad_token_id=0)
    assert caught.value.index == 1


def test_rows_that_do_not_go_together_are_refused():
    with pytest.raises(InvalidRow, match="row 1: 2 input_ids, but 1 of loss_mask"):
        collate_supervised([[5], [6, 7]], [[1], [1]], pad_token_id=0)
    with pytest.raises(RowCountMismatch, match="2 rows of input_ids, but 1 of loss_mask"):
        pack_supervised([[5], [6]], [[1]], capacity=4, pad_token_id=0)
    with pytest.raises(InvalidColumn, match=r"input_ids are torch\.int64"):
        collate_supervised(RaggedTensor(torch.ones(2), [2]), pad_token_id=0)
    with pytest.raises(InvalidRow, match="row 0: 2 tokens do not fit into 1"):
        collate_supervised([[5, 6]], pad_token_id=0, width=1)


@pytest.mark.parametrize("mask", [[0, 2], RaggedTensor(torch.tensor([0, 1, 0, 256]), [2, 2])[1:]])
def test_masks_hold_nothing_but_0_and_1(mask):
    masks = mask if isinstance(mask, RaggedTensor) else [mask]
    for collate in (collate_supervised, lambda *rows, **pad: pack_supervised(*rows, capacity=4, **pad)):
        with pytest.raises(InvalidRow, match="row 0: loss_mask are numbers from 0 to 1, not"):
            collate([[5, 6]], masks, pad_token_id=0)
    good = RaggedTensor(torch.tensor([0, 9, 0, 1]), [2, 2])[1:]
    assert collate_supervised([[5, 6]], good, pad_token_id=0)["response_mask"].tolist() == [[1]]
    with pytest.raises(InvalidRow, match="row 1: token_types are numbers from 0 to 2, not"):
        collate_supervised([[5], [6]], None, [[2], [3]], pad_token_id=0)


# Bins


@given(supervised_rows(), st.integers(12, 30), st.sampled_from([1, 2, 4]), st.booleans())
def test_packed_rows_equal_a_loop_over_tokens(rows, capacity, align, masked):
    ids, masks, _ = rows
    bins = first_fit_decreasing([len(row) for row in ids], capacity, align)
    data = pack_supervised(ids, masks if masked else None, capacity=capacity, pad_token_id=9, align=align)
    assert len(data) == len(bins)
    for number, chosen in enumerate(bins):
        tokens, positions, labels, bounds = [], [], [], [0]
        for row in chosen:
            for place, token in enumerate(ids[row]):
                learnt = place + 1 < len(ids[row]) and (not masked or masks[row][place + 1])
                tokens.append(token)
                positions.append(place)
                labels.append(ids[row][place + 1] if learnt else -100)
            while len(tokens) % align:
                tokens.append(9)
                positions.append(positions[-1] + 1)
                labels.append(-100)
            bounds.append(len(tokens))
        if len(tokens) < capacity:
            bounds.append(capacity)
            positions.extend(range(capacity - len(tokens)))
        rest = capacity - len(tokens)
        assert data["input_ids"][number].tolist() == tokens + [9] * rest
        assert data["position_ids"][number].tolist() == positions
        assert data["shift_labels"][number].tolist() == labels + [-100] * rest
        assert data["cu_seqlens"][number].tolist() == bounds
    assert data["cu_seqlens"].dtype == torch.int32


@given(st.lists(st.integers(0, 9), max_size=10), st.randoms(), st.sampled_from([1, 4]))
def test_rows_come_back_out_of_their_bins(lengths, random, align):
    """Of any storage, with a tail, in bins of any order."""
    rows = RaggedTensor(torch.arange(sum(lengths) * 2).view(-1, 2), lengths)[::-1][::-1]
    bins = [random.sample(part.tolist(), len(part)) for part in first_fit_decreasing(lengths, 16, align)]
    layout = BinLayout.of(lengths, [np.array(part, dtype=np.int64) for part in bins], 16, align)
    grid = layout.place(rows, -1)
    assert grid.shape == (len(bins), 16, 2)
    assert layout.take(grid) == rows
    assert int((grid[..., 0] == -1).sum()) == len(bins) * 16 - sum(lengths)


def test_bins_without_rows_are_all_padding():
    none = RaggedTensor(torch.arange(3), [3])[:0]
    layout = BinLayout.of([], [np.array([], dtype=np.int64)], 4)
    assert layout.place(none, 7).tolist() == [[7, 7, 7, 7]]
    assert len(layout.take(layout.place(none, 7))) == 0
    assert len(pack_supervised([], capacity=4, pad_token_id=0)) == 0
    assert pack_supervised([[], []], capacity=2, pad_token_id=3)["input_ids"].tolist() == [[3, 3]]


def test_gradients_flow_into_bins_and_out():
    values = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    layout = BinLayout.of([2, 1], [np.array([1, 0])], capacity=5)
    grid = layout.place(RaggedTensor(values, [2, 1]), 0)
    assert grid.tolist() == [[3.0, 1.0, 2.0, 0.0, 0.0]]
    (layout.take(grid).values * torch.tensor([2.0, 3.0, 5.0])).sum().backward()
    assert values.grad.tolist() == [2.0, 3.0, 5.0]


def test_bins_that_lose_repeat_or_overfill_are_refused():
    with pytest.raises(InvalidColumn, match=r"each of 2 rows once, not \[0, 0\]"):
        BinLayout.of([1, 1], [np.array([0, 0])], 4)
    with pytest.raises(InvalidColumn, match="bin 1 holds 8 tokens, more than 7"):
        BinLayout.of([1, 3, 3], [np.array([0]), np.array([1, 2])], 7, align=4)
    layout = BinLayout.of([1, 2], [np.array([0, 1])], 4)
    with pytest.raises(InvalidColumn, match="are not the rows of this layout"):
        layout.place(ragged_rows([[1, 2], [3]]), 0)
    with pytest.raises(InvalidRow, match="row 1: 5 tokens do not fit into a bin of 4"):
        pack_supervised([[1], [2] * 5], capacity=4, pad_token_id=0)


def test_a_packed_batch_travels_as_any_other():
    data = pack_supervised([[5, 6], [7], [8, 9, 1]], capacity=3, pad_token_id=0)
    assert isinstance(data, DataProto)
    assert DataProto.concat(data.split(1))["cu_seqlens"] == data["cu_seqlens"]
    assert data[1:]["input_ids"].tolist() == [[5, 6, 7]]

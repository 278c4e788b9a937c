"""Token lists to columns, against loops over tokens."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dataproto import RaggedTensor
from dataproto.collation import collate_supervised
from dataproto.errors import InvalidColumn, InvalidRow, RowCountMismatch
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
        collate_supervised([[5], [6]], [[1]], pad_token_id=0)
    with pytest.raises(InvalidColumn, match=r"input_ids are torch\.int64"):
        collate_supervised(RaggedTensor(torch.ones(2), [2]), pad_token_id=0)
    with pytest.raises(InvalidRow, match="row 0: 2 tokens do not fit into 1"):
        collate_supervised([[5, 6]], pad_token_id=0, width=1)


@pytest.mark.parametrize("mask", [[0, 2], RaggedTensor(torch.tensor([0, 1, 0, 256]), [2, 2])[1:]])
def test_masks_hold_nothing_but_0_and_1(mask):
    masks = mask if isinstance(mask, RaggedTensor) else [mask]
    with pytest.raises(InvalidRow, match="row 0: loss_mask are numbers from 0 to 1, not"):
        collate_supervised([[5, 6]], masks, pad_token_id=0)
    good = RaggedTensor(torch.tensor([0, 9, 0, 1]), [2, 2])[1:]
    assert collate_supervised([[5, 6]], good, pad_token_id=0)["response_mask"].tolist() == [[1]]
    with pytest.raises(InvalidRow, match="row 1: token_types are numbers from 0 to 3, not"):
        collate_supervised([[5], [6]], None, [[3], [4]], pad_token_id=0)

"""Packing and cutting, against naive loops."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dataproto.batching import cut_minibatches, pack_rows, prompt_sharing, split_by_tokens, unpack_cells
from dataproto.errors import InvalidColumn, InvalidConfig


@st.composite
def padded_batches(draw):
    """Rows with a left-padded prompt of 1 to 4 tokens and a right-padded response of 0 to 4, some response tokens masked."""
    rows = draw(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 4)), min_size=1, max_size=5))
    mask = torch.zeros(len(rows), 8, dtype=torch.int64)
    response_mask = torch.zeros(len(rows), 4, dtype=torch.int64)
    for row, (prompt, response) in enumerate(rows):
        mask[row, 4 - prompt : 4 + response] = 1
        response_mask[row, :response] = torch.tensor(
            draw(st.lists(st.integers(0, 1), min_size=response, max_size=response)), dtype=torch.int64
        )
    ids = torch.arange(len(rows) * 8).view(len(rows), 8) + 100
    return ids, mask, response_mask


@given(padded_batches())
def test_packing_equals_a_loop_over_rows_and_tokens(batch):
    ids, mask, response_mask = batch
    positions = torch.stack([ids * 10 + axis for axis in range(4)], dim=1)
    packed = pack_rows(ids, mask, positions, response_mask, token_types=(ids % 3).to(torch.int8))

    tokens, predictors, targets, cells, bounds = [], [], [], [], [0]
    for row in range(len(ids)):
        for column in range(8):
            if mask[row, column]:
                if column >= 4 and response_mask[row, column - 4]:
                    predictors.append(len(tokens) - 1)
                    targets.append(int(ids[row, column]))
                    cells.append(row * 4 + column - 4)
                tokens.append(int(ids[row, column]))
        bounds.append(len(tokens))
    assert packed.input_ids.tolist() == [tokens]
    assert packed.cu_seqlens.tolist() == bounds
    assert packed.max_length == max(np.diff(bounds))
    assert packed.predictors.tolist() == predictors
    assert packed.targets.tolist() == targets
    assert packed.response_cells.tolist() == cells
    assert packed.position_ids[:, 0].tolist() == [[token * 10 + axis for token in tokens] for axis in range(4)]
    assert packed.token_types.tolist() == [[token % 3 for token in tokens]]


def test_a_shared_prompt_is_packed_once_and_its_keys_are_seen_by_all():
    ids = torch.tensor([[0, 5, 6, 7, 0], [0, 5, 6, 8, 9], [3, 4, 4, 1, 0]])
    mask = torch.tensor([[0, 1, 1, 1, 0], [0, 1, 1, 1, 1], [1, 1, 1, 1, 0]])
    shared = prompt_sharing(ids, mask, ids, 0 * ids, [{}, {}, {}], response_width=2)
    packed = pack_rows(ids, mask, mask.cumsum(1) - 1, mask[:, 3:], shares_prompt=shared)
    assert shared.tolist() == [False, True, False]
    assert packed.input_ids.tolist() == [[5, 6, 7, 8, 9, 3, 4, 4, 1]]
    assert packed.position_ids.tolist() == [[0, 1, 2, 2, 3, 0, 1, 2, 3]]
    assert packed.cu_seqlens.tolist() == [0, 3, 5, 9]
    assert packed.key_index.tolist() == [0, 1, 2, 0, 1, 3, 4, 5, 6, 7, 8]
    assert packed.key_cu_seqlens.tolist() == [0, 3, 7, 11]
    assert packed.targets.tolist() == [7, 8, 9, 1]
    assert packed.predictors.tolist() == [1, 1, 3, 7]


def test_prompts_with_other_media_or_media_in_the_response_are_not_shared():
    ids = torch.ones(4, 3, dtype=torch.int64)
    one, other = torch.zeros(1), torch.zeros(1)
    media = [{"pixel_values": one}, {"pixel_values": one}, {"pixel_values": other}, {"pixel_values": other}]
    types = torch.tensor([[1, 0, 0], [1, 0, 0], [1, 0, 0], [1, 0, 1]])
    assert prompt_sharing(ids, ids, ids, types, media, response_width=1).tolist() == [False, True, False, False]


def test_supervised_rows_have_responses_from_the_second_token_on():
    ids = torch.tensor([[5, 6, 7, 0]])
    packed = pack_rows(ids, torch.tensor([[1, 1, 1, 0]]), torch.tensor([[0, 1, 2, 0]]), torch.tensor([[0, 1, 0]]))
    assert packed.predictors.tolist() == [1]
    assert packed.targets.tolist() == [7]


def test_an_empty_row_and_a_response_in_the_padding_are_named():
    ids = torch.ones(2, 3, dtype=torch.int64)
    with pytest.raises(InvalidColumn, match="row 1 has no attended token"):
        pack_rows(ids, torch.tensor([[1, 1, 1], [0, 0, 0]]), ids, torch.zeros(2, 1))
    with pytest.raises(InvalidColumn, match="row 1: response_mask"):
        pack_rows(ids, torch.tensor([[1, 1, 1], [1, 1, 0]]), ids, torch.ones(2, 1))
    with pytest.raises(InvalidColumn, match="row 0: response_mask"):  # the first token has nothing before it
        pack_rows(ids, torch.ones(2, 3), ids, torch.ones(2, 3))


def test_unpacking_lets_gradients_through():
    values = torch.tensor([1.0, 2.0], requires_grad=True)
    grid = unpack_cells(values, torch.tensor([1, 2]), (2, 2))
    (grid * torch.tensor([[9.0, 3.0], [5.0, 9.0]])).sum().backward()
    assert values.grad.tolist() == [3.0, 5.0]


@given(st.lists(st.integers(1, 30), max_size=40), st.integers(1, 50))
def test_token_budgets_hold_and_every_row_appears_once_in_order(lengths, budget):
    parts = split_by_tokens(lengths, budget)
    assert [row for part in parts for row in range(part.start, part.stop)] == list(range(len(lengths)))
    for part in parts:
        assert sum(lengths[part]) <= budget or part.stop - part.start == 1
    for part, following in zip(parts, parts[1:], strict=False):  # greedy: the next row would not have fitted
        assert sum(lengths[part]) + lengths[following.start] > budget


@given(st.lists(st.sampled_from("abcdef"), max_size=30), st.integers(1, 4))
def test_minibatches_keep_prompts_whole(groups, prompts):
    parts = cut_minibatches(groups, prompts)
    assert sorted(row for part in parts for row in part) == list(range(len(groups)))
    for part in parts:
        inside = {groups[row] for row in part}
        assert len(inside) <= prompts
        assert all(groups[row] not in inside for row in range(len(groups)) if row not in part)


def test_impossible_sizes_are_refused():
    with pytest.raises(InvalidConfig):
        split_by_tokens([1], 0)
    with pytest.raises(InvalidConfig):
        cut_minibatches(["a"], 0)

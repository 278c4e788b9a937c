"""Packing, against naive loops."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dataproto.errors import InvalidColumn
from dataproto.packing import pack_rows, prompt_sharing, unpack_cells


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


@given(padded_batches(), st.lists(st.integers(1, 3), min_size=5, max_size=5))
def test_each_segment_and_its_keys_are_the_row_that_a_loop_would_pack(batch, samples):
    """Rows repeated as samples of one prompt, with one-dimensional positions."""
    ids, mask, response_mask = batch
    times = torch.tensor(samples[: len(ids)])
    ids, mask, response_mask = (each.repeat_interleave(times, dim=0) for each in batch)
    ids[:, 4:] += torch.arange(len(ids))[:, None] * 1000  # responses differ
    positions = mask.cumsum(1) - 1
    shared = prompt_sharing(ids, mask, positions, 0 * ids, [{}] * len(ids), response_width=4)
    packed = pack_rows(ids, mask, positions, response_mask, shares_prompt=shared)
    keys = torch.arange(packed.input_ids.shape[1]) if packed.key_index is None else packed.key_index

    assert shared.tolist() == [number > 0 for count in samples[: len(batch[0])] for number in range(count)]
    for row in range(len(ids)):
        whole, own = mask[row].bool(), mask[row].bool()
        if shared[row]:
            own = own & (torch.arange(8) >= 4)
        segment = slice(packed.cu_seqlens[row], packed.cu_seqlens[row + 1])
        seen = keys[packed.key_cu_seqlens[row] : packed.key_cu_seqlens[row + 1]]
        assert packed.input_ids[0, segment].tolist() == ids[row, own].tolist()
        assert packed.position_ids[0, segment].tolist() == positions[row, own].tolist()
        assert packed.input_ids[0, seen].tolist() == ids[row, whole].tolist()
    for predictor, target in zip(packed.predictors.tolist(), packed.targets.tolist(), strict=True):
        row, column = (ids == target).nonzero()[0].tolist()
        assert packed.input_ids[0, predictor] == ids[row, column - 1]


@given(padded_batches())
def test_unpacked_targets_are_the_responses(batch):
    ids, mask, response_mask = batch
    packed = pack_rows(ids, mask, mask.cumsum(1) - 1, response_mask)
    assert unpack_cells(packed.targets, packed.response_cells, (len(ids), 4)).equal(ids[:, 4:] * response_mask)


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


def test_prompts_with_other_media_or_unsplit_media_are_not_shared():
    ids = torch.ones(4, 3, dtype=torch.int64)
    one, other = torch.zeros(1), torch.zeros(1)
    media = [{"pixel_values": one}, {"pixel_values": one}, {"pixel_values": other}, None]
    types = torch.tensor([[1, 0, 0], [1, 0, 0], [1, 0, 0], [1, 0, 1]])
    assert prompt_sharing(ids, ids, ids, types, media, response_width=1).tolist() == [False, True, False, False]


def test_supervised_rows_share_no_prompt_though_they_begin_alike():
    ids = torch.tensor([[1, 5, 6, 7], [1, 5, 8, 0]])
    rows = ids, (ids > 0).long(), torch.arange(4).expand(2, 4), 0 * ids, [{}, {}]
    assert not prompt_sharing(*rows, response_width=3).any()
    assert prompt_sharing(*rows, response_width=2).tolist() == [False, True]


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

"""Rollouts whose responses, and prompts, are not equally wide."""

import pytest
import torch

from dataproto import DataProto
from dataproto.collation import ragged_rows
from dataproto.errors import ColumnConflict
from dataproto.packing import equally_wide, token_widths, widen
from dataproto.tensordict_utils import same_value
from dataproto.vlm import family_of
from helpers.batches import prompt_batch
from helpers.tiny_models import EACH_TYPE, tiny_config
from rollout.engine import Completion, SamplingParams
from rollout.responses import attach_responses
from workers.ranks.dispatch_modes import join_rows

PAD = 7


def rollout(config, prompts, lengths, max_tokens=6):
    """Responses of these lengths to a batch of prompts, one each."""
    done = [
        Completion(row, list(range(20, 20 + length)), [-0.5] * length, "length" if length == max_tokens else "stop")
        for row, length in enumerate(lengths)
    ]
    return attach_responses(prompts, done, SamplingParams(max_tokens=max_tokens), family_of(config), pad_token_id=PAD)


@pytest.mark.parametrize("model_type", EACH_TYPE)
def test_parts_are_joined_as_if_they_had_been_generated_together(model_type):
    config = tiny_config(model_type)
    prompts = prompt_batch(config, [[(4, 6)], [], [(6, 6), (4, 4)]], texts=[4, 3, 5])
    prompts["input_ids"] = torch.where(prompts["attention_mask"].bool(), prompts["input_ids"], PAD)
    whole = rollout(config, prompts, [2, 1, 5])
    assert token_widths(whole) == (prompts["input_ids"].shape[1], 5)
    parts = [rollout(config, prompts[:2], [2, 1]), rollout(config, prompts[2:], [5])]
    assert [token_widths(part)[1] for part in parts] == [2, 5]
    joined = DataProto.concat(parts)
    assert joined.meta_info == whole.meta_info
    assert joined.names() == whole.names()
    for name, column in whole.batch.items():
        assert torch.equal(joined[name], column), name


def test_prompts_are_padded_on_the_left_and_responses_on_the_right():
    data = DataProto.from_dict(
        {
            "prompts": torch.tensor([[5, 6]]),
            "input_ids": torch.tensor([[5, 6, 8]]),
            "attention_mask": torch.ones(1, 3, dtype=torch.int64),
            "position_ids": torch.tensor([[0, 1, 2]]),
            "response_mask": torch.tensor([[1]]),
            "advantages": torch.tensor([[0.5]]),
            "expert_choices": torch.ones(1, 1, 2),
            "features": torch.ones(1, 4),
            "truncated": torch.tensor([True]),
        },
        meta_info={"pad_token_id": 9},
    )
    wider = widen(data, prompt=3, response=3, others=["expert_choices"])
    assert {name: column.tolist() for name, column in wider.batch.items()} == {
        "prompts": [[9, 5, 6]],
        "input_ids": [[9, 5, 6, 8, 9, 9]],
        "attention_mask": [[0, 1, 1, 1, 0, 0]],
        "position_ids": [[0, 0, 1, 2, 3, 4]],
        "response_mask": [[1, 0, 0]],
        "advantages": [[0.5, 0, 0]],
        "expert_choices": [[[1, 1], [0, 0], [0, 0]]],
        "features": [[1, 1, 1, 1]],
        "truncated": [True],
    }
    assert widen(data, prompt=2, response=1) is data
    assert [token_widths(part) for part in equally_wide([data, wider])] == [(3, 3), (3, 3)]
    with pytest.raises(ColumnConflict, match="cannot be joined"):  # nothing says that these are rollouts
        DataProto.concat([data, wider])
    assert token_widths(data) == (2, 1)


def test_short_answers_take_few_bytes_however_long_they_could_have_been():
    config = tiny_config("qwen2_5_vl")
    prompts = prompt_batch(config, [[]] * 64, texts=[3] * 64)
    data = rollout(config, prompts, [2] * 64, max_tokens=32768)
    bytes_of_row = sum(column[0].nbytes for column in data.batch.values())
    assert data["responses"].shape == (64, 2)
    assert bytes_of_row < 500  # 2.2 MiB where each row is padded to 32,768
    assert data.meta_info["max_tokens"] == 32768


def test_responses_without_any_token_keep_a_column():
    config = tiny_config("qwen2_5_vl")
    data = rollout(config, prompt_batch(config, [[]], texts=[3]), [0])
    assert data["responses"].shape == (1, 1)
    assert data["response_mask"].tolist() == [[0]]


@pytest.mark.parametrize(
    "columns",
    [
        {"tensors": {"responses": torch.tensor([1, 2])}},
        {"non_tensors": {"responses": ["yes", "no"]}},
        {"non_tensors": {"input_ids": [[1], [1, 2]], "response_mask": [[1], [1, 1]]}},
        {"non_tensors": {"input_ids": ragged_rows([[1], [1, 2]]), "responses": ragged_rows([[1], []])}},
        {"tensors": {"input_ids": torch.ones(2, 3), "responses": torch.ones(2)}},
    ],
    ids=["flat", "strings", "lists", "ragged", "mixed"],
)
@pytest.mark.parametrize("facts", [{}, {"max_tokens": 8}], ids=["any rows", "rollouts"])
def test_columns_that_are_no_dense_tokens_are_joined_as_they_are(columns, facts):
    data = DataProto.from_dict(**columns, meta_info=facts)
    for join in (DataProto.concat, join_rows):
        joined = join([data, data[:1]])
        assert len(joined) == 3
        assert all(same_value(joined[name], data[[0, 1, 0]][name]) for name in data.names())


def part_of(prompt, response, **more):
    """One row of a rollout of these widths."""
    tensors = {"input_ids": torch.ones(1, prompt + response), "responses": torch.ones(1, response), **more}
    return DataProto.from_dict(tensors, meta_info={"max_tokens": 8})


def test_another_column_belongs_to_responses_only_where_it_is_as_wide_in_every_part():
    boxes = DataProto.concat([part_of(2, response, box=torch.ones(1, 4)) for response in (4, 5, 2)])
    assert boxes["box"].shape == (3, 4)
    choices = DataProto.concat([part_of(2, response, choice=torch.ones(1, response)) for response in (4, 5, 2)])
    assert choices["choice"].sum(1).tolist() == [4, 5, 2]


@pytest.mark.parametrize("name", ["input_ids", "position_ids"])
def test_columns_of_prompt_and_response_are_not_padded_where_nothing_tells_responses_apart(name):
    parts = [part_of(2, response, position_ids=torch.ones(1, 2 + response)) for response in (1, 3)]
    assert DataProto.concat([part.select(["responses"]) for part in parts])["responses"].tolist()[0] == [1, 0, 0]
    with pytest.raises(ColumnConflict, match=f"'{name}' cannot be joined: shapes"):
        DataProto.concat([part.select([name]) for part in parts])


def test_rollouts_that_could_have_become_differently_long_are_joined():
    parts = [part_of(2, 3), part_of(3, 1)]
    parts[1].meta_info["max_tokens"] = 32
    for ordered in (parts, parts[::-1]):
        joined = DataProto.concat(ordered)
        assert joined.meta_info == {"max_tokens": 32}
        assert joined["responses"].shape == (2, 3)
    parts[1].meta_info["max_tokens"] = "many"
    with pytest.raises(ColumnConflict, match="meta_info key 'max_tokens'"):
        DataProto.concat(parts)

"""`data.validate()`: what the table of columns says of each, and what is wrong in a batch, by name and row."""

import numpy as np
import pytest
import torch
from PIL import Image

from dataproto import DataProto, RaggedTensor, object_array, pad_inert
from dataproto.collation import collate_supervised
from dataproto.errors import InvalidColumn, RowCountMismatch
from helpers.batches import prompt_batch, with_responses
from helpers.tiny_models import EACH_TYPE, tiny_config


def rollout(model_type="qwen2_5_vl"):
    """Rows with two images, none and one; responses of 3, 0 and 2 tokens."""
    config = tiny_config(model_type)
    prompts = prompt_batch(config, [[(4, 4), (4, 8)], [], [(4, 4)]], [5, 9, 4])
    return with_responses(config, prompts, [3, 0, 2], 4)


def mini(**columns):
    """Two rows: prompts of 2 and 1 tokens in 2 columns, responses of 1 and 2 in 3."""
    mask = torch.tensor([[1, 1, 1, 0, 0], [0, 1, 1, 1, 0]])
    ids = torch.tensor([[5, 6, 7, 0, 0], [0, 6, 8, 9, 0]])
    everything = {
        "prompts": ids[:, :2],
        "responses": ids[:, 2:],
        "input_ids": ids,
        "attention_mask": mask,
        "position_ids": mask.cumsum(1) - 1,
        "response_mask": mask[:, 2:],
        "advantages": torch.zeros(2, 3),
        "uid": ["a", "b"],
    } | columns
    tensors = {name: each for name, each in everything.items() if isinstance(each, torch.Tensor)}
    arrays = {name: each for name, each in everything.items() if isinstance(each, list | np.ndarray)}
    return DataProto.from_dict(tensors, arrays)


@pytest.mark.parametrize("model_type", EACH_TYPE)
def test_rollouts_prompts_and_their_parts_are_valid(model_type):
    data = rollout(model_type)
    parts = [data, data[1:], data.repeat(2), pad_inert(data, 2), data[:0]]
    parts += [data.select(names) for names in (["input_ids", "attention_mask"], ["attention_mask", "response_mask"])]
    parts.append(prompt_batch(tiny_config(model_type), [[(4, 4)], []], [3, 6]))
    assert [part.validate() for part in parts] == [None] * len(parts)


def test_supervised_rows_and_unknown_columns_are_valid():
    assert collate_supervised([[5, 6, 7], [8]], pad_token_id=0).validate() is None
    assert mini(mine=torch.ones(2, 9), others=["x", 3]).validate() is None
    assert DataProto().validate() is None


WRONG = [
    # dtypes and shapes
    ({"advantages": torch.zeros(2, 3).double()}, r"'advantages': expected float32 \(B, R\), found float64 \(2, 3\)"),
    ({"attention_mask": torch.ones(2, 5).bool()}, r"'attention_mask': expected int64 \(B, L\), found bool \(2, 5\)"),
    (
        {"position_ids": torch.zeros(2, 3, 5).long()},
        r"'position_ids': expected int64 \(B, 4, L\) or \(B, L\), found int64",
    ),
    ({"position_ids": torch.zeros(2, 4, 4).long()}, r"\(B, L\) with L = 5 as in 'input_ids', found int64 \(2, 4, 4\)"),
    ({"advantages": torch.zeros(2, 4)}, r"'advantages': .* with R = 3 as in 'responses', found float32 \(2, 4\)"),
    ({"advantages": torch.zeros(2, 3, 1)}, r"'advantages': expected float32 \(B, R\), found float32 \(2, 3, 1\)"),
    ({"uid": torch.zeros(2)}, r"'uid': expected an array of objects, found float32 \(2,\)"),
    (
        {"responses": None, "advantages": np.zeros((2, 3))},
        r"'advantages': expected .*, found an array of float64 \(2, 3\)",
    ),
    (
        {"prompts": torch.zeros(2, 3).long()},
        r"'input_ids': expected L = P \+ R = 3 \+ 3 tokens as in 'prompts' and 'responses'",
    ),
    # values
    (
        {"attention_mask": torch.tensor([[1, 1, 1, 0, 0], [0, 1, 1, 3, 0]])},
        "'attention_mask', row 1: expected only 0, 1, found 3",
    ),
    ({"multi_modal_inputs": [{}, None]}, "'multi_modal_inputs', row 1: expected a dict, found a NoneType"),
    # padding
    (
        {"attention_mask": torch.tensor([[1, 1, 1, 0, 0], [0, 1, 0, 1, 0]])},
        "'attention_mask', row 1: expected tokens next to",
    ),
    (
        {"attention_mask": torch.tensor([[1, 0, 0, 0, 0], [0, 1, 1, 1, 0]])},
        "row 0: expected a prompt padded on the left",
    ),
    (
        {"attention_mask": torch.tensor([[1, 1, 1, 0, 0], [0, 0, 0, 1, 1]])},
        "row 1: expected a response padded on the right",
    ),
    (
        {"response_mask": torch.tensor([[1, 0, 0], [1, 1, 1]])},
        "'response_mask', row 1: expected 1 only where attention_mask is 1",
    ),
    # tokens
    (
        {"responses": torch.tensor([[7, 0, 0], [8, 8, 0]])},
        "'responses', row 1: expected the last tokens of 'input_ids'",
    ),
    ({"prompts": torch.tensor([[4, 6], [0, 6]])}, "'prompts', row 0: expected the first tokens of 'input_ids'"),
    (
        {"mm_token_type_ids": torch.tensor([[1, 0, 0, 0, 0], [1, 0, 0, 0, 0]], dtype=torch.int8)},
        "'mm_token_type_ids', row 1: expected 0 where attention_mask is 0",
    ),
]


@pytest.mark.parametrize(("columns", "message"), WRONG, ids=[message[:40] for _, message in WRONG])
def test_what_is_wrong_is_named(columns, message):
    mini().validate()
    with pytest.raises(InvalidColumn, match=f"column .*{message}"):
        mini(**columns).validate()


def test_a_ragged_column_and_responses_without_a_prompt_are_refused():
    data = mini()
    data["advantages"] = RaggedTensor(torch.zeros(3), [1, 2])
    with pytest.raises(InvalidColumn, match=r"'advantages': expected .* found a RaggedTensor"):
        data.validate()
    with pytest.raises(
        InvalidColumn, match="'response_mask': expected fewer than the 5 tokens of 'attention_mask', found 5"
    ):
        DataProto.from_dict(
            {"attention_mask": torch.ones(1, 5).long(), "response_mask": torch.ones(1, 5).long()}
        ).validate()
    broken = mini()
    broken.non_tensor_batch["uid"] = np.array(["a"])
    with pytest.raises(RowCountMismatch):
        broken.validate()


def changed_media(row, **change):
    """A rollout whose ``row`` has other media; ``None`` takes a key away."""
    data = rollout()
    media = list(data["multi_modal_inputs"])
    media[row] = {name: each for name, each in (media[row] | change).items() if each is not None}
    data["multi_modal_inputs"] = object_array(media)
    return data


def test_media_that_disagree_with_their_tokens_are_named():
    patches = rollout()["multi_modal_inputs"][0]
    with pytest.raises(InvalidColumn, match="row 2: expected 16 patches for 4 image tokens, 4 each, found 48"):
        changed_media(2, **patches).validate()
    with pytest.raises(InvalidColumn, match="row 1: expected images for 0 tokens, found some"):
        changed_media(1, **patches).validate()
    with pytest.raises(InvalidColumn, match="row 2: expected images for 4 tokens, found none"):
        changed_media(2, pixel_values=None, image_grid_thw=None).validate()
    with pytest.raises(InvalidColumn, match="row 0: expected 48 patches as in image_grid_thw, found 47"):
        changed_media(0, pixel_values=patches["pixel_values"][1:]).validate()
    with pytest.raises(InvalidColumn, match="row 0: expected images for 12 tokens, found none"):
        changed_media(0, pixel_values=None).validate()
    changed_media(0, image_grid_thw=None).validate()  # models without grids
    absent = changed_media(2)
    absent["multi_modal_inputs"][2] = {"pixel_values": None, "image_grid_thw": None}
    with pytest.raises(InvalidColumn, match="row 2: expected images for 4 tokens, found none"):
        absent.validate()
    absent = changed_media(1)
    absent["multi_modal_inputs"][1] = {"pixel_values": None}
    absent.validate()


def test_as_many_images_for_the_engine_as_for_the_models():
    data, picture = rollout(), Image.new("L", (8, 8))
    data["multi_modal_data"] = object_array([{"image": [picture] * 2}, {}, {"image": [picture]}])
    data.validate()
    data["multi_modal_data"] = object_array([{"image": [picture] * 2}, {}, {"image": []}])
    with pytest.raises(
        InvalidColumn, match="'multi_modal_inputs', row 2: expected 0 images as in 'multi_modal_data', found 1"
    ):
        data.validate()
    data["multi_modal_data"] = object_array([{"image": [picture] * 2}, {"video": None}, {"image": None}])
    data.validate()  # not known

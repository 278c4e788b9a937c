"""Rows that make the number of rows divide."""

import numpy as np
import pytest
import torch
from PIL import Image

from dataproto import DataProto, pad_dataproto_to_divisor, pad_inert, unpad_dataproto, unpad_inert
from dataproto.errors import IndivisibleBatch, InvalidIndex


def batch(rows: int = 3) -> DataProto:
    image = Image.new("RGB", (2, 2))
    return DataProto.from_dict(
        {
            "input_ids": torch.arange(2 * rows).view(rows, 2) + 5,
            "attention_mask": torch.ones(rows, 2, dtype=torch.int64),
            "response_mask": torch.ones(rows, 1, dtype=torch.int64),
            "advantages": torch.full((rows, 1), 2.0),
        },
        {
            "uid": [f"p{row}" for row in range(rows)],
            "multi_modal_data": [{"image": [image]} for _ in range(rows)],
            "multi_modal_inputs": [{"pixel_values": torch.ones(4, 3)} for _ in range(rows)],
            "raw_prompt_ids": [[1] * (row + 1) for row in range(rows)],
            "reward_model": [{"style": "rule", "ground_truth": str(row)} for row in range(rows)],
            "length": np.arange(rows),
        },
        {"metrics": {"loss": 1.0}},
    )


@pytest.mark.parametrize(
    ("divisor", "rows"), [(2, [0, 1, 2, 0]), (3, [0, 1, 2]), (7, [0, 1, 2, 0, 1, 2, 0]), (1, [0, 1, 2])]
)
def test_padding_repeats_rows_from_the_front(divisor: int, rows: list[int]) -> None:
    data = batch()
    padded, added = pad_dataproto_to_divisor(data, divisor)
    assert added == len(rows) - 3
    assert padded["uid"].tolist() == [f"p{row}" for row in rows]
    assert padded["length"].tolist() == rows
    assert padded["input_ids"][:, 0].tolist() == [2 * row + 5 for row in rows]
    assert padded.meta_info == {"metrics": {"loss": 1.0}}
    assert unpad_dataproto(padded, added)["uid"].tolist() == ["p0", "p1", "p2"]
    assert len(data) == 3


def test_nothing_to_add_or_take_is_the_batch_itself() -> None:
    data = batch()
    assert pad_dataproto_to_divisor(data, 3) == (data, 0)
    assert unpad_dataproto(data, 0) is data
    assert pad_inert(data, 0) is data


def test_an_empty_batch_stays_empty(caplog: pytest.LogCaptureFixture) -> None:
    padded, added = pad_dataproto_to_divisor(batch()[:0], 4)
    assert (len(padded), added) == (0, 0)
    assert "without rows" in caplog.text


def test_impossible_numbers_are_refused() -> None:
    with pytest.raises(IndivisibleBatch):
        pad_dataproto_to_divisor(batch(), 0)
    for rows in (-1, 4):
        with pytest.raises(InvalidIndex, match="off a batch of 3 rows"):
            unpad_dataproto(batch(), rows)
    with pytest.raises(InvalidIndex):
        pad_inert(batch(), -1)


def test_inert_rows_change_nothing() -> None:
    padded = pad_inert(batch(), 2)
    assert len(padded) == 5
    for name in ("input_ids", "attention_mask", "response_mask", "advantages", "length"):
        assert not padded[name][3:].any()
        assert (padded[name][:3] == batch()[name]).all()
    assert padded["multi_modal_data"][3:].tolist() == padded["multi_modal_inputs"][3:].tolist() == [{}, {}]
    assert padded["raw_prompt_ids"][3:].tolist() == [[], []]
    assert len(set(padded["uid"])) == 5
    assert padded["reward_model"][4] == {"style": "rule", "ground_truth": "2"}
    total = (padded["advantages"] * padded["response_mask"]).sum() / padded["response_mask"].sum()
    assert total == 2.0


def test_inert_rows_share_no_objects() -> None:
    padded = pad_inert(batch(), 2)
    padded["multi_modal_data"][3]["image"] = []
    assert padded["multi_modal_data"][4] == {}
    assert pad_inert(batch(), 1)["multi_modal_data"][3] == {}


def test_inert_rows_come_off_again() -> None:
    data = batch()
    back = unpad_inert(pad_inert(data, 4), 4)
    assert back["uid"].tolist() == data["uid"].tolist()
    assert torch.equal(back["input_ids"], data["input_ids"])
    assert all(one is other for one, other in zip(back["multi_modal_data"], data["multi_modal_data"]))


def test_an_empty_batch_can_be_filled_with_inert_rows() -> None:
    padded = pad_inert(batch()[:0], 2)
    assert padded["input_ids"].tolist() == [[0, 0], [0, 0]]
    assert padded["multi_modal_inputs"].tolist() == [{}, {}]
    assert padded["reward_model"].tolist() == [None, None]

"""Rows that make the number of rows divide."""

import numpy as np
import pytest
import torch
from PIL import Image

from dataproto import DataProto, pad_dataproto_to_divisor, unpad_dataproto
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

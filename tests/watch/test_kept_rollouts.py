"""Rollouts of training on disk: which rows, which fields, pictures once, and what a resumed run does."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

from dataproto import DataProto
from dataproto.errors import FileFormatError, InvalidConfig
from helpers.kept_runs import load_kept, objects, scored_batch
from helpers.tiny_prompts import tiny_tokenizer
from recipes.configs.shared.run_config import check_kept
from recipes.watch.kept_rollouts import KeptRollouts, chosen_rows
from recipes.watch.rollout_files import kept_steps, load_tokens, rows_file


def test_a_kept_row_holds_all_fields(tmp_path):
    data = scored_batch(["Yes", "No!"], [1.0, 0.25], ["a", "a"], width=3)
    KeptRollouts(tmp_path, 8, tiny_tokenizer()).keep(7, data)
    row = load_kept(tmp_path, 7)[1]
    (picture,) = row.pop("images")
    assert Image.open(tmp_path / "rollouts" / "images" / picture).size == (64, 64)
    assert row == {
        "step": 7,
        "uid": "a",
        "sample": 1,
        "source": "",
        "prompt": "Which colour, a?",
        "response": "No!",
        "ground_truth": "red",
        "reward": 0.25,
        "parts": {"acc": 0.0, "format": 1.0},
        "truncated": True,
        "length": 3,
        "mismatch": pytest.approx(0.25 / 3),
    }
    tokens = load_tokens(tmp_path, 7)[1]
    assert "".join(tokens["texts"]) == "No!"
    assert tokens["tokens"] == tiny_tokenizer().encode("No!")
    assert tokens["sampled"] == [1, 1, 1]
    assert tokens["engine_log_probs"] == pytest.approx([-0.1, -0.2, -0.3])
    assert tokens["actor_log_probs"] == pytest.approx([-0.1, 0.05, -0.3])
    assert tokens["advantages"] == pytest.approx([-0.375] * 3)


def test_unknown_numbers_are_null_and_missing_columns_left_out(tmp_path):
    data = scored_batch(["Yes"], [1.0], ["a"])
    data["actor_log_probs"] = torch.full_like(data["rollout_log_probs"], torch.nan)
    KeptRollouts(tmp_path, 8).keep(1, data)
    data.pop(["advantages"], ["multi_modal_data", "score"])
    KeptRollouts(tmp_path, 8).keep(2, data)
    assert load_kept(tmp_path, 1)[0]["mismatch"] is None
    first, second = load_tokens(tmp_path, 1)[0], load_tokens(tmp_path, 2)[0]
    assert set(first["actor_log_probs"]) == {None}
    assert "texts" not in first
    assert "advantages" not in second
    assert (load_kept(tmp_path, 2)[0]["reward"], load_kept(tmp_path, 2)[0]["images"]) == (1.0, [])


def test_tokens_of_an_environment_are_kept_but_not_counted(tmp_path):
    data = scored_batch(["abcd"], [1.0], ["a"])
    data["response_mask"][0, 1] = 0
    KeptRollouts(tmp_path, 8, tiny_tokenizer()).keep(1, data)
    assert load_tokens(tmp_path, 1)[0]["sampled"] == [1, 0, 1, 1]
    assert load_kept(tmp_path, 1)[0]["length"] == 3


def learnt_rows() -> DataProto:
    """Two rows of supervised training: ``Q`` and an image's two places, then a learnt answer; log-probs -1, -2, ..."""
    tokenizer = tiny_tokenizer()
    question, answers = tokenizer.encode("Q"), [tokenizer.encode(text) for text in ("Yes", "No")]
    width = 3 + max(map(len, answers))
    ids = torch.zeros(2, width, dtype=torch.long)
    learnt, attended, types = torch.zeros(2, width - 1), torch.zeros(2, width), torch.zeros(2, width)
    for row, answer in enumerate(answers):
        ids[row, : 3 + len(answer)] = torch.tensor([*question, 0, 0, *answer])
        attended[row, : 3 + len(answer)] = 1
        types[row, 1:3] = 1
        learnt[row, 2 : 2 + len(answer)] = 1
    frames = np.zeros((30, 8, 8, 3), dtype=np.uint8)
    frames[:, 0, 0, 0] = range(30)
    return DataProto.from_dict(
        {
            "input_ids": ids,
            "attention_mask": attended.long(),
            "mm_token_type_ids": types.to(torch.int8),
            "response_mask": learnt.long(),
            "actor_log_probs": -torch.arange(width - 1).float().expand(2, -1) * learnt,
        },
        non_tensors={
            "uid": objects(["a", "b"]),
            "multi_modal_data": objects([{"image": [Image.new("RGB", (8, 8))]}, {"video": [(frames, {})]}]),
        },
    )


def test_rows_to_learn_from_are_kept_with_their_losses(tmp_path):
    KeptRollouts(tmp_path, 8, tiny_tokenizer()).keep(2, learnt_rows())
    row = load_kept(tmp_path, 2)[0]
    length = len(tiny_tokenizer().encode("Yes"))
    assert (row["response"], row["ground_truth"], row["reward"], row["length"]) == ("Yes", "Yes", None, length)
    assert row["parts"] == {"loss": sum(range(2, 2 + length)) / length}  # log-probs -2, -3, ...
    tokens = load_tokens(tmp_path, 2)[0]
    assert tokens["tokens"] == tiny_tokenizer().encode("Yes")  # the first token has no loss, an image's places no text
    assert tokens["actor_log_probs"] == [-float(place) for place in range(2, 2 + length)]
    KeptRollouts(tmp_path, 0).keep(3, learnt_rows())
    assert kept_steps(tmp_path) == [2]


def test_of_a_video_some_frames_are_kept(tmp_path):
    KeptRollouts(tmp_path, 8).keep(1, learnt_rows())
    names = load_kept(tmp_path, 1)[1]["images"]
    pictures = [Image.open(tmp_path / "rollouts" / "images" / name) for name in names]
    assert [picture.getpixel((0, 0))[0] for picture in pictures] == [0, 4, 8, 12, 17, 21, 25, 29]


def test_whole_groups_are_chosen_by_the_step():
    uids = [name for name in "abcdefgh" for _ in range(4)]
    chosen = {tuple(chosen_rows(uids, 11, step)[0]) for step in range(20)}
    assert len(chosen) > 5
    for rows in chosen:
        assert len(rows) == 8
        assert all(row - row % 4 + other in rows for row in rows for other in range(4))
    assert chosen_rows(uids, 11, 3)[0].tolist() == chosen_rows(uids, 11, 3)[0].tolist()
    assert len(chosen_rows(uids, 1000, 0)[0]) == 32


def test_a_picture_is_stored_once_for_all_steps(tmp_path):
    kept = KeptRollouts(tmp_path, 8)
    for step in (1, 2, 3):
        kept.keep(step, scored_batch(["x", "y", "z"], [0, 1, 0], ["a", "a", "b"]))
    assert len(list((tmp_path / "rollouts" / "images").iterdir())) == 2
    assert [row["images"] for row in load_kept(tmp_path, 1)] == [row["images"] for row in load_kept(tmp_path, 3)]


def test_a_resumed_run_drops_later_steps_and_replaces_a_step(tmp_path):
    kept = KeptRollouts(tmp_path, 8)
    for step in (1, 2, 10):
        kept.keep(step, scored_batch(["x"], [0.0], ["a"]))
    kept.drop_after(2)
    kept.keep(2, scored_batch(["x"], [1.0], ["a"]))
    assert kept_steps(tmp_path) == [1, 2]
    assert [row["reward"] for row in load_kept(tmp_path, 2)] == [1.0]
    assert sorted(path.name for path in (tmp_path / "rollouts" / "training").iterdir()) == [
        "step_1.jsonl",
        "step_1.tokens.jsonl.gz",
        "step_2.jsonl",
        "step_2.tokens.jsonl.gz",
    ]


def test_nothing_is_written_for_a_limit_of_0_or_without_rollouts(tmp_path):
    KeptRollouts(tmp_path, 0).keep(1, scored_batch(["x"], [1.0], ["a"]))
    KeptRollouts(tmp_path, 8).keep(1, DataProto.from_dict(non_tensors={"uid": ["a"]}))
    assert list(tmp_path.iterdir()) == []
    assert kept_steps(tmp_path) == []
    for limit in (-1, 1.5):
        with pytest.raises(InvalidConfig, match=f"keep_rollouts={limit}"):
            check_kept("keep_rollouts", limit)


@pytest.mark.parametrize(("limit", "rows"), [(3, 2), (0.5, 4), (0.01, 1), (1, 1), (100, 8)])
def test_a_limit_is_a_number_of_rows_or_a_share_of_them(limit, rows, tmp_path):
    uids = ["a", "a", "b", "b", "c", "c", "d", "d"]
    KeptRollouts(tmp_path, limit).keep(1, scored_batch(["x"] * 8, [1.0] * 8, uids))
    assert len(rows_file(tmp_path, 1).read_text().splitlines()) == rows


def test_a_damaged_file_is_named(tmp_path):
    KeptRollouts(tmp_path, 8).keep(1, scored_batch(["x"], [1.0], ["a"]))
    folder = tmp_path / "rollouts" / "training"
    whole = (folder / "step_1.tokens.jsonl.gz").read_bytes()
    (folder / "step_1.tokens.jsonl.gz").write_bytes(whole[:-12])
    with pytest.raises(FileFormatError, match=r"step_1\.tokens\.jsonl\.gz"):
        load_tokens(tmp_path, 1)
    (folder / "step_1.jsonl").write_text(json.dumps({"uid": "a"}) + "\nnonsense\n")
    with pytest.raises(FileFormatError, match=r"step_1\.jsonl, line 2"):
        load_kept(tmp_path, 1)


def test_of_episodes_whole_conversations_are_kept(tmp_path):
    data = scored_batch(["abcd", "ab"], [1.0, 0.0], ["a", "a"])
    width = data["responses"].shape[1]
    data["response_mask"][0, 1] = 0
    data["input_ids"] = torch.cat([torch.full((2, 3), 7), data["responses"]], 1)
    data["mm_token_type_ids"] = torch.zeros_like(data["input_ids"]).to(torch.int8)
    data["mm_token_type_ids"][0, 1:3] = 1
    data["turn"] = torch.arange(width).expand(2, -1) // 2
    data["trajectory"] = objects(["a/0", "a/1"])
    data["new_row"] = objects(["", "tools"])
    KeptRollouts(tmp_path, 8, tiny_tokenizer()).keep(1, data)
    row, other = load_kept(tmp_path, 1)
    assert (row["trajectory"], row["new_row"], row["end_reason"]) == ("a/0", "", "done")
    assert (other["new_row"], other["parts"]) == ("tools", {"acc": 0.0, "format": 1.0})
    tokens = load_tokens(tmp_path, 1)[0]
    assert tokens["tokens"] == [7, 7, 7, *tiny_tokenizer().encode("abcd")]
    assert tokens["sampled"] == [0, 0, 0, 1, 0, 1, 1]
    assert tokens["media"] == [[1, 2]]
    assert tokens["turn"] == [None, None, None, 0, 0, 1, 1]
    assert tokens["rewards"] == [None, None, None, 0, 0, 0, 1]
    assert tokens["engine_log_probs"][:3] == [None, None, None]
    assert tokens["engine_log_probs"][3:] == pytest.approx([-0.1, -0.2, -0.3, -0.4])

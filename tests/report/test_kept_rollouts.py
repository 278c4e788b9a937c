"""Rollouts of training on disk: which rows, which fields, pictures once, and what a resumed run does."""

import json

import pytest
import torch
from PIL import Image

from dataproto import DataProto
from dataproto.errors import FileFormatError, InvalidConfig
from helpers.kept_runs import scored_batch
from helpers.tiny_prompts import tiny_tokenizer
from recipes.report.kept_rollouts import KeptRollouts, chosen_rows, kept_steps, load_kept, load_tokens


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
    with pytest.raises(InvalidConfig, match="keep_rollouts=-1"):
        KeptRollouts(tmp_path, -1)


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

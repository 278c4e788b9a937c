"""Recipes on a checkpoint without a vision tower, and rows without images: GRPO, SFT, the plan and the export."""

import json
import re

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from helpers.checkpoints import write_checkpoint
from helpers.geo3k_runs import REWARD, rows_of
from recipes.commands import main
from recipes.export import main as export

GRPO = (
    "--batch-size 4 --algorithm.n 3 --max-prompt-length 300 --max-response-length 6 --eval-rows 4 --optimizer.lr 1e-3"
    " --token-budget 600 --steps 2 --algorithm.kl-coef 0.1 --algorithm.minibatch 2 --save-every 0"
)
SFT = "--batch-size 6 --eval-rows 4 --max-response-length 5 --optimizer.lr 1e-3 --token-budget 200 --steps 4"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint("qwen3", tmp_path_factory.mktemp("qwen3"))


def written(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture(scope="module")
def problems(tmp_path_factory):
    rows = [
        {"problem": f"What is {number} + {number % 4}?", "answer": str(number + number % 4)} for number in range(20)
    ]
    return written(tmp_path_factory.mktemp("problems") / "sums.jsonl", rows)


@pytest.mark.slow
def test_grpo_trains_a_language_model_and_leaves_an_ordinary_checkpoint(checkpoint, problems, tmp_path):
    reward = tmp_path / "reward.py"
    reward.write_text(REWARD)
    paths = [
        "--preset",
        "any",
        "--model-path",
        checkpoint,
        "--data-path",
        problems,
        "--output-dir",
        str(tmp_path / "run"),
    ]
    assert main(["grpo", *paths, "--reward", f"{reward}:score", *GRPO.split()]) == 0
    rows = rows_of(tmp_path / "run")
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert rows[2]["actor/grad_norm"] > 0
    assert rows[2]["actor/kl_loss"] > 0
    assert rows[2]["training/rollout_probs_diff_max"] < 1e-4
    assert "<html" in (tmp_path / "run" / "report.html").read_text()

    assert export([str(tmp_path / "run" / "global_step_2"), str(tmp_path / "model"), "--dtype", "float32"]) == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    before = AutoModelForCausalLM.from_pretrained(checkpoint)
    assert type(model) is type(before)
    assert any(
        not torch.equal(ours, theirs) for ours, theirs in zip(model.parameters(), before.parameters(), strict=True)
    )
    ids = AutoTokenizer.from_pretrained(tmp_path / "model")("2 + 3")["input_ids"]
    assert ids == AutoTokenizer.from_pretrained(checkpoint)("2 + 3")["input_ids"]


@pytest.mark.slow
def test_sft_learns_conversations_without_images(checkpoint, tmp_path):
    talks = [
        [{"role": "user", "content": f"question {i}?"}, {"role": "assistant", "content": f"answer {'x' * (i % 5)}"}]
        for i in range(24)
    ]
    data = written(tmp_path / "talks.jsonl", [{"messages": talk} for talk in talks])
    paths = ["--preset", "any", "--model-path", checkpoint, "--data-path", data, "--output-dir", str(tmp_path / "run")]
    assert main(["sft", *paths, *SFT.split()]) == 0
    rows = rows_of(tmp_path / "run")
    assert rows[-1]["val/loss"] < rows[0]["val/loss"]


@pytest.mark.slow
def test_a_row_with_an_image_is_named_on_the_command_line(checkpoint, tmp_path, capsys):
    rows = [{"problem": f"What is {number}?", "answer": "1"} for number in range(8)]
    rows[3] = {"problem": "<image>What is this?", "answer": "1", "images": ["absent.png"]}
    data = written(tmp_path / "mixed.jsonl", rows)
    paths = ["--preset", "any", "--model-path", checkpoint, "--data-path", data, "--output-dir", str(tmp_path / "run")]
    assert main(["grpo", *paths, *GRPO.split(), "--batch-size", "5", "--algorithm.minibatch", "5"]) == 2
    said = capsys.readouterr().err
    assert re.search(r"row 3: line 4 of \S+: models of type qwen3 take no images; they read only text", said)


@pytest.mark.slow
def test_the_plan_forecasts_a_language_model(checkpoint, problems, capsys):
    paths = ["--preset", "any", "--model-path", checkpoint, "--data-path", problems]
    assert main(["plan", "grpo", *paths, *GRPO.split(), "--device", "h200"]) == 0
    assert "actor" in capsys.readouterr().out

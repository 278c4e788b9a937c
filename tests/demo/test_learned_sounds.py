"""A small thinker learns to name notes by GRPO, and cannot name those that it does not hear."""

import pytest
import torch

from helpers.engines import build_requests
from helpers.option_files import in_files
from recipes.commands import main
from recipes.demo.rows import ProblemRows
from rollout.engine import SamplingParams
from rollout.hf.engine import HFEngine
from rollout.prompts import PromptBuilder

ROWS = 256
GREEDY = SamplingParams(temperature=0, max_tokens=24)


def accuracy(builder, engine, rows):
    answers = engine.generate(build_requests(builder(rows), GREEDY), GREEDY)
    texts = {answer.request: builder.tokenizer.decode(answer.token_ids) for answer in answers}
    truths = [f"\\boxed{{{row['reward_model']['ground_truth']}}}" for row in rows]
    return sum(truth in texts[place] for place, truth in enumerate(truths)) / len(rows)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_notes_are_learned_from_the_sound(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    options = "--level notes --steps 100 --save-every 100 --eval-every 100 --optimizer.total-steps 250"
    assert main(["grpo", "--output-dir", str(tmp_path / "run"), *in_files(options.split(), tmp_path)]) == 0
    path = str(tmp_path / "run" / "global_step_100" / "actor" / "huggingface")
    builder, engine = PromptBuilder.from_pretrained(path, 256), HFEngine(path, device=torch.device("cpu"))
    rows = ProblemRows("notes", 0, "test")[:ROWS]
    others = [{**row, "audios": rows[place - 1]["audios"]} for place, row in enumerate(rows)]
    silent = [{**row, "audios": [(0 * row["audios"][0][0], 16_000)]} for row in rows]
    assert accuracy(builder, engine, rows) > 0.9
    chance = 1 / 7  # three standard errors of 256 rows are 0.066
    assert accuracy(builder, engine, others) < chance + 0.1
    assert accuracy(builder, engine, silent) < chance + 0.1
